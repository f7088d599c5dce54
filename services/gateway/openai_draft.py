"""OpenAI bodies → RequestDraft: gives known fields their meaning and refuses what is known but not served.

Nothing is ignored in silence: a field with an unserved value is a 400 that names it. Pure; called by the HTTP door.
"""

from __future__ import annotations

import dataclasses

import msgspec
from millrace.common.v1 import common_pb2

from services.common.errors import InvalidRequest, Unsupported
from services.gateway.chat_draft import chat_prompt
from services.gateway.chat_template import JsonValue
from services.gateway.json_body import decode_raw
from services.gateway.known_fields import refuse_raw
from services.gateway.openai_types import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    ResponseFormat,
)
from services.gateway.request_draft import (
    GrammarDraft,
    Prompt,
    RequestDraft,
    SamplingDraft,
    TextPrompt,
    TokenPrompt,
)

# Raw fields and the only values of them that are served; null always means absent.
_ONLY: dict[str, tuple[JsonValue, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "suffix": ("",),
    "guided_decoding_backend": ("auto", "guidance", "llguidance"),
}


def chat_draft(body: ChatRequest) -> RequestDraft:
    """The draft of a chat completion. Raises InvalidRequest, Unsupported."""
    refuse_raw(body, "", _ONLY, _GRAMMAR_FIELDS)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequest("`max_tokens` and `max_completion_tokens` differ.", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _draft(body, chat_prompt(body), most, (body.top_logprobs or 0) if body.logprobs else None)


def completion_draft(body: CompletionRequest) -> RequestDraft:
    """The draft of a text completion. Raises InvalidRequest, Unsupported."""
    only = {name: values for name, values in _ONLY.items() if name != "echo"}
    refuse_raw(body, "", only, _GRAMMAR_FIELDS)
    draft = _draft(body, _text_prompt(body.prompt), body.max_tokens, body.logprobs)
    if not body.echo:
        return draft
    if body.logprobs is not None:
        draft = dataclasses.replace(draft, sampling=dataclasses.replace(draft.sampling, prompt_logprobs=body.logprobs))
    return dataclasses.replace(draft, echo=True)


def _draft(body: GenerationBody, prompt: Prompt, max_tokens: int | None, logprobs: int | None) -> RequestDraft:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream: true`.", param="stream_options")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        field = "stream_options.include_obfuscation"
        raise Unsupported(f"`{field}` is not supported.", param=field)
    own = body.millrace
    return RequestDraft(
        model=body.model,
        prompt=prompt,
        sampling=SamplingDraft(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            seed=body.seed,
            n=body.n,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            ignore_eos=bool(body.ignore_eos),
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            repetition_penalty=body.repetition_penalty,
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
            logit_bias=tuple((_token_key(k), v) for k, v in (body.logit_bias or {}).items()),
            bad_words=tuple(body.bad_words or ()),
            logprobs=logprobs,
            grammar=_grammar(body),
        ),
        # OpenAI's later name of the same label.
        user=body.user or body.safety_identifier or "",
        # Where the header names no session: what shares a prefix goes where that is cached.
        session=body.prompt_cache_key or "",
        metadata=body.metadata or {},
        priority_class=(
            common_pb2.PRIORITY_CLASS_BATCH if body.priority == "batch" else common_pb2.PRIORITY_CLASS_INTERACTIVE
        ),
        resume_policy=(
            common_pb2.RESUME_POLICY_FAIL
            if own is not None and own.resume == "fail"
            else common_pb2.RESUME_POLICY_RESUME
        ),
        timeout_s=None if own is None else own.timeout_s,
    )


def served_values(name: str) -> tuple[JsonValue, ...] | None:
    """The values of a field kept as it came that are served beside null; None where its value is parsed further on."""
    return None if name in _GRAMMAR_FIELDS else _ONLY.get(name, ())


def _text_prompt(prompt: str | list[str | int | list[int]] | None) -> Prompt:
    if prompt is None:
        raise InvalidRequest("`prompt` is required.", param="prompt")
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return TokenPrompt(tuple(ids))
    if len(prompt) != 1:
        raise Unsupported("`prompt` takes one prompt a request; send several requests.", param="prompt")
    only = prompt[0]
    return TextPrompt(only) if isinstance(only, str) else TokenPrompt(tuple(only if isinstance(only, list) else ()))


def _token_key(text: str) -> int:
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 12:
        raise InvalidRequest("`logit_bias` keys are token ids.", param="logit_bias")
    return int(text)


_GRAMMAR_FIELDS = frozenset({"guided_json", "json", "schema"})


def _grammar(body: GenerationBody) -> GrammarDraft | None:
    found = [*_guided(body), *_structured(body)]
    if body.response_format is not None:
        found += _response_format(body.response_format)
    if len(found) > 1:
        fields = " and ".join(f"`{g.field}`" for g in found)
        raise InvalidRequest(f"{fields} exclude each other.", param=found[1].field)
    return found[0] if found else None


def _guided(body: GenerationBody) -> list[GrammarDraft]:
    found = []
    if bytes(body.guided_json) not in (b"", b"null"):
        found.append(_schema(body.guided_json, "guided_json"))
    if body.guided_regex is not None:
        found.append(GrammarDraft(common_pb2.GRAMMAR_KIND_REGEX, "guided_regex", body.guided_regex))
    if body.guided_choice is not None:
        found.append(GrammarDraft(common_pb2.GRAMMAR_KIND_CHOICE, "guided_choice", choices=tuple(body.guided_choice)))
    if body.guided_grammar is not None:
        found.append(GrammarDraft(common_pb2.GRAMMAR_KIND_LARK, "guided_grammar", body.guided_grammar))
    return found


def _structured(body: GenerationBody) -> list[GrammarDraft]:
    sent = body.structured_outputs
    if sent is None:
        return []
    found, at = [], "structured_outputs"
    if bytes(sent.json) not in (b"", b"null"):
        found.append(_schema(sent.json, f"{at}.json"))
    if sent.regex is not None:
        found.append(GrammarDraft(common_pb2.GRAMMAR_KIND_REGEX, f"{at}.regex", sent.regex))
    if sent.choice is not None:
        found.append(GrammarDraft(common_pb2.GRAMMAR_KIND_CHOICE, f"{at}.choice", choices=tuple(sent.choice)))
    if sent.grammar is not None:
        found.append(GrammarDraft(common_pb2.GRAMMAR_KIND_LARK, f"{at}.grammar", sent.grammar))
    if sent.json_object:
        found.append(GrammarDraft(common_pb2.GRAMMAR_KIND_JSON_OBJECT, f"{at}.json_object"))
    return found


def _response_format(sent: ResponseFormat) -> list[GrammarDraft]:
    if sent.type == "text":
        return []
    if sent.type == "json_object":
        return [GrammarDraft(common_pb2.GRAMMAR_KIND_JSON_OBJECT, "response_format")]
    if sent.type != "json_schema":
        message = "`response_format.type` must be text, json_object or json_schema."
        raise InvalidRequest(message, param="response_format.type")
    if sent.json_schema is None or bytes(sent.json_schema.schema) in (b"", b"null"):
        message = "`response_format.json_schema.schema` is required."
        raise InvalidRequest(message, param="response_format.json_schema.schema")
    return [_schema(sent.json_schema.schema, "response_format.json_schema.schema")]


def _schema(raw: msgspec.Raw, field: str) -> GrammarDraft:
    value = decode_raw(raw, field)
    # vLLM's clients also send the schema as a string.
    text = value if isinstance(value, str) else bytes(raw).decode()
    return GrammarDraft(common_pb2.GRAMMAR_KIND_JSON_SCHEMA, field, text)
