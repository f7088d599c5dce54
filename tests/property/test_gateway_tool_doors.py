"""Tool calls and reasoning, cut anywhere: the same over stream, whole answer and gRPC, and the same counts."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc

from millrace_client.values import Choice, Gathered
from services.common.grpc_server import start_server
from services.gateway.generation import TokenEvent
from services.gateway.grpc_service import SERVICE_NAME, GatewayService
from tests.helpers.echo_generation import (
    CHATML,
    LENGTH,
    STOP,
    FakeGenerator,
    front,
    front_parts,
    served,
)

MODEL = served(template=CHATML + "{# <think> #}", specials=("<think>", "</think>"))
PIECES = st.sampled_from(
    [
        "<think>", "</think>", "\n", "Hi 🙂", "<tool_", "</tool_call>", '{"name": "add", ',
        '<tool_call>{"name": "add", "arguments": {"a": [1, "}"]}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a" oops</tool_call>',
        '<tool_call>{"arguments": {"é": 1}, "name": "no-args"}</tool_call>',
    ]
)  # fmt: skip
TOOLS = ("add", "no-args")


@st.composite
def answers(draw: st.DrawFn) -> list[TokenEvent]:
    """One answer in any grouping of its tokens."""
    ids = list(MODEL.tokenizer.encode_rendered("".join(draw(st.lists(PIECES, min_size=1, max_size=6))), ""))
    finish = draw(st.sampled_from([STOP, LENGTH]))
    events, at = [], 0
    while at < len(ids):
        size = draw(st.integers(1, 40))
        ends = at + size >= len(ids)
        events.append(TokenEvent(0, at, tuple(ids[at : at + size]), finish_reason=finish if ends else None))
        at += size
    return events


def said(choice: dict[str, Any]) -> tuple[str, str, list[tuple[str, str, str]], str]:
    """Content, reasoning, calls and finish of a choice of a whole answer."""
    message = choice["message"]
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
    return message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]


def streamed(chunks: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str, str]], str]:
    """The same from the chunks of a stream."""
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    calls: list[list[str]] = []
    for call in (call for part in parts for call in part["delta"].get("tool_calls", ())):
        if call["index"] == len(calls):
            calls.append([call["id"], call["function"]["name"], ""])
        calls[call["index"]][2] += call["function"]["arguments"]
    (finish,) = [part["finish_reason"] for part in parts if part["finish_reason"]]
    content, reasoning = (
        "".join(part["delta"].get(name, "") for part in parts) for name in ("content", "reasoning_content")
    )
    return content, reasoning, [(call[0], call[1], call[2]) for call in calls], finish


async def over_grpc(generator: FakeGenerator, parallel: bool, stop: list[str]) -> tuple[Choice, Any]:
    service = GatewayService(front_parts(generator, MODEL))
    server = await start_server("127.0.0.1:0", service.add_to, service_names=[SERVICE_NAME])
    chat = pb.ChatInput(
        messages=[pb.ChatMessage(role="user", content="hi")],
        tools=[pb.Tool(name=name) for name in TOOLS],
        parallel_tool_calls=parallel,
    )
    gathered = Gathered()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            request = pb.GenerateRequest(model="tiny", chat=chat, stop=stop)
            metadata = (("authorization", "Bearer secret"),)
            async for response in pb_grpc.GatewayServiceStub(channel).Generate(request, metadata=metadata):
                gathered.take(response)
    finally:
        await server.stop(0)
    return gathered.choices[0], gathered.usage


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers(), st.booleans(), st.sampled_from([[], ["🙂"], ["1"]]))
def test_three_doors_say_the_same(events: list[TokenEvent], parallel: bool, stop: list[str]) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]
    fields = {"tools": tools, "parallel_tool_calls": parallel, "stop": stop}

    async def compare() -> None:
        whole, stream, called = FakeGenerator(events), FakeGenerator(events), FakeGenerator(events)
        answer = (await front(whole, MODEL).chat(**fields)).json()
        chunks = (await front(stream, MODEL).chat(stream=True, stream_options={"include_usage": True}, **fields)).chunks
        choice, usage = await over_grpc(called, parallel, stop)

        expected = said(answer["choices"][0])
        assert streamed(chunks) == expected
        calls = [(call.id, call.name, call.arguments) for call in choice.tool_calls]
        assert (choice.text, choice.reasoning, calls, choice.finish_reason) == expected
        assert chunks[-1]["usage"] == answer["usage"]
        assert usage.completion_tokens == answer["usage"]["completion_tokens"] == whole.only.delivered[0]
        details = answer["usage"]["completion_tokens_details"]
        assert usage.reasoning_tokens == details["reasoning_tokens"] == whole.only.reasoned[0]
        assert whole.only.delivered == stream.only.delivered == called.only.delivered
        assert whole.only.stopped == stream.only.stopped == called.only.stopped
        assert whole.only.endings == stream.only.endings
        assert set(called.only.endings) == set(whole.only.endings)
        assert parallel or len(expected[2]) <= 1

    asyncio.run(compare())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers(), st.booleans())
def test_how_tokens_come_in_changes_no_count(events: list[TokenEvent], parallel: bool) -> None:
    ids = [token_id for event in events for token_id in event.token_ids]
    alone = [
        TokenEvent(0, at, (token_id,), finish_reason=events[-1].finish_reason if at == len(ids) - 1 else None)
        for at, token_id in enumerate(ids)
    ]
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]

    async def compare() -> None:
        first, second = FakeGenerator(events), FakeGenerator(alone)
        answers = [
            (await front(generator, MODEL).chat(tools=tools, parallel_tool_calls=parallel)).json()
            for generator in (first, second)
        ]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"] == answers[1]["usage"]

    asyncio.run(compare())
