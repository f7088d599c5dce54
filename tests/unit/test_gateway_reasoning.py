"""Reasoning: told apart by token id, counted, and what `reasoning_effort` means to whom."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.tokenizer import Tokenizer
from tests.helpers.echo_generation import (
    CHATML,
    LENGTH,
    STOP,
    FakeGenerator,
    front,
    one_by_one,
    served,
    tokens,
)

MARKERS = ("<think>", "</think>")
THINKS = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENS = CHATML + "<think>\n"
TOOL = {"type": "function", "function": {"name": "add"}}


def ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Bytes, and each marker as the token it is."""
    return list(tokenizer.encode_rendered(text, ""))


async def said(text: str, template: str = THINKS, *, finish: Any = STOP, **fields: Any) -> tuple[Any, FakeGenerator]:
    """The whole answer; the stream must say the same."""
    model = served(template=template, specials=MARKERS)
    made = ids(text, model.tokenizer)
    whole, stream = (FakeGenerator(one_by_one(made, finish=finish)) for _ in range(2))
    answer = (await front(whole, model).chat(**fields)).json()
    streamed = await front(stream, model).chat(stream=True, stream_options={"include_usage": True}, **fields)

    deltas = [c["delta"] for chunk in streamed.chunks for c in chunk["choices"]]
    message = answer["choices"][0]["message"]
    assert "".join(d.get("content", "") for d in deltas) == (message["content"] or "")
    assert "".join(d.get("reasoning_content", "") for d in deltas) == message.get("reasoning_content", "")
    assert streamed.chunks[-1]["usage"] == answer["usage"]
    assert (stream.only.delivered, stream.only.reasoned) == (whole.only.delivered, whole.only.reasoned)
    return answer, whole


async def test_reasoning_is_told_apart_and_counted_by_id() -> None:
    answer, generator = await said("<think>\nhmm 🙂\n</think>\n\nYes.")

    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm 🙂\n", "Yes.")
    usage = answer["usage"]
    # Between the markers: a newline, four characters of text, the four bytes of the emoji, a newline.
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 10
    assert usage["completion_tokens"] == 2 + 10 + 6
    assert generator.only.reasoned == {0: 10}


async def test_reasoning_that_the_prompt_opened_needs_no_marker() -> None:
    answer, generator = await said("hmm</think>Yes", OPENS)

    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm", "Yes")
    assert generator.only.reasoned == {0: 3}


async def test_reasoning_that_is_cut_has_no_answer() -> None:
    answer, _ = await said("<think>hm", finish=LENGTH)

    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "")
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_an_answer_without_reasoning_has_none() -> None:
    answer, _ = await said("Yes")

    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_stop_string_is_looked_for_in_the_answer_only() -> None:
    answer, _ = await said("<think>a.b</think>c.d", stop=["."])

    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a.b", "c")


async def test_a_call_in_the_reasoning_is_no_call() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    answer, _ = await said(f"<think>{call}</think>{call}", tools=[TOOL])

    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == call
    assert len(message["tool_calls"]) == 1


async def test_a_text_completion_is_given_as_it_is() -> None:
    model = served(template=OPENS, specials=MARKERS)
    made = ids("a</think>b", model.tokenizer)

    answer = (await front(FakeGenerator(one_by_one(made)), model).complete()).json()

    assert answer["choices"][0]["text"] == "ab"


async def test_a_marker_that_a_user_writes_opens_nothing() -> None:
    model = served(template="{{ messages[0].content }}\n", specials=MARKERS)
    generator = FakeGenerator([tokens([65], finish=STOP)])

    await front(generator, model).chat(messages=[{"role": "user", "content": "<think>"}])

    assert not generator.requests[0][1].starts_in_reasoning


@pytest.mark.parametrize(("effort", "closed"), [("none", True), ("minimal", False), ("high", False), (None, False)])
async def test_effort_reaches_the_template(effort: str | None, closed: bool) -> None:
    model = served(template=THINKS, specials=MARKERS)
    generator = FakeGenerator([tokens([65], finish=STOP)])

    await front(generator, model).chat(reasoning_effort=effort)

    prompt = generator.requests[0][1].prompt_token_ids
    assert (model.tokenizer.id_of("</think>") in prompt) is closed  # type: ignore[attr-defined]


async def test_what_the_client_tells_the_template_itself_stays() -> None:
    model = served(template=THINKS, specials=MARKERS)
    generator = FakeGenerator([tokens([65], finish=STOP)])

    await front(generator, model).chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})

    assert model.tokenizer.id_of("</think>") in generator.requests[0][1].prompt_token_ids  # type: ignore[attr-defined]


@pytest.mark.parametrize(("effort", "status"), [("none", 200), ("low", 400), ("much", 400)])
async def test_a_model_without_reasoning_takes_none_and_refuses_effort(effort: str, status: int) -> None:
    answer = await front(FakeGenerator(one_by_one([65]))).chat(reasoning_effort=effort)

    assert answer.status == status
    if status == 400:
        assert answer.error["param"] == "reasoning_effort"


async def test_reasoning_that_comes_back_is_shown_to_a_template_that_wants_it() -> None:
    model = served(template="{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}<think>")
    generator = FakeGenerator([tokens([65], finish=STOP)])

    sent = [{"role": "assistant", "content": "b", "reasoning_content": "why"}]
    await front(generator, model).chat(messages=sent)

    assert bytes(list(generator.requests[0][1].prompt_token_ids)).startswith(b"[why]b")


async def test_responses_tell_reasoning_as_an_item_of_its_own_and_take_it_back() -> None:
    model = served(template=THINKS, specials=MARKERS)
    made = ids("<think>\nhm\n</think>\n\nYes.", model.tokenizer)
    generator = FakeGenerator(lambda _: one_by_one(made, finish=STOP))
    asked = {"model": "tiny", "input": "Why?", "reasoning": {"effort": "low"}}

    whole = (await front(generator, model).ask("POST", "/v1/responses", asked)).json()
    streamed = await front(generator, model).ask("POST", "/v1/responses", asked | {"stream": True})
    again = {"model": "tiny", "input": [{"role": "user", "content": "Why?"}, *whole["output"]]}
    taken = await front(generator, model).ask("POST", "/v1/responses", again)

    thought, said_item = whole["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "hm\n"}])
    assert [part["text"] for part in said_item["content"]] == ["Yes."]
    assert whole["reasoning"]["effort"] == "low"
    events = [json.loads(line[6:]) for line in streamed.body.decode().splitlines() if line.startswith("data: ")]
    assert "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta") == "hm\n"
    assert [e["item"]["type"] for e in events if e["type"] == "response.output_item.added"] == ["reasoning", "message"]
    outputs = [[without_id(item) for item in told["output"]] for told in (whole, events[-1]["response"])]
    assert outputs[0] == outputs[1]
    assert taken.status == 200


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


async def test_both_names_of_reasoning_that_comes_back_are_one() -> None:
    model = served(template="{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}<think>")
    generator = FakeGenerator(one_by_one([65]))
    sent = {"role": "assistant", "content": "b", "reasoning": "why"}

    await front(generator, model).chat(messages=[sent])
    other = await front(generator, model).chat(messages=[sent | {"reasoning_content": "because"}])

    assert bytes(generator.requests[0][1].prompt_token_ids.tolist()).startswith(b"[why]b")
    assert (other.status, other.error["param"]) == (400, "messages[0].reasoning")
