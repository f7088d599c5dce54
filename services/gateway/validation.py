"""The one validator of both doors: RequestDraft → ValidRequest, every value inside its limit, tokenised.

Refuses with the field named. Cheap checks first; long texts are encoded in a thread. Never touches Redis or workers.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from array import array
from collections.abc import Mapping, Sequence

from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_types import KeyRecord, LengthCap
from services.common.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Unsupported
from services.common.lifecycle import new_ulid
from services.common.routes import Target
from services.gateway.chat_template import guarded_variables
from services.gateway.generation import ModelDirectory, RouteAsk, ServedModel, ValidRequest, WorkClass
from services.gateway.grammar_checker import GrammarChecker
from services.gateway.limits import Limits
from services.gateway.metering import length_class
from services.gateway.reasoning import reasoning_settings
from services.gateway.request_draft import ChatPrompt, GrammarDraft, Prompt, RequestDraft, SamplingDraft, TextPrompt
from services.gateway.template_renderer import TemplateRenderer
from services.gateway.tool_checks import check_conversation, check_tools
from services.gateway.tool_grammar import with_tool_grammar
from services.gateway.tool_prompt import ToolPrompts
from services.gateway.tools import NO_TOOLS

_INT64 = 1 << 63
_INT32_MAX = (1 << 31) - 1


class Validator:
    """Holds what validation needs; one for both doors."""

    def __init__(
        self,
        directory: ModelDirectory,
        renderer: TemplateRenderer,
        grammars: GrammarChecker,
        limits: Limits | None = None,
    ) -> None:
        self._directory = directory
        self._renderer = renderer
        self._tool_prompts = ToolPrompts(renderer)
        self._grammars = grammars
        self.limits = limits if limits is not None else Limits()

    async def validate(self, key: KeyRecord, draft: RequestDraft) -> ValidRequest:
        """Raises InvalidRequest, ContextLengthExceeded, Unsupported, ModelNotFound, NoWorker."""
        return await self._validate(key, draft, new_ulid())

    async def _validate(self, key: KeyRecord, sent: RequestDraft, request_id: str) -> ValidRequest:
        limits, draft = self.limits, sent
        session = draft.session or draft.user
        model = self.resolve(key, draft.model, f"{key.tenant}\0{session}" if session else request_id)
        chat = draft.prompt if isinstance(draft.prompt, ChatPrompt) else None
        cap = cap_of(key, model.card.model)
        if chat is not None:
            check_tools(chat.tools, limits)
            draft = with_tool_grammar(draft)
        _check_caps(cap, draft, 0 if chat is None else len(chat.tools.tools))
        _check_labels(draft, limits)
        _check_sampling(draft.sampling, limits, model.card.vocab_size)
        await self._check_grammar(key, model, draft.sampling.grammar)
        timeout_s = limits.default_timeout_s if draft.timeout_s is None else draft.timeout_s
        if not 0 < timeout_s <= limits.timeout_s:
            raise InvalidRequest(f"`timeout_s` must be above 0 and at most {limits.timeout_s:g}.", param="timeout_s")
        prompt = await self.tokenise(model, draft.prompt)
        max_tokens = self._check_fit(model, draft, len(prompt), _bounds(key, model.card))
        bad_words = [model.tokenizer.encode(word) for word in draft.sampling.bad_words]
        reasoning = model.reasoning if chat is not None else None
        priority = common_pb2.PRIORITY_CLASS_BATCH if key.batch_only else draft.priority_class
        sizes = WorkClass(priority, length_class(len(prompt), max_tokens))
        return ValidRequest(
            model=self._directory.place(model, key.tenant, sizes),
            prompt_token_ids=prompt,
            sampling=_sampling(draft.sampling, max_tokens, bad_words),
            stop=tuple(stop for stop in draft.sampling.stop if stop),
            priority_class=draft.priority_class,
            resume_policy=draft.resume_policy,
            timeout_s=timeout_s,
            user=draft.user,
            metadata=draft.metadata,
            echo=draft.echo,
            tools=NO_TOOLS if chat is None else chat.tools,
            reasoning=reasoning,
            starts_in_reasoning=reasoning is not None and reasoning.opened_by(prompt, model.tokenizer),
            request_id=request_id,
            route="" if "@" in draft.model else draft.model,
            again=functools.partial(self._validate, key, sent, request_id),
        )

    async def _check_grammar(self, key: KeyRecord, model: ServedModel, grammar: GrammarDraft | None) -> None:
        if grammar is None:
            return
        if not model.card.structured_output:
            field = grammar.field
            raise Unsupported(f"`{field}`: structured output is not supported by this model.", param=field)
        await self._grammars.check(key.tenant, grammar, self.limits)

    def resolve(self, key: KeyRecord, name: str, sticky: str | None = None) -> ServedModel:
        """The model that the key may use: one version for one `sticky` text. Raises ModelNotFound, NoWorker."""
        if len(name.encode()) > self.limits.model_name_bytes:
            raise ModelNotFound("There is no such model.", param="model")
        allowed = functools.partial(may_use, key, name)
        model = self._directory.resolve(name, RouteAsk(key.tenant, sticky, allowed))
        if not allowed(Target(model.card.model.model, model.card.model.version)):
            raise ModelNotFound(f"There is no model `{name}`.", param="model")
        return model

    async def tokenise(self, model: ServedModel, prompt: Prompt, *, add_bos: bool = True) -> array[int]:
        """Ids of a prompt, with the model's BOS. Raises InvalidRequest, ContextLengthExceeded, Unsupported."""
        card = model.card
        most_bytes = card.max_model_len * max(1, card.longest_token_byte_count)
        if isinstance(prompt, ChatPrompt):
            ids = await self._encode_chat(model, prompt, most_bytes)
        elif isinstance(prompt, TextPrompt):
            ids = await self._encode_text(model, prompt, most_bytes)
        else:
            check_ids(prompt.field, prompt.token_ids, card.vocab_size)
            ids = array("I", prompt.token_ids)
        if not ids:
            raise InvalidRequest(f"`{prompt.field}` is empty.", param=prompt.field)
        if add_bos and card.add_bos and card.HasField("bos_token_id") and ids[0] != card.bos_token_id:
            ids.insert(0, card.bos_token_id)
        return ids

    async def _encode_chat(self, model: ServedModel, prompt: ChatPrompt, most_bytes: int) -> array[int]:
        if not prompt.messages:
            raise InvalidRequest("`messages` is empty.", param="messages")
        if len(prompt.messages) > self.limits.messages:
            raise InvalidRequest(f"`messages` takes at most {self.limits.messages} messages.", param="messages")
        if model.template is None:
            raise Unsupported("This model has no chat template; use /v1/completions.", param="messages")
        check_conversation(prompt.messages)
        settings = reasoning_settings(prompt.reasoning_effort, prompt.template_settings, model.reasoning)
        size = sum(len(str(message.get("content", "")).encode()) for message in prompt.messages)
        _check_bytes("messages", size, most_bytes, model.card.max_model_len)
        shown = await self._tool_prompts.shown(model.template, prompt)
        guarded = guarded_variables(
            model.template,
            shown.messages,
            tools=shown.tools,
            special_texts=model.tokenizer.special_texts,
            allowed=settings,
        )
        rendered = await self._renderer.render(model.template, guarded)
        if len(rendered) > self.limits.inline_encode_bytes:
            return await asyncio.to_thread(model.tokenizer.encode_rendered, rendered, guarded.guard)
        return model.tokenizer.encode_rendered(rendered, guarded.guard)

    async def _encode_text(self, model: ServedModel, prompt: TextPrompt, most_bytes: int) -> array[int]:
        text = prompt.text
        if not text:
            raise InvalidRequest(f"`{prompt.field}` is empty.", param=prompt.field)
        size = len(text.encode("utf-8", "surrogatepass"))
        _check_bytes(prompt.field, size, most_bytes, model.card.max_model_len)
        if size > self.limits.inline_encode_bytes:
            return await asyncio.to_thread(model.tokenizer.encode, text)
        return model.tokenizer.encode(text)

    def _check_fit(
        self, model: ServedModel, draft: RequestDraft, prompt_count: int, bounds: tuple[LengthCap, int]
    ) -> int:
        """Largest output in tokens. The rule: prompt + output <= max_model_len, exactly, each within the key's cap, and
        all within the KV blocks that its tenant may hold."""
        cap, blocks = bounds
        card, limits, sent = model.card, self.limits, draft.sampling.max_tokens
        chat = isinstance(draft.prompt, ChatPrompt)
        # What the model holds, and what fits into those blocks: a request past either could never run.
        context = min(card.max_model_len, blocks * card.block_size)
        room = context - prompt_count
        default = limits.default_chat_tokens if chat else limits.default_completion_tokens
        if cap.prompt_tokens is not None and prompt_count > cap.prompt_tokens:
            message = f"The prompt has {prompt_count} tokens; this key may send {cap.prompt_tokens} to this model."
            raise InvalidRequest(message, param=draft.prompt.field)
        most = default if cap.output_tokens is None else min(default, cap.output_tokens)
        wanted = min(most, max(room, 1)) if sent is None else sent
        if cap.output_tokens is not None and wanted > cap.output_tokens:
            message = f"`max_tokens` is {wanted}; this key may ask this model for {cap.output_tokens}."
            raise InvalidRequest(message, param="max_tokens")
        if wanted > context:
            message = f"`max_tokens` is {wanted}; this model's context is {context} tokens."
            raise InvalidRequest(message, param="max_tokens")
        if wanted > room:
            raise ContextLengthExceeded(
                f"The prompt has {prompt_count} tokens and up to {wanted} are asked for: {prompt_count + wanted} "
                f"is more than this model's context of {context} tokens.",
                param=draft.prompt.field,
            )
        if (draft.sampling.min_tokens or 0) > wanted:
            raise InvalidRequest(f"`min_tokens` is larger than the {wanted} tokens asked for.", param="min_tokens")
        return wanted


