"""Answers of both endpoints, streamed and whole: text, finishes, usage, logprobs, and how failures are told."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from millrace.common.v1 import common_pb2

from services.common.errors import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    MillraceError,
    NoWorker,
    QueueFull,
    RateLimited,
    WorkerLost,
)
from services.gateway import answer_sink, answering
from tests.helpers.echo_generation import (
    LENGTH,
    STOP,
    AsgiClient,
    FakeGenerator,
    HttpAnswer,
    Step,
    front,
    logprobs_of,
    one_by_one,
    served,
    tokens,
)
from tests.helpers.waiting import WAIT_S

WORDS = ("DEF", "G", "HI", "J", "ABC", "🙂", "<|im", "_end|>")
MODEL = served(words=WORDS)
COMPLETED, CANCELLED = common_pb2.TERMINAL_STATE_COMPLETED, common_pb2.TERMINAL_STATE_CANCELLED


def ids(*words: str) -> list[int]:
    """Whole words where the table has them, else bytes."""
    made: list[int] = []
    for word in words:
        made += [256 + WORDS.index(word)] if word in WORDS else list(word.encode())
    return made


def client_of(*steps: Step) -> tuple[AsgiClient, FakeGenerator]:
    generator = FakeGenerator(steps)
    return front(generator, MODEL), generator


def text_of(answer: HttpAnswer) -> str:
    """The text of choice 0 of any answer."""
    if answer.headers["content-type"] == "application/json":
        choice = answer.json()["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    parts = [c for chunk in answer.chunks for c in chunk["choices"] if c["index"] == 0]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in parts)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("stop", ["DEFGHIJ", ["zzz", "GHI"], "FG"])
async def test_nothing_of_a_stop_string_over_several_tokens_is_ever_sent(
    stop: str | list[str], chat: bool, stream: bool
) -> None:
    client, generator = client_of(*one_by_one(ids("ABC", "DEF", "G", "HI", "J", "more")))

    answer = await (client.chat if chat else client.complete)(stop=stop, stream=stream, max_tokens=50)

    assert text_of(answer) == {"DEFGHIJ": "ABC", "FG": "ABCDE"}.get(str(stop), "ABCDEF")
    # Tokens up to the one that completes the stop are consumed, and the worker is told to stop there.
    consumed = {"DEFGHIJ": 5, "FG": 3}.get(str(stop), 4)
    assert generator.only.stopped == {0: consumed}
    assert generator.only.delivered == {0: consumed}
    assert generator.only.endings == [(COMPLETED, STOP, "")]


async def test_text_that_only_began_like_a_stop_string_is_sent_in_the_end() -> None:
    client, _ = client_of(*one_by_one(ids("ABC", "DEF", "G")))

    answer = await client.chat(stop="DEFGHIJ", stream=True)

    assert text_of(answer) == "ABCDEFG"
    assert answer.chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_control_token_written_as_text_in_two_pieces_can_be_a_stop() -> None:
    client, _ = client_of(*one_by_one(ids("hello", "<|im", "_end|>", "x")))

    answer = await client.chat(stop="<|im_end|>", stream=True)

    assert text_of(answer) == "hello"


@pytest.mark.parametrize("stop", ["7", ["7"]])
async def test_a_stop_string_of_one_character_is_left_out_of_the_content(stop: str | list[str]) -> None:
    client, _ = client_of(*one_by_one(ids("6 7 8")))

    assert text_of(await client.chat(stop=stop)) == "6 "


@pytest.mark.parametrize("stop", ["", [""], [], None])
async def test_an_empty_stop_string_stops_nothing(stop: object) -> None:
    client, _ = client_of(*one_by_one(ids("abc")))

    assert text_of(await client.complete(stop=stop)) == "abc"


@pytest.mark.parametrize("cut", [1, 7, 20])
async def test_a_stop_string_before_min_tokens_does_not_stop_however_tokens_are_grouped(cut: int) -> None:
    made = ids("a7b7c")
    events = [
        tokens(made[at : at + cut], first=at, finish=LENGTH if at + cut >= len(made) else None)
        for at in range(0, len(made), cut)
    ]
    client, generator = client_of(*events)

    answer = await client.complete(stop="7", min_tokens=3)

    assert text_of(answer) == "a7b"
    assert generator.only.delivered == {0: 4}


async def test_an_emoji_in_byte_tokens_comes_whole_and_never_as_a_replacement_character() -> None:
    client, _ = client_of(*one_by_one(ids("a🙃b")))

    answer = await client.chat(stream=True)

    contents = [c["delta"].get("content", "") for chunk in answer.chunks for c in chunk["choices"]]
    assert [text for text in contents if text] == ["a", "🙃", "b"]


async def test_bytes_that_end_inside_a_character_become_one_replacement_character_at_the_end() -> None:
    client, _ = client_of(*one_by_one(list("a🙃".encode())[:-1]))

    assert text_of(await client.chat()) == "a\ufffd"


async def test_the_stop_token_is_counted_and_not_shown() -> None:
    client, generator = client_of(tokens(ids("ABC")), tokens(ids("J"), first=1, finish=STOP, stop_token_id=ids("J")[0]))

    answer = await client.complete(stop_token_ids=ids("J"))

    assert text_of(answer) == "ABC"
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert generator.only.delivered == {0: 2}


async def test_usage_counts_tokens_and_not_chunks() -> None:
    steps = [tokens(ids("ABC", "DEF", "G")), tokens(ids("HI", "🙂"), first=3, finish=LENGTH)]
    client, generator = client_of(*steps)
    generator.cached = 1

    streamed = await client.complete(stream=True, stream_options={"include_usage": True})
    whole = await front(FakeGenerator(steps), MODEL).complete()

    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert streamed.chunks[-1]["usage"] == usage
    assert whole.json()["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("chat", [True, False])
async def test_usage_is_null_in_all_chunks_but_the_last_which_alone_has_no_choices(chat: bool) -> None:
    client, _ = client_of(*one_by_one(ids("abc")))

    answer = await (client.chat if chat else client.complete)(stream=True, stream_options={"include_usage": True})

    *before, last = answer.chunks
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in before)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert answer.frames[-1] == "[DONE]"
    assert answer.ended


async def test_without_include_usage_no_chunk_speaks_of_usage() -> None:
    client, _ = client_of(*one_by_one(ids("abc")))

    answer = await client.chat(stream=True)

    assert all("usage" not in chunk and chunk["choices"] for chunk in answer.chunks)


async def test_continuous_usage_counts_up_to_each_chunk() -> None:
    client, _ = client_of(*one_by_one(ids("abc")))

    answer = await client.complete(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})

    assert [chunk["usage"]["completion_tokens"] for chunk in answer.chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("reason", [STOP, LENGTH])
async def test_each_choice_has_exactly_one_finish(reason: common_pb2.FinishReason.ValueType, chat: bool) -> None:
    first, second = one_by_one(ids("ab"), finish=reason), one_by_one(ids("xyz"), choice=1, finish=LENGTH)
    steps = [second[0], first[0], second[1], first[1], second[2]]
    client, generator = client_of(*steps)

    answer = await (client.chat if chat else client.complete)(n=2, stream=True)

    finishes = [
        (c["index"], c["finish_reason"]) for chunk in answer.chunks for c in chunk["choices"] if c["finish_reason"]
    ]
    assert finishes == [(0, "stop" if reason == STOP else "length"), (1, "length")]
    assert answer.frames.count("[DONE]") == 1
    assert generator.only.endings == [(COMPLETED, reason, "")]


async def test_a_chat_choice_opens_with_its_role_once() -> None:
    client, _ = client_of(*one_by_one(ids("ab")), *one_by_one(ids("cd"), choice=1))

    answer = await client.chat(n=2, stream=True)

    roles = [(c["index"], c["delta"]["role"]) for x in answer.chunks for c in x["choices"] if "role" in c["delta"]]
    assert roles == [(0, "assistant"), (1, "assistant")]


async def test_a_budget_stop_is_length_for_sdks_and_told_in_our_own_part() -> None:
    steps = [tokens(ids("a"), finish=common_pb2.FINISH_REASON_BUDGET)]

    whole = (await front(FakeGenerator(steps), MODEL).chat()).json()
    streamed = await front(FakeGenerator(steps), MODEL).chat(stream=True)

    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["millrace"]["stop_reason"] == "budget"
    assert streamed.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert streamed.chunks[-1]["millrace"]["stop_reason"] == "budget"


async def test_an_answer_without_any_token_is_empty_text_with_a_finish() -> None:
    client, _ = client_of(tokens([], finish=STOP))

    answer = await client.chat()

    assert answer.json()["choices"][0]["message"]["content"] == ""
    assert answer.json()["usage"]["completion_tokens"] == 0


# Failures


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (WorkerLost("The worker was lost."), (common_pb2.TERMINAL_STATE_FAILED, 7, "WORKER_LOST")),
        (DeadlineExceeded("Too late."), (common_pb2.TERMINAL_STATE_EXPIRED, 6, "DEADLINE_EXCEEDED")),
        (EngineError("CUDA at 0x7f in /secret/path"), (common_pb2.TERMINAL_STATE_FAILED, 7, "ENGINE_ERROR")),
        (ValueError("/secret/path"), (common_pb2.TERMINAL_STATE_FAILED, 7, "INTERNAL")),
    ],
)
async def test_a_failure_after_text_is_one_error_frame_and_no_done(
    error: Exception, ending: tuple[int, int, str], chat: bool
) -> None:
    client, generator = client_of(*one_by_one(ids("abc"))[:2], error)

    answer = await (client.chat if chat else client.complete)(stream=True, stop="bX")

    assert answer.status == 200
    assert answer.ended
    assert "[DONE]" not in answer.frames
    assert answer.chunks[-1]["error"]["code"] == ending[2]
    assert sum("error" in chunk for chunk in answer.chunks) == 1
    assert b"secret" not in answer.body
    assert generator.only.endings == [ending]
    # Held-back text is not delivered, and so not billed.
    assert generator.only.delivered == {0: 1}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", [WorkerLost("Lost."), DeadlineExceeded("Late."), EngineError("x"), ValueError("x")])
async def test_a_failure_before_the_first_token_is_a_real_status(error: Exception, stream: bool) -> None:
    client, generator = client_of(error)

    answer = await client.chat(stream=stream)

    status = error.row.http_status if isinstance(error, MillraceError) else 500
    assert (answer.status, answer.ended) == (status, True)
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["request_id"] == generator.only.request_id
    assert len(generator.only.endings) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("refusal", "wait"),
    [
        (RateLimited("Too many.", retry_after_s=2.2), "3"),
        (QueueFull("Full.", retry_after_s=0.1), "1"),
        (NoWorker("None."), "1"),
        (InvalidRequest("No.", param="x"), None),
    ],
)
async def test_a_refusal_keeps_its_status_and_says_when_to_come_again(
    refusal: MillraceError, wait: str | None, stream: bool
) -> None:
    client, generator = client_of()
    generator.refusal = refusal

    answer = await client.chat(stream=stream)

    assert answer.status == refusal.row.http_status
    assert answer.headers.get("retry-after") == wait
    assert answer.error["code"] == refusal.row.reason
    assert answer.headers["x-millrace-reason"] == refusal.row.reason


# Time


async def test_a_silent_stream_says_ping_and_then_tells_errors_in_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "STATUS_HELD_S", 0.01)
    monkeypatch.setattr(answer_sink, "PING_S", 0.01)
    hold = asyncio.Event()
    client, generator = client_of(hold, WorkerLost("Lost."))
    asking = asyncio.ensure_future(client.chat(stream=True))
    while len(client.answer.writes) < 3:
        await asyncio.sleep(0.005)

    hold.set()
    answer = await asking

    assert answer.status == 200
    assert answer.body.startswith(b": ping\n\n: ping\n\n")
    assert answer.chunks[-1]["error"]["code"] == "WORKER_LOST"
    assert len(generator.only.endings) == 1


async def test_a_reader_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_sink, "SLOW_READER_S", 0.02)
    client, generator = client_of(*one_by_one(ids("abc")))
    sent = 0

    async def stuck_at_second_write() -> None:
        nonlocal sent
        sent += 1
        if sent > 2:
            await asyncio.Event().wait()

    class Reader(asyncio.Event):
        async def wait(self) -> bool:  # type: ignore[override]
            await stuck_at_second_write()
            return True

    client.reader_may_read = Reader()

    answer = await client.chat(stream=True)

    assert not answer.ended
    assert generator.only.endings == [(CANCELLED, common_pb2.FINISH_REASON_CANCELLED, "SLOW_READER")]
    assert generator.only.delivered == {0: 1}


async def test_a_reader_stuck_at_the_error_frame_still_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_sink, "SLOW_READER_S", 0.02)
    reached = asyncio.Event()
    client, generator = client_of(tokens(ids("a")), reached, WorkerLost("Lost."))
    client.reader_may_read = asyncio.Event()
    client.reader_may_read.set()
    asking = asyncio.ensure_future(client.chat(stream=True))
    while not client.answer.writes:
        await asyncio.sleep(0)
    client.reader_may_read.clear()

    reached.set()
    await asking

    assert generator.only.endings == [(common_pb2.TERMINAL_STATE_FAILED, 7, "WORKER_LOST")]


# Disconnects

PHASES = ["starting", "queued", "decoding", "writing", "error frame"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_cancels_exactly_once_in_every_phase(phase: str, stream: bool) -> None:
    hold = asyncio.Event()
    steps: dict[str, list[Step]] = {
        "queued": [hold],
        "decoding": [tokens(ids("ab")), hold],
        "writing": list(one_by_one(ids("ab"))),
        "error frame": [WorkerLost("Lost.")],
    }
    client, generator = client_of(*steps.get(phase, []))
    if phase == "starting":
        generator.hold = hold
    if phase in ("writing", "error frame"):
        client.reader_may_read = asyncio.Event()
    asking = asyncio.ensure_future(client.chat(stream=stream))
    await generator.starting.wait()
    for _ in range(20):
        await asyncio.sleep(0)

    client.disconnect.set()
    await asyncio.wait_for(asking, WAIT_S)

    if phase == "starting":
        assert generator.start_cancelled == 1
        assert generator.generations == []
        return
    ending = (CANCELLED, common_pb2.FINISH_REASON_CANCELLED, "CANCELLED")
    if phase == "error frame":
        ending = (common_pb2.TERMINAL_STATE_FAILED, common_pb2.FINISH_REASON_ERROR, "WORKER_LOST")
    assert generator.only.endings == [ending]
    assert generator.only.delivered == ({0: 2} if phase == "decoding" and stream else {})
    assert not client.answer.ended


async def test_a_client_that_leaves_after_the_last_frame_has_a_completed_request() -> None:
    client, generator = client_of(*one_by_one(ids("ab")))

    await client.chat(stream=True)
    client.disconnect.set()
    await asyncio.sleep(0)

    assert generator.only.endings == [(COMPLETED, LENGTH, "")]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_leaves_right_after_the_last_finish_chunk_has_a_completed_request(n: int) -> None:
    steps = [step for choice in range(n) for step in one_by_one(ids("ab"), choice=choice)]
    client, generator = client_of(*steps)
    client.reader_may_read = asyncio.Event()
    client.reader_may_read.set()
    asking = asyncio.ensure_future(client.chat(stream=True, n=n))
    while client.answer.body.count(b'"finish_reason":"length"') < n:
        await asyncio.sleep(0)
    client.reader_may_read.clear()

    client.disconnect.set()
    await asyncio.wait_for(asking, WAIT_S)

    assert not client.answer.ended
    assert generator.only.endings == [(COMPLETED, LENGTH, "")]


async def test_a_client_that_leaves_while_another_choice_runs_has_a_cancelled_request() -> None:
    client, generator = client_of(*one_by_one(ids("ab")), tokens(ids("a"), choice=1), asyncio.Event())
    asking = asyncio.ensure_future(client.chat(stream=True, n=2))
    async with asyncio.timeout(WAIT_S):
        while not generator.generations:
            await asyncio.sleep(0)
        await generator.only.reading.wait()

    client.disconnect.set()
    await asyncio.wait_for(asking, WAIT_S)

    assert generator.only.endings == [(CANCELLED, common_pb2.FINISH_REASON_CANCELLED, "CANCELLED")]


async def test_leaving_before_the_body_is_whole_starts_nothing() -> None:
    client, generator = client_of()
    client.disconnect.set()

    async def send(_message: object) -> None:
        raise AssertionError("nobody listens")

    messages: list[dict[str, object]] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"authorization", b"Bearer secret")],
        "query_string": b"",
        "client": ("127.0.0.1", 1),
    }
    await client.app(scope, receive, send)

    assert generator.requests == []


# Logprobs and echo


async def test_chat_logprobs_without_alternatives_have_an_empty_list_a_token() -> None:
    made = ids("ABC", "🙂")
    client, _ = client_of(tokens(made, finish=LENGTH, logprobs=logprobs_of(made)))

    answer = await client.chat(logprobs=True)

    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert [c["token"] for c in content] == ["ABC", "🙂"]
    assert all(c["top_logprobs"] == [] for c in content)
    assert content[1]["bytes"] == list("🙂".encode())


async def test_chat_logprobs_name_their_alternatives() -> None:
    made = ids("G")
    client, _ = client_of(tokens(made, finish=LENGTH, logprobs=logprobs_of(made, top=2)))

    answer = await client.chat(logprobs=True, top_logprobs=2)

    top = answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [t["token"] for t in top] == ["G", "DEF"]
    assert top[1]["logprob"] < top[0]["logprob"]


async def test_an_impossible_alternative_is_a_number() -> None:
    never = common_pb2.PositionLogprobs(
        token=common_pb2.Logprob(token_id=65, logprob=-0.5),
        top=[common_pb2.Logprob(token_id=66, logprob=float("-inf"))],
    )
    client, _ = client_of(tokens([65], finish=LENGTH, logprobs=(never,)))

    answer = await client.complete(logprobs=1)

    assert answer.json()["choices"][0]["logprobs"]["top_logprobs"] == [{"B": -9999.0}]


async def test_without_logprobs_the_field_is_null() -> None:
    client, _ = client_of(*one_by_one(ids("a")))

    assert (await client.chat()).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [True, False])
async def test_completion_logprobs_have_offsets_into_the_text(stream: bool) -> None:
    made = ids("ABC", "é🙃", "G")
    client, _ = client_of(
        *[tokens([i], first=n, logprobs=logprobs_of([i])) for n, i in enumerate(made)],
        tokens([], first=len(made), finish=LENGTH),
    )

    answer = await client.complete(logprobs=0, stream=stream)

    got = logprobs_over(answer, 0)
    assert text_of(answer) == "ABCé🙃G"
    assert got["text_offset"] == [0, 3, 3, 4, 4, 4, 4, 5]
    assert len({len(values) for values in got.values()}) == 1


async def test_a_token_of_a_stop_string_has_its_offset_at_the_end_of_the_text() -> None:
    made = ids("ABC", "DEF", "G", "HI")
    client, _ = client_of(tokens(made, finish=LENGTH, logprobs=logprobs_of(made)))

    answer = await client.complete(logprobs=0, stop="FGH")

    assert text_of(answer) == "ABCDE"
    assert answer.json()["choices"][0]["logprobs"]["text_offset"] == [0, 3, 5, 5]


def logprobs_over(answer: HttpAnswer, choice: int) -> dict[str, list[object]]:
    """The logprobs of a choice, chunks joined."""
    if answer.headers["content-type"] == "application/json":
        found = [answer.json()["choices"][choice]["logprobs"]]
    else:
        found = [c["logprobs"] for chunk in answer.chunks for c in chunk["choices"] if c["index"] == choice]
    joined: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in found:
        for name, values in (part or {}).items():
            joined[name] += values
    return joined


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", [0, 1])
async def test_echo_with_logprobs_has_one_entry_a_prompt_token_and_no_value_for_the_first(
    choice: int, stream: bool
) -> None:
    prompt = list("é!".encode())
    values = (common_pb2.PositionLogprobs(), *logprobs_of(prompt[1:]))
    first = tokens(ids("G"), finish=LENGTH, logprobs=logprobs_of(ids("G")), prompt_logprobs=values)
    other = tokens(ids("J"), choice=1, finish=LENGTH, logprobs=logprobs_of(ids("J")))
    # The other choice speaks first: its prompt values come with choice 0.
    client, generator = client_of(other, first)

    answer = await client.complete(prompt="é!", echo=True, logprobs=0, n=2, stream=stream)

    got = logprobs_over(answer, choice)
    assert text_of(answer) == "é!G"
    assert len(got["tokens"]) == 4
    assert got["token_logprobs"][0] is None
    assert got["top_logprobs"][0] is None
    assert got["token_logprobs"][1:3] == pytest.approx([-prompt[1] / 10, -prompt[2] / 10])
    assert got["text_offset"] == [0, 0, 1, 2]
    assert generator.requests[0][1].sampling.prompt_logprob_count == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_echo_puts_the_prompt_before_the_text_and_bills_only_what_was_made(stream: bool) -> None:
    client, generator = client_of(*one_by_one(ids("G")))

    answer = await client.complete(prompt="say 🙂: ", echo=True, stream=stream)

    assert text_of(answer) == "say 🙂: G"
    assert generator.only.delivered == {0: 1}


async def test_the_same_answer_comes_streamed_and_whole() -> None:
    steps = one_by_one(ids("ABC", "🙃", "x", "DEF"))

    whole = await front(FakeGenerator(steps), MODEL).chat(seed=5)
    streamed = await front(FakeGenerator(steps), MODEL).chat(seed=5, stream=True)

    assert text_of(whole) == text_of(streamed) == "ABC🙃xDEF"
    first = streamed.chunks[0]
    assert first["id"] == whole.json()["id"]
    assert first["system_fingerprint"] == whole.json()["system_fingerprint"]
    assert first["millrace"]["seed"] == whole.json()["millrace"]["seed"] == 5
    assert whole.headers["x-request-id"] == streamed.headers["x-request-id"]
    assert whole.headers["x-millrace-queue-position"] == "3"
    assert msgspec.json.decode(whole.body)["choices"][0]["message"]["role"] == "assistant"
