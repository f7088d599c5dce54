"""Every field that OpenAI's SDK or vLLM's clients can send is honoured or refused by name: none is ignored."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as SdkChat
from openai.types.completion_create_params import CompletionCreateParamsBase as SdkCompletion

from services.gateway.generation import ValidRequest
from services.gateway.openai_types import ChatRequest, CompletionRequest
from tests.helpers.echo_generation import FakeGenerator, HttpAnswer, Step, front, logprobs_of, served, tokens

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# A value of each field that must change something, or be refused.
BOTH: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["no"],
    "best_of": 2,
    "cache_salt": "s",
    "early_stopping": True,
    "frequency_penalty": 0.5,
    "guided_choice": ["a"],
    "guided_decoding_backend": "outlines",
    "guided_grammar": "start: /a/",
    "guided_json": {},
    "guided_regex": "a",
    "guided_whitespace_pattern": " ",
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "kv_transfer_params": {},
    "length_penalty": 2.0,
    "logit_bias": {"7": 3},
    "logits_processors": ["x"],
    "max_tokens": 3,
    "metadata": {"a": "b"},
    "millrace": {"timeout_s": 3},
    "min_p": 0.1,
    "min_tokens": 1,
    "n": 2,
    "presence_penalty": 0.5,
    "priority": "batch",
    "prompt_logprobs": 1,
    "repetition_penalty": 1.5,
    "request_id": "mine",
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "safety_identifier": "someone",
    "seed": 8,
    "service_tier": "priority",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "add_special_tokens": False,
    "stop": "x",
    "stop_token_ids": [9],
    "store": True,
    "stream": True,
    "structured_outputs": {"regex": "a"},
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "truncate_prompt_tokens": 3,
    "use_beam_search": True,
    "user": "me",
}
CHAT = BOTH | {
    "add_generation_prompt": False,
    "audio": {"voice": "x"},
    "chat_template": "x",
    "chat_template_kwargs": {"enable_thinking": True},
    "continue_final_message": True,
    "documents": [{}],
    "echo": True,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "logprobs": True,
    "max_completion_tokens": 3,
    "messages": [{"role": "user", "content": "other"}],
    "mm_processor_kwargs": {},
    "modalities": ["audio"],
    "model": "tiny@v1",
    "moderation": {"model": "x"},
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "tool_choice": "required",
    "tools": [TOOL],
    "top_logprobs": 1,
    "verbosity": "low",
    "web_search_options": {},
}
COMPLETION = BOTH | {
    "echo": True,
    "logprobs": 1,
    "model": "tiny@v1",
    "prompt": "other",
    "prompt_embeds": "AAAA",
    "suffix": "end",
}
# Hints that ask for nothing which a client could see: requests with equal beginnings find each other's cache anyway.
HINTS = {"prompt_cache_key"}
# Of no use alone: tested with what they belong to.
COMPANIONS = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "parallel_tool_calls": {"tools": [TOOL]},
    "tool_choice": {"tools": [TOOL]},
}
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
TEMPLATE = "{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{{ reasoning_effort }}"


async def outcome(path: str, body: dict[str, Any]) -> tuple[HttpAnswer, str]:
    """The answer, and all that a field may change: what is asked of the engine and what the client reads."""

    def script(request: ValidRequest) -> list[Step]:
        asked = request.sampling
        values = logprobs_of([104, 105], top=2) if asked.HasField("logprob_count") else ()
        choices = range(asked.choice_count)
        return [tokens([104, 105], choice=choice, logprobs=values, finish=2) for choice in choices]

    generator = FakeGenerator(script)
    answer = await front(generator, served(template=TEMPLATE)).ask("POST", path, body)
    fields = (field.name for field in dataclasses.fields(ValidRequest))
    names = [name for name in fields if name not in ("model", "request_id", "again")]
    seen = [[getattr(request, name) for name in names] for _, request in generator.requests]
    return answer, f"{seen} {answer.body.decode()}"


async def assert_honoured_or_refused(path: str, field: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    base, base_seen = await outcome(path, before)
    answer, seen = await outcome(path, after)
    assert base.status == 200, base.body

    if answer.status == 200:
        assert seen != base_seen, f"{field} changes nothing"
    else:
        assert answer.status == 400, answer.body
        assert str(answer.error["param"]).startswith(field), answer.error


@pytest.mark.parametrize("field", sorted(CHAT))
async def test_a_field_of_a_chat_is_honoured_or_refused_by_name(field: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 7, "max_tokens": 9}
    before = body | COMPANIONS.get(field, {})
    if field == "max_completion_tokens":
        del before["max_tokens"]
    if field == "model":
        body["model"] = "nobody"
        assert (await outcome("/v1/chat/completions", body))[0].status == 404
        return
    await assert_honoured_or_refused("/v1/chat/completions", field, before, before | {field: CHAT[field]})


@pytest.mark.parametrize("field", sorted(set(COMPLETION) - {"model"}))
async def test_a_field_of_a_completion_is_honoured_or_refused_by_name(field: str) -> None:
    before = {"model": "tiny", "prompt": "hi", "seed": 7, "max_tokens": 9} | COMPANIONS.get(field, {})
    await assert_honoured_or_refused("/v1/completions", field, before, before | {field: COMPLETION[field]})


@pytest.mark.parametrize("option", STREAM_OPTIONS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_option_of_a_stream_is_honoured_or_refused_by_name(path: str, option: str) -> None:
    before: dict[str, Any] = {"model": "tiny", "seed": 7, "max_tokens": 9, "stream": True}
    before |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    after = before | {"stream_options": {option: True}}

    await assert_honoured_or_refused(path, "stream_options", before, after)


@pytest.mark.parametrize("hint", sorted(HINTS))
async def test_a_hint_is_taken_and_nothing_but_a_field_makes_a_difference(hint: str) -> None:
    body = {"model": "tiny", "prompt": "hi", "seed": 7}

    assert (await outcome("/v1/completions", body))[1] == (await outcome("/v1/completions", body | {hint: "x"}))[1]


def test_the_tables_hold_every_field_of_the_sdk_and_of_our_types() -> None:
    for known, table in (
        ({*SdkChat.__annotations__, *ChatRequest.__struct_fields__}, CHAT),
        ({*SdkCompletion.__annotations__, *CompletionRequest.__struct_fields__}, COMPLETION),
    ):
        assert known - set(table) == HINTS | {"stream_options"}


async def test_usage_in_every_chunk_is_asked_for_and_given() -> None:
    body = {"model": "tiny", "prompt": "hi", "stream": True, "stream_options": {"continuous_usage_stats": True}}

    answer, _ = await outcome("/v1/completions", body)

    counts = [json.loads(frame)["usage"]["completion_tokens"] for frame in answer.frames[:-1]]
    assert counts[-1] == 2
    assert counts == sorted(counts)
