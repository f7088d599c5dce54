"""The one validator: each limit at its value and one past it; zero is a value; ids inside the vocabulary."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from services.common.admission_types import LengthCap
from services.common.errors import InvalidRequest
from services.gateway.grammar_checker import GrammarChecker
from services.gateway.limits import Limits
from services.gateway.openai_draft import chat_draft, completion_draft
from services.gateway.openai_types import ChatRequest, CompletionRequest
from services.gateway.validation import Validator
from tests.helpers.echo_generation import (
    FakeDirectory,
    FakeGenerator,
    FakeKeyRing,
    HttpAnswer,
    InlineRenderer,
    front,
    key,
    one_by_one,
    served,
)

LIMITS = Limits()
VERSION = f"tiny@{served().card.model.version}"
VOCABULARY = served().tokenizer.vocab_size


async def complete(**fields: object) -> tuple[HttpAnswer, FakeGenerator]:
    generator = FakeGenerator(
        lambda request: [
            event for choice in range(request.sampling.choice_count) for event in one_by_one([65], choice=choice)
        ]
    )
    return await front(generator).complete(**fields), generator


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("n", 8, 9),
        ("n", 1, 0),
        ("n", 1, -1),
        ("stop", ["a", "b", "c", "d"], ["a", "b", "c", "d", "e"]),
        ("stop", "x" * 256, "x" * 257),
        ("stop", "é" * 128, "é" * 128 + "x"),
        ("stop_token_ids", [1] * 64, [1] * 65),
        ("stop_token_ids", [VOCABULARY - 1], [VOCABULARY]),
        ("stop_token_ids", [0], [-1]),
        ("logit_bias", {"0": 100}, {"0": 100.5}),
        ("logit_bias", {"0": -100}, {"0": -101}),
        ("logit_bias", {str(VOCABULARY - 1): 1}, {str(VOCABULARY): 1}),
        ("logit_bias", {"0": 0}, {"-1": 0}),
        ("bad_words", ["x"] * 32, ["x"] * 33),
        ("bad_words", ["x" * 64], ["x" * 65]),
        ("bad_words", ["x"], [""]),
        ("logprobs", 20, 21),
        ("logprobs", 0, -1),
        ("metadata", {str(i): "v" for i in range(16)}, {str(i): "v" for i in range(17)}),
        ("metadata", {"k" * 64: "v" * 512}, {"k" * 65: "v"}),
        ("metadata", {"k": "é" * 256}, {"k": "é" * 256 + "x"}),
        ("user", "u" * 512, "u" * 513),
        ("temperature", 2, 2.01),
        ("temperature", 0, -0.01),
        ("top_p", 1, 1.01),
        ("top_p", 0, -0.01),
        ("min_p", 1, 1.01),
        ("top_k", -1, -2),
        ("frequency_penalty", 2, 2.1),
        ("presence_penalty", -2, -2.1),
        ("repetition_penalty", 0.01, 0),
        ("seed", 2**64 - 1, 2**64),
        ("seed", -(2**63), -(2**63) - 1),
        ("max_tokens", 1, 0),
        ("max_tokens", 4_094, 4_097),
        ("max_tokens", 1, 10**30),
        ("min_tokens", 16, 17),
        ("min_tokens", 0, -1),
        ("millrace", {"timeout_s": 3_600}, {"timeout_s": 3_600.1}),
        ("millrace", {"timeout_s": 0.1}, {"timeout_s": 0}),
        ("prompt", "x", ""),
        ("prompt", ["x"], [""]),
        ("prompt", [1], []),
        ("prompt", [[1]], [[]]),
        ("prompt", [VOCABULARY - 1], [VOCABULARY]),
        ("prompt", [0], [-1]),
        ("prompt", [0], [2**40]),
        ("prompt", ["a"], ["a", "b"]),
        ("prompt", "x", None),
        ("best_of", 1, 2),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("guided_regex", None, "a+"),
        ("stream_options", None, {"include_usage": True}),
    ],
)
async def test_a_limit_holds_at_its_value_and_not_one_past_it(field: str, good: object, bad: object) -> None:
    fine, _ = await complete(**{field: good})
    refused, generator = await complete(**{field: bad})

    assert fine.status == 200, fine.body
    assert refused.status == 400
    assert (refused.error["param"] or "").split(".")[-1] in (field, "timeout_s", "type")
    assert len(refused.body) < 600
    assert generator.requests == []


@pytest.mark.parametrize("extra", [0, 1])
async def test_logit_bias_takes_so_many_entries(extra: int) -> None:
    model = served(words=[f"w{i}" for i in range(1_000)])
    bias = {str(i): 1 for i in range(LIMITS.logit_bias_entries + extra)}

    answer = await front(FakeGenerator(one_by_one([65])), model).complete(logit_bias=bias)

    assert answer.status == (400 if extra else 200)


@pytest.mark.parametrize(("tokens", "status"), [(4_093, 200), (4_094, 200), (4_095, 400)])
async def test_prompt_and_output_fit_the_context_exactly(tokens: int, status: int) -> None:
    answer, _ = await complete(prompt="hi", max_tokens=tokens)

    assert answer.status == status
    if status == 400:
        assert answer.error["code"] == "CONTEXT_LENGTH_EXCEEDED"
        assert all(number in answer.error["message"] for number in ("2", "4095", "4097", "4096"))


async def test_what_no_pool_of_blocks_can_hold_is_refused_at_once() -> None:
    small = front(FakeGenerator(one_by_one([65])), served(block_count=2))

    assert (await small.complete(prompt="x" * 16, max_tokens=16)).status == 200
    assert (await small.complete(prompt="x" * 16, max_tokens=17)).status == 400


async def test_what_the_blocks_of_its_tenant_cannot_hold_is_refused_at_once() -> None:
    capped = FakeKeyRing(secret=dataclasses.replace(key(), worker_blocks=2))
    small = front(FakeGenerator(one_by_one([65])), keyring=capped)

    assert (await small.complete(prompt="x" * 16, max_tokens=16)).status == 200
    assert (await small.complete(prompt="x" * 16, max_tokens=17)).status == 400


async def test_a_prompt_of_the_whole_context_has_no_room_for_an_answer() -> None:
    answer, _ = await complete(prompt="x" * 4_096)

    assert answer.error["code"] == "CONTEXT_LENGTH_EXCEEDED"


async def test_a_text_that_no_tokenisation_fits_is_refused_by_its_size() -> None:
    answer, _ = await complete(prompt="x" * (4_096 * 16 + 1))

    assert answer.error["code"] == "CONTEXT_LENGTH_EXCEEDED"


async def test_zero_is_a_value_and_never_replaced_by_a_default() -> None:
    _, generator = await complete(temperature=0, top_p=0, seed=0, min_p=0, top_k=0, logprobs=0, frequency_penalty=0)

    sampling = generator.requests[0][1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0, 0, 0, 0)
    assert sampling.HasField("logprob_count")


async def test_null_is_absent_for_every_optional_field() -> None:
    names = ["max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "user", "stream", "logprobs",
             "stop_token_ids", "metadata", "min_tokens", "best_of", "echo", "suffix", "stream_options"]  # fmt: skip

    answer, generator = await complete(**dict.fromkeys(names))

    assert answer.status == 200
    assert generator.requests[0][1].sampling.max_token_count == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]},
         "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"chat_template": "{{ 7*7 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"echo": True}, "echo"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"n": 0, "stream": True}, "n"),
    ],
)  # fmt: skip
async def test_a_chat_that_cannot_be_served_is_refused_before_it_starts(fields: dict[str, object], param: str) -> None:
    generator = FakeGenerator(one_by_one([65]))

    answer = await front(generator).chat(**fields)

    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["param"] == param
    assert generator.requests == []


@pytest.mark.parametrize("extra", [0, 1])
async def test_messages_are_limited_in_number(extra: int) -> None:
    big = front(FakeGenerator(one_by_one([65])), served(context=100_000))

    answer = await big.chat(messages=[{"role": "user", "content": "x"}] * (LIMITS.messages + extra), max_tokens=1)

    assert answer.status == (400 if extra else 200)


async def test_a_bos_token_is_there_once() -> None:
    model = served(add_bos=True, bos_token_id=1)
    generator = FakeGenerator(one_by_one([65]))

    await front(generator, model).complete(prompt="ab")
    await front(generator, model).complete(prompt=[1, 97])

    assert [list(request.prompt_token_ids) for _, request in generator.requests] == [[1, 97, 98], [1, 97]]


@pytest.mark.parametrize(
    ("caps", "fields", "param"),
    [
        ({"*": LengthCap(prompt_tokens=2)}, {"prompt": "hi"}, None),
        ({"*": LengthCap(prompt_tokens=1)}, {"prompt": "hi"}, "prompt"),
        ({"*": LengthCap(output_tokens=5)}, {"max_tokens": 5}, None),
        ({"*": LengthCap(output_tokens=5)}, {"max_tokens": 6}, "max_tokens"),
        ({"*": LengthCap(output_tokens=1), "tiny": LengthCap(output_tokens=9)}, {"max_tokens": 9}, None),
        ({"tiny": LengthCap(output_tokens=9), VERSION: LengthCap(output_tokens=3)}, {"max_tokens": 4}, "max_tokens"),
        ({"other": LengthCap(1, 1)}, {"max_tokens": 50}, None),
        ({"*": LengthCap(choices=2)}, {"n": 2}, None),
        ({"*": LengthCap(choices=2)}, {"n": 3}, "n"),
        ({"*": LengthCap(tools=0)}, {}, None),
    ],
)
async def test_a_keys_length_cap_holds_at_its_value_and_not_one_past_it(
    caps: dict[str, LengthCap], fields: dict[str, object], param: str | None
) -> None:
    key_of_caps = dataclasses.replace(key(), length_caps=caps)
    draft = completion_draft(msgspec.convert({"model": "tiny", "prompt": "hi"} | fields, CompletionRequest))
    validator = Validator(FakeDirectory(served()), InlineRenderer(), GrammarChecker())

    if param is None:
        assert (await validator.validate(key_of_caps, draft)).prompt_token_ids
        return
    with pytest.raises(InvalidRequest) as refused:
        await validator.validate(key_of_caps, draft)
    assert refused.value.param == param


@pytest.mark.parametrize(("most", "param"), [(0, "tools"), (1, "tools"), (2, None), (None, None)])
async def test_a_keys_cap_on_tools_holds_at_its_value_and_not_one_past_it(most: int | None, param: str | None) -> None:
    capped = dataclasses.replace(key(), length_caps={"tiny": LengthCap(tools=most)})
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "take")]
    sent = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    draft = chat_draft(msgspec.convert(sent, ChatRequest))
    validator = Validator(FakeDirectory(served()), InlineRenderer(), GrammarChecker())

    if param is None:
        assert (await validator.validate(capped, draft)).tools.tools
        return
    with pytest.raises(InvalidRequest) as refused:
        await validator.validate(capped, draft)
    assert refused.value.param == param


async def test_a_request_that_names_no_length_gets_what_its_key_may_have() -> None:
    capped = dataclasses.replace(key(), length_caps={"*": LengthCap(output_tokens=7)})
    draft = completion_draft(msgspec.convert({"model": "tiny", "prompt": "hi"}, CompletionRequest))

    valid = await Validator(FakeDirectory(served()), InlineRenderer(), GrammarChecker()).validate(capped, draft)

    assert valid.sampling.max_token_count == 7
