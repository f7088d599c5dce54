"""The Python client against a scripted server: what it repeats and what not, deadlines, streams, cancel, errors."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc
from millrace.gateway.v1 import usage_sums_pb2 as usage_pb

from millrace_client import (
    AsyncClient,
    Client,
    Message,
    MillraceError,
    Options,
    RetryPolicy,
    Tool,
    ToolCall,
    UsageQuery,
)
from millrace_client.errors import RETRYABLE
from millrace_client.retry import Turn
from services.common.errors import (
    BudgetExhausted,
    EngineError,
    InvalidRequest,
    NoWorker,
    QueueFull,
    RateLimited,
    Retry,
    WorkerLost,
    error_classes,
)
from services.common.grpc_server import start_server
from tests.helpers.waiting import WAIT_S

FAST = RetryPolicy(base_s=0.0)
Step = str | Exception | asyncio.Event | grpc.StatusCode


class ScriptedGateway(pb_grpc.GatewayServiceServicer):
    """Plays one script a call: texts, errors, codes to break off with, and events to wait for. `runs` names the calls
    that tell an earlier run again."""

    def __init__(self, *scripts: list[Step]) -> None:
        self.scripts = list(scripts)
        self.runs: list[str] = []
        self.keys: list[str] = []
        self.requests: list[pb.GenerateRequest] = []
        self.usage_requests: list[usage_pb.GetUsageRequest] = []
        self.remaining: list[float] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.remaining.append(context.time_remaining())
        request_id = self.runs.pop(0) if self.runs else f"r{len(self.requests)}"
        self.keys.append(dict(context.invocation_metadata()).get("idempotency-key", ""))
        ref = common_pb2.ModelRef(model="m", version="v1")
        try:
            yield pb.GenerateResponse(request_id=request_id, accepted=pb.GenerateAccepted(model=ref, seed=7))
            for step in self.scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, grpc.StatusCode):
                    await context.abort(step, "Cut.")
                else:
                    yield pb.GenerateResponse(request_id=request_id, delta=pb.GenerateDelta(text=step, token_ids=[1]))
            last = pb.GenerateDelta(finish_reason=common_pb2.FINISH_REASON_STOP)
            last.tool_calls.add(index=0, id="c", name="f", arguments='{"a"')
            last.tool_calls.add(index=0, arguments=": 1}")
            yield pb.GenerateResponse(request_id=request_id, delta=last)
            usage = common_pb2.TokenUsage(prompt_token_count=3, completion_token_count=2, reasoning_token_count=1)
            yield pb.GenerateResponse(request_id=request_id, completed=pb.GenerateCompleted(usage=usage))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        assert dict(context.invocation_metadata())["authorization"] == "Bearer k"
        if self.scripts:
            raise self.scripts.pop(0)[0]  # type: ignore[misc]
        ref = common_pb2.ModelRef(model="m", version="v1")
        return pb.ListModelsResponse(models=[pb.Model(id="m@v1", model=ref, max_model_len=64, owner="o")])

    async def GetUsage(self, request: usage_pb.GetUsageRequest, context: Any) -> usage_pb.GetUsageResponse:
        self.usage_requests.append(request)
        answer = usage_pb.GetUsageResponse()
        group = answer.groups.add(keys=["m"], request_count=3, completed_request_count=2)
        group.billed.completion_token_count = 7
        group.costs.add(currency="EUR", completion_micros=5)
        group.accelerator.decode_time.FromMilliseconds(1_500)
        return answer

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        return pb.CancelResponse(cancelled=request.request_id == "r1")


@contextlib.asynccontextmanager
async def served(gateway: ScriptedGateway) -> AsyncIterator[str]:
    server = await start_server(
        "127.0.0.1:0", lambda s: pb_grpc.add_GatewayServiceServicer_to_server(gateway, s), service_names=[]
    )
    try:
        yield server.address
    finally:
        await server.stop(0)


def test_what_is_repeated_is_what_the_servers_error_table_allows() -> None:
    allowed = {reason for reason, cls in error_classes().items() if cls.row.retry is not Retry.NEVER}

    assert allowed == RETRYABLE


async def test_an_answer_is_put_together_sync_and_async() -> None:
    gateway = ScriptedGateway(["He", "llo"], ["He", "llo"])
    async with served(gateway) as address:
        async with AsyncClient(address, "k") as client:
            answer = await client.generate("m", "x")

        def ask() -> Any:
            with Client(address, "k") as sync:
                return sync.generate("m", "x"), sync.list_models(), sync.cancel("r1"), sync.cancel("r9")

        same, models, cancelled, ended = await asyncio.to_thread(ask)

    assert (answer.text, answer.model, answer.version, answer.seed) == ("Hello", "m", "v1", 7)
    assert answer.choices[0].tool_calls == [ToolCall("c", "f", '{"a": 1}')]
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.reasoning_tokens) == (3, 2, 1)
    assert answer.message.tool_calls[0].id == "c"
    assert (same.choices, same.usage) == (answer.choices, answer.usage)
    assert [(m.id, m.name, m.max_model_len) for m in models] == [("m@v1", "m", 64)]
    assert (cancelled, ended) == (True, False)


@pytest.mark.parametrize("error", [NoWorker("x"), QueueFull("x"), RateLimited("x"), WorkerLost("x")])
async def test_a_failure_before_the_first_token_is_repeated(error: Exception) -> None:
    gateway = ScriptedGateway([error], [error], ["ok"])
    async with served(gateway) as address, AsyncClient(address, "k", retry=FAST) as client:
        answer = await client.generate("m", "x", timeout_s=300)

    assert answer.text == "ok"
    assert len(gateway.requests) == 3
    assert all(0 < remaining <= 300 for remaining in gateway.remaining)


async def test_a_failure_after_the_first_token_is_never_repeated() -> None:
    gateway = ScriptedGateway(["He", WorkerLost("Lost.")])
    seen = []

    async def read(client: AsyncClient) -> None:
        async for delta in client.stream("m", "x"):
            seen.append(delta.text)

    async with served(gateway) as address, AsyncClient(address, "k", retry=FAST) as client:
        with pytest.raises(MillraceError) as caught:
            await read(client)

    assert seen == ["He"]
    assert (caught.value.reason, caught.value.request_id) == ("WORKER_LOST", "r1")
    assert len(gateway.requests) == 1


@pytest.mark.parametrize("sync", [True, False])
async def test_with_a_key_a_broken_connection_goes_on_where_it_was(sync: bool) -> None:
    gateway = ScriptedGateway(["He", grpc.StatusCode.UNAVAILABLE], ["He", "llo"])
    gateway.runs = ["run-1", "run-1"]
    async with served(gateway) as address:
        if sync:

            def ask() -> list[str]:
                with Client(address, "k", retry=FAST) as client:
                    return [delta.text for delta in client.stream("m", "x", idempotency_key="order 7")]

            texts = await asyncio.to_thread(ask)
        else:
            async with AsyncClient(address, "k", retry=FAST) as client:
                texts = [delta.text async for delta in client.stream("m", "x", idempotency_key="order 7")]

    assert texts == ["He", "llo", ""]
    assert gateway.keys == ["order 7", "order 7"]


@pytest.mark.parametrize("run", ["run-1", "run-2"])
async def test_with_a_key_an_answer_that_failed_or_is_another_one_does_not_go_on(run: str) -> None:
    first: Step = WorkerLost("Lost.") if run == "run-1" else grpc.StatusCode.UNAVAILABLE
    gateway = ScriptedGateway(["He", first], ["He", "llo"])
    gateway.runs = ["run-1", run]
    async with served(gateway) as address, AsyncClient(address, "k", retry=FAST) as client:
        with pytest.raises(MillraceError) as caught:
            await client.generate("m", "x", idempotency_key="order 7")

    assert caught.value.reason == ("WORKER_LOST" if run == "run-1" else "")
    assert caught.value.request_id == "run-1"
    assert len(gateway.requests) == (1 if run == "run-1" else 2)


async def test_usage_is_asked_for_and_told_in_plain_values() -> None:
    gateway = ScriptedGateway()
    noon = datetime.datetime(2026, 5, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    query = UsageQuery(model="m", metadata={"team": "a"}, start=noon, group_by=["model"])
    async with served(gateway) as address:

        def ask() -> Any:
            with Client(address, "k") as client:
                return client.get_usage(query)

        groups = await asyncio.to_thread(ask)
        async with AsyncClient(address, "k") as client:
            same = await client.get_usage()
            with pytest.raises(ValueError, match="zone"):
                await client.get_usage(UsageQuery(end=noon.replace(tzinfo=None)))

    assert groups == same
    assert (groups[0].keys, groups[0].requests, groups[0].completed_requests) == (("m",), 3, 2)
    assert groups[0].billed.completion_tokens == 7
    assert (groups[0].costs[0].currency, groups[0].costs[0].completion_micros) == ("EUR", 5)
    assert groups[0].accelerator.decode_s == 1.5
    asked, everything = gateway.usage_requests
    assert asked.start_time.ToDatetime(datetime.UTC) == noon
    assert not asked.HasField("end_time")
    assert (asked.model, dict(asked.metadata), list(asked.group_by)) == ("m", {"team": "a"}, ["model"])
    assert everything == usage_pb.GetUsageRequest()


@pytest.mark.parametrize("error", [InvalidRequest("No.", param="n"), BudgetExhausted("x"), EngineError("x")])
async def test_what_would_fail_again_is_not_repeated(error: Exception) -> None:
    gateway = ScriptedGateway([error])
    async with served(gateway) as address, AsyncClient(address, "k", retry=FAST) as client:
        with pytest.raises(MillraceError) as caught:
            await client.generate("m", "x")

    assert caught.value.reason == error.row.reason  # type: ignore[attr-defined]
    assert caught.value.param == error.param  # type: ignore[attr-defined]
    assert len(gateway.requests) == 1


async def test_tries_are_limited() -> None:
    gateway = ScriptedGateway(*[[NoWorker("x")]] * 3)
    async with served(gateway) as address, AsyncClient(address, "k", retry=RetryPolicy(attempts=3, base_s=0)) as client:
        with pytest.raises(MillraceError):
            await client.generate("m", "x")

    assert len(gateway.requests) == 3


async def test_a_unary_call_is_repeated_too() -> None:
    async with served(ScriptedGateway([NoWorker("x")])) as address, AsyncClient(address, "k", retry=FAST) as client:
        assert len(await client.list_models()) == 1


async def test_a_server_that_is_not_there_is_unavailable_after_the_last_try() -> None:
    async with served(ScriptedGateway()) as address:
        pass
    async with AsyncClient(address, "k", retry=RetryPolicy(attempts=2, base_s=0)) as client:
        with pytest.raises(MillraceError) as caught:
            await client.list_models(timeout_s=WAIT_S)

    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, "")
    assert caught.value.retryable


@pytest.mark.parametrize("how", ["cancel", "leave", "task"])
async def test_leaving_a_stream_stops_the_work(how: str) -> None:
    gateway = ScriptedGateway(["He", asyncio.Event()])
    async with served(gateway) as address, AsyncClient(address, "k") as client:
        first = asyncio.Event()

        async def read() -> list[str]:
            seen = []
            async with client.stream("m", "x") as stream:
                async for delta in stream:
                    seen.append(delta.text)
                    first.set()
                    if how == "cancel":
                        stream.cancel()
                    if how == "leave":
                        break
            return seen

        task = asyncio.create_task(read())
        await first.wait()
        if how == "task":
            task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        async with asyncio.timeout(WAIT_S):
            await gateway.cancelled.wait()

    assert isinstance(result, asyncio.CancelledError) if how == "task" else result == ["He"]


async def test_a_synchronous_stream_is_cancelled_at_the_end_of_its_block() -> None:
    gateway = ScriptedGateway(["He", asyncio.Event()])

    def read(address: str) -> list[str]:
        with Client(address, "k") as client, client.stream("m", "x") as stream:
            for delta in stream:
                return [delta.text]
        return []

    async with served(gateway) as address:
        assert await asyncio.to_thread(read, address) == ["He"]
        async with asyncio.timeout(WAIT_S):
            await gateway.cancelled.wait()


async def test_every_option_reaches_the_wire() -> None:
    gateway = ScriptedGateway(["x"], ["x"])
    options = Options(
        max_tokens=5, temperature=0.0, seed=0, choices=1, stop=["a"], batch=True, user="u", metadata={"k": "v"},
        tools=[Tool("f", "d", {"type": "object"}, strict=True)], tool_choice="f", parallel_tool_calls=False,
        reasoning_effort="low", json_schema={"type": "object"},
    )  # fmt: skip
    messages = [
        Message("user", "hi"),
        Message("assistant", tool_calls=(ToolCall("c", "f", "{}"),)),
        Message("tool", "1", tool_call_id="c"),
    ]
    async with served(gateway) as address, AsyncClient(address, "k") as client:
        await client.generate("m", messages, options)
        await client.generate("m", [1, 2])
        with pytest.raises(ValueError, match="empty"):
            client.stream("m", [])

    sent = gateway.requests[0]
    assert (sent.temperature, sent.seed, sent.max_token_count, list(sent.stop)) == (0, 0, 5, ["a"])
    assert sent.HasField("temperature")
    assert not sent.HasField("top_p")
    assert sent.priority_class == common_pb2.PRIORITY_CLASS_BATCH
    assert sent.chat.tool_choice == pb.TOOL_CHOICE_MODE_NAMED
    assert (sent.chat.tool_choice_name, sent.chat.parallel_tool_calls) == ("f", False)
    assert (sent.chat.tools[0].parameters, sent.chat.tools[0].strict) == ('{"type": "object"}', True)
    assert [m.role for m in sent.chat.messages] == ["user", "assistant", "tool"]
    assert sent.chat.messages[2].tool_call_id == "c"
    assert sent.grammar.kind == common_pb2.GRAMMAR_KIND_JSON_SCHEMA
    assert list(gateway.requests[1].prompt_token_ids.token_ids) == [1, 2]


def test_waits_double_up_to_the_cap_with_full_jitter_after_what_the_server_asks() -> None:
    policy = RetryPolicy(attempts=9, base_s=1.0, cap_s=4.0, jitter=lambda: 0.5)
    plain = MillraceError(grpc.StatusCode.UNAVAILABLE, "x", reason="NO_WORKER")
    asked = MillraceError(grpc.StatusCode.UNAVAILABLE, "x", reason="NO_WORKER", retry_after_s=3.0)

    assert [policy.wait_s(n, plain) for n in (1, 2, 3, 4, 9)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert policy.wait_s(1, asked) == 3.5


def test_a_wait_past_the_deadline_is_not_begun() -> None:
    now = [0.0]
    turn = Turn(RetryPolicy(jitter=lambda: 0.0), 10.0, lambda: now[0])
    asked = MillraceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "x", reason="QUEUE_FULL", retry_after_s=6.0)

    assert turn.wait_after(asked, began=False) == 6.0
    now[0] = 6.0
    assert turn.left_s == 4.0
    with pytest.raises(MillraceError):
        turn.wait_after(asked, began=False)