def may_use(key: KeyRecord, name: str, target: Target) -> bool:
    """Whether the key may use this version under this name."""
    return not key.models or not {name, target.model, str(target)}.isdisjoint(key.models)


def _bounds(key: KeyRecord, card: worker_service_pb2.ModelCard) -> tuple[LengthCap, int]:
    """The key's cap for this model, and the most KV blocks of a worker that one request may take."""
    most = card.block_count if key.worker_blocks is None else min(card.block_count, key.worker_blocks)
    return cap_of(key, card.model), most


def cap_of(key: KeyRecord, model: common_pb2.ModelRef) -> LengthCap:
    """The cap of this version, else of the model, else of all models."""
    caps = key.length_caps
    found = (caps[name] for name in (f"{model.model}@{model.version}", model.model, "*") if name in caps)
    return next(found, LengthCap())


def _check_caps(cap: LengthCap, draft: RequestDraft, tool_count: int) -> None:
    choices = 1 if draft.sampling.n is None else draft.sampling.n
    for field, wanted, most in (("n", choices, cap.choices), ("tools", tool_count, cap.tools)):
        if most is not None and wanted > most:
            raise InvalidRequest(f"`{field}` asks for {wanted}; this key may ask this model for {most}.", param=field)


def _check_bytes(field: str, size: int, most: int, context: int) -> None:
    if size > most:
        raise ContextLengthExceeded(
            f"`{field}` has {size} bytes, which no tokenisation fits into this model's context of {context} tokens.",
            param=field,
        )


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest for an id outside the vocabulary."""
    if any(not 0 <= i < vocab_size for i in ids):
        raise InvalidRequest(f"`{field}` has a token id outside 0 … {vocab_size - 1}.", param=field)


def _check_labels(draft: RequestDraft, limits: Limits) -> None:
    if len(draft.user.encode()) > limits.user_bytes:
        raise InvalidRequest(f"`user` takes at most {limits.user_bytes} bytes.", param="user")
    check_metadata(draft.metadata, limits)


def check_metadata(metadata: Mapping[str, str], limits: Limits) -> None:
    """Raises InvalidRequest for too many or too long labels."""
    if len(metadata) > limits.metadata_entries:
        raise InvalidRequest(f"`metadata` takes at most {limits.metadata_entries} entries.", param="metadata")
    for name, value in metadata.items():
        if len(name.encode()) > limits.metadata_key_bytes or len(value.encode()) > limits.metadata_value_bytes:
            sizes = f"{limits.metadata_key_bytes} bytes, values {limits.metadata_value_bytes}"
            raise InvalidRequest(f"`metadata` keys take at most {sizes}.", param="metadata")


def _check_sampling(sent: SamplingDraft, limits: Limits, vocab_size: int) -> None:
    for name, low, high in (
        ("temperature", 0.0, 2.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.01, 10.0),
        ("frequency_penalty", -2.0, 2.0),
        ("presence_penalty", -2.0, 2.0),
        ("top_k", -1, vocab_size),
        ("n", 1, limits.choices),
        ("max_tokens", 1, _INT32_MAX),
        ("min_tokens", 0, _INT32_MAX),
        ("seed", -_INT64, 2 * _INT64 - 1),
        ("logprobs", 0, limits.top_logprobs),
    ):
        value = getattr(sent, name)
        # Written as what is allowed, so that NaN is not.
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"`{name}` must be between {low} and {high}.", param=name)
    if len(sent.stop) > limits.stop_strings:
        raise InvalidRequest(f"`stop` takes at most {limits.stop_strings} strings.", param="stop")
    if any(len(stop.encode()) > limits.stop_string_bytes for stop in sent.stop):
        raise InvalidRequest(f"A `stop` string takes at most {limits.stop_string_bytes} bytes.", param="stop")
    if len(sent.stop_token_ids) > limits.stop_token_ids:
        raise InvalidRequest(f"`stop_token_ids` takes at most {limits.stop_token_ids} ids.", param="stop_token_ids")
    check_ids("stop_token_ids", sent.stop_token_ids, vocab_size)
    if len(sent.logit_bias) > limits.logit_bias_entries:
        raise InvalidRequest(f"`logit_bias` takes at most {limits.logit_bias_entries} entries.", param="logit_bias")
    check_ids("logit_bias", [token_id for token_id, _ in sent.logit_bias], vocab_size)
    if any(not abs(bias) <= limits.logit_bias_value for _, bias in sent.logit_bias):
        raise InvalidRequest("`logit_bias` values must be between -100 and 100.", param="logit_bias")
    if len(sent.bad_words) > limits.bad_words:
        raise InvalidRequest(f"`bad_words` takes at most {limits.bad_words} words.", param="bad_words")
    if any(not 0 < len(word.encode()) <= limits.bad_word_bytes for word in sent.bad_words):
        raise InvalidRequest(f"A bad word has 1 to {limits.bad_word_bytes} bytes.", param="bad_words")


def _sampling(sent: SamplingDraft, max_tokens: int, bad_words: list[array[int]]) -> common_pb2.SamplingParams:
    seed = secrets.randbits(63) if sent.seed is None else sent.seed
    grammar = sent.grammar
    return common_pb2.SamplingParams(
        temperature=_or(sent.temperature, 1.0),
        top_p=_or(sent.top_p, 1.0),
        top_k=max(0, sent.top_k or 0),
        min_p=_or(sent.min_p, 0.0),
        seed=seed - 2 * _INT64 if seed >= _INT64 else seed,
        choice_count=1 if sent.n is None else sent.n,
        max_token_count=max_tokens,
        min_token_count=sent.min_tokens or 0,
        ignore_eos=sent.ignore_eos,
        stop_token_ids=sent.stop_token_ids,
        repetition_penalty=_or(sent.repetition_penalty, 1.0),
        frequency_penalty=_or(sent.frequency_penalty, 0.0),
        presence_penalty=_or(sent.presence_penalty, 0.0),
        logit_bias=[common_pb2.LogitBias(token_id=i, bias=b) for i, b in sent.logit_bias],
        bad_words=[common_pb2.TokenIds(token_ids=word) for word in bad_words if word],
        logprob_count=sent.logprobs,
        prompt_logprob_count=sent.prompt_logprobs,
        grammar=(
            None
            if grammar is None
            else common_pb2.Grammar(kind=grammar.kind, text=grammar.text, choices=grammar.choices)
        ),
        embed=sent.embed,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
