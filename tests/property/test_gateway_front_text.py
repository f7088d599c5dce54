"""Any tokens, cut anywhere: one text, one finish, one usage over stream, whole answer and gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc

from services.common.grpc_server import start_server
from services.gateway.detokenizer import Detokenizer
from services.gateway.generation import TokenEvent
from services.gateway.grpc_service import SERVICE_NAME, GatewayService
from tests.helpers.echo_generation import (
    LENGTH,
    STOP,
    FakeGenerator,
    front,
    front_parts,
    logprobs_of,
    served,
)

WORDS = ("ab", "abc", "ca", "🙂", "é", " ", "b🙂a", "\n\n")
MODEL = served(words=WORDS)
VOCABULARY = [ord("a"), ord("b"), ord("c"), *"🙃é".encode(), 0xFF, *range(256, MODEL.tokenizer.vocab_size)]
BUSY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(st.lists(st.binary(max_size=5), max_size=20), st.text(max_size=20))
def test_text_in_pieces_is_the_text_at_once(pieces: list[bytes], text: str) -> None:
    raw = text.encode()
    pieces = [*pieces, *[raw[at : at + 3] for at in range(0, len(raw), 3)]]
    detokenizer = Detokenizer()

    made = [detokenizer.feed(piece) for piece in pieces]

    assert detokenizer.pending_byte_count <= 3
    assert "".join(made) + detokenizer.flush() == b"".join(pieces).decode("utf-8", "replace")
    assert detokenizer.pending_byte_count == 0


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, list[list[int]], list[TokenEvent]]:
    """Choices, tokens of each, and their events in any interleaving and grouping."""
    count = draw(st.integers(1, 3))
    rows = [draw(st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=14)) for _ in range(count)]
    left = {choice: 0 for choice in range(count)}
    reasons = [draw(st.sampled_from([STOP, LENGTH])) for _ in rows]
    events = []
    while left:
        choice = draw(st.sampled_from(sorted(left)))
        first = left[choice]
        ids = rows[choice][first : first + draw(st.integers(1, 5))]
        left[choice] += len(ids)
        ends = left[choice] == len(rows[choice])
        events.append(
            TokenEvent(choice, first, tuple(ids), logprobs_of(ids), finish_reason=reasons[choice] if ends else None)
        )
        if ends:
            del left[choice]
    return count, rows, events


STOPS = st.lists(st.sampled_from(["a", "ab", "bc", "cab", "🙂a", "é", "🙃", " \n\n", "zz"]), max_size=3)


def joined(chunks: list[dict[str, Any]], count: int) -> list[tuple[str, Any, list[Any], list[Any]]]:
    """Text, finish, tokens and offsets of each choice from stream chunks."""
    made: list[tuple[str, Any, list[Any], list[Any]]] = []
    for index in range(count):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        finishes = [c["finish_reason"] for c in parts if c["finish_reason"]]
        assert len(finishes) == 1
        logprobs = [c["logprobs"] for c in parts if c["logprobs"]]
        made.append(
            (
                "".join(c["text"] for c in parts),
                finishes[0],
                [t for entry in logprobs for t in entry["tokens"]],
                [t for entry in logprobs for t in entry["text_offset"]],
            )
        )
    return made


@BUSY
@given(scripts(), STOPS, st.integers(0, 4))
def test_stream_and_whole_answer_are_the_same(
    script: tuple[int, list[list[int]], list[TokenEvent]], stop: list[str], min_tokens: int
) -> None:
    count, rows, events = script
    fields = {"n": count, "stop": stop, "min_tokens": min_tokens, "logprobs": 0, "prompt": "p", "max_tokens": 64}

    async def both() -> None:
        streaming, whole = FakeGenerator(events), FakeGenerator(events)
        streamed = await front(streaming, MODEL).complete(stream=True, stream_options={"include_usage": True}, **fields)
        answer = (await front(whole, MODEL).complete(**fields)).json()

        got = joined(streamed.chunks, count)
        for choice, (text, finish, names, offsets) in zip(answer["choices"], got, strict=True):
            assert (choice["text"], choice["finish_reason"]) == (text, finish)
            assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (names, offsets)
            full = MODEL.tokenizer.decode(rows[choice["index"]])
            assert full.startswith(text.rstrip("\ufffd"))
            assert all(0 <= offset <= len(text) for offset in offsets)
            if min_tokens <= 1:
                assert not any(s in text for s in stop)
            if not stop:
                assert text == full
        assert streamed.chunks[-1]["usage"] == answer["usage"]
        assert answer["usage"]["completion_tokens"] == sum(streaming.only.delivered.values())
        assert streaming.only.delivered == whole.only.delivered
        assert streaming.only.stopped == whole.only.stopped
        assert streaming.only.endings == whole.only.endings

    asyncio.run(both())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scripts(), STOPS)
def test_grpc_gives_the_same_text_and_usage(
    script: tuple[int, list[list[int]], list[TokenEvent]], stop: list[str]
) -> None:
    count, _, events = script

    async def compare() -> None:
        over_http, over_grpc = FakeGenerator(events), FakeGenerator(events)
        answer = (await front(over_http, MODEL).complete(n=count, stop=stop, max_tokens=64)).json()
        service = GatewayService(front_parts(over_grpc, MODEL))
        server = await start_server("127.0.0.1:0", service.add_to, service_names=[SERVICE_NAME])
        texts, finishes = [""] * count, [0] * count
        try:
            async with grpc.aio.insecure_channel(server.address) as channel:
                request = pb.GenerateRequest(
                    model="tiny", prompt="hi", choice_count=count, stop=stop, max_token_count=64
                )
                metadata = (("authorization", "Bearer secret"),)
                async for response in pb_grpc.GatewayServiceStub(channel).Generate(request, metadata=metadata):
                    if response.HasField("delta"):
                        texts[response.delta.choice] += response.delta.text
                        finishes[response.delta.choice] |= response.delta.finish_reason
                    last = response
        finally:
            await server.stop(0)

        names = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
        assert texts == [choice["text"] for choice in answer["choices"]]
        assert [names[f] for f in finishes] == [choice["finish_reason"] for choice in answer["choices"]]  # type: ignore[index]
        usage = last.completed.usage
        assert usage.completion_token_count == answer["usage"]["completion_tokens"]
        assert usage.prompt_token_count == answer["usage"]["prompt_tokens"]
        assert over_grpc.only.delivered == over_http.only.delivered
        assert set(over_grpc.only.endings) == set(over_http.only.endings)
        assert len(over_grpc.only.endings) == 1

    asyncio.run(compare())
