"""`idempotency-key` over gRPC: one generation for equal calls, whoever asks, whenever, over a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc

from services.common.admission_store import AdmissionStore
from services.common.errors import IdempotencyConflict, InvalidRequest, MillraceError, Unsupported, WorkerLost
from services.common.grpc_client import error_from_rpc
from services.common.grpc_server import start_server
from services.common.metrics import Metrics
from services.gateway.app import create_app
from services.gateway.grpc_service import SERVICE_NAME, GatewayService
from services.gateway.idempotency_store import IdempotencyStore
from services.gateway.resumable import GRACE_S
from tests.helpers.echo_generation import (
    AsgiClient,
    FakeGenerator,
    FakeKeyRing,
    Step,
    front_parts,
    key,
    one_by_one,
    resumable_answers,
    served,
    tokens,
)
from tests.helpers.fake_clock import FakeClock
from tests.helpers.waiting import WAIT_S, until

IDS = [72, 101, 108, 108, 111]
ASK = {"model": "tiny", "prompt": "hi", "max_token_count": 5}
COMPLETED = (common_pb2.TERMINAL_STATE_COMPLETED, common_pb2.FINISH_REASON_LENGTH, "")


class Rig:
    """One gateway's door."""

    def __init__(self, redis: aioredis.Redis, generator: FakeGenerator, instance: str) -> None:
        self.generator = generator
        self.clock = FakeClock()
        self.answers = resumable_answers(redis, self.clock, instance=instance)
        self.records = IdempotencyStore(redis)
        self.stub: Any = None
        self.http: Any = None

    def call(self, *metadata: tuple[str, str], **fields: Any) -> Any:
        sent = (("authorization", "Bearer secret"), *(metadata or (("idempotency-key", "order 7"),)))
        return self.stub.Generate(pb.GenerateRequest(**{**ASK, **fields}), metadata=sent)

    async def messages(self, *metadata: tuple[str, str], **fields: Any) -> list[pb.GenerateResponse]:
        return [message async for message in self.call(*metadata, **fields)]

    async def failure(self, *metadata: tuple[str, str], **fields: Any) -> MillraceError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.messages(*metadata, **fields)
        return error_from_rpc(caught.value)

    async def until_forgotten(self) -> None:
        """Let graces pass until no log is held."""
        async with asyncio.timeout(WAIT_S):
            while len(self.answers):
                await self.clock.advance(GRACE_S)
                await asyncio.sleep(0.002)


NewRig = Callable[..., contextlib.AbstractAsyncContextManager[Rig]]


@pytest.fixture
def new_rig(redis_client: aioredis.Redis) -> NewRig:
    @contextlib.asynccontextmanager
    async def make(generator: FakeGenerator, instance: str = "gateway-1") -> AsyncIterator[Rig]:
        rig = Rig(redis_client, generator, instance)
        parts = front_parts(generator, served(), keyring=FakeKeyRing(secret=key()), answers=rig.answers)
        server = await start_server("127.0.0.1:0", GatewayService(parts).add_to, service_names=[SERVICE_NAME])
        try:
            async with grpc.aio.insecure_channel(server.address) as channel:
                rig.stub = pb_grpc.GatewayServiceStub(channel)
                rig.http = create_app(parts, metrics=Metrics(), ready=lambda: True)
                await AdmissionStore(redis_client).renew_gateway(instance, server.address)
                yield rig
        finally:
            await server.stop(0)
            await rig.answers.close()

    return make


async def test_equal_calls_are_one_generation_and_get_equal_messages(new_rig: NewRig) -> None:
    async with new_rig(FakeGenerator(one_by_one(IDS))) as rig, new_rig(rig.generator, "gateway-2") as other:
        first = await rig.messages()
        again = await rig.messages()
        await rig.until_forgotten()
        from_redis = await rig.messages()
        elsewhere = await other.messages()

        assert first == again == from_redis == elsewhere
        assert [message.WhichOneof("event") for message in first][::6] == ["accepted", "completed"]
        assert [i for message in first for i in message.delta.token_ids] == IDS
        assert first[-1].completed.usage.completion_token_count == 5
        assert rig.generator.only.endings == [COMPLETED]
        assert rig.generator.only.delivered == {0: 5}


async def test_a_cut_call_runs_on_and_the_next_one_joins_from_the_start(new_rig: NewRig) -> None:
    hold = asyncio.Event()
    first_token, *rest = one_by_one(IDS)
    async with new_rig(FakeGenerator([first_token, hold, *rest])) as rig:
        call = rig.call()
        async for message in call:
            if message.HasField("delta"):
                break
        call.cancel()
        seen = []
        async for message in rig.call():
            seen.append(message)
            if message.HasField("delta"):
                hold.set()
        await until(lambda: bool(rig.generator.only.endings))

        assert [i for message in seen for i in message.delta.token_ids] == IDS
        assert rig.generator.only.endings == [COMPLETED]


async def test_a_run_that_nobody_comes_back_to_is_cancelled_after_the_grace(new_rig: NewRig) -> None:
    async with new_rig(FakeGenerator([tokens([72]), asyncio.Event()])) as rig:
        call = rig.call()
        async for message in call:
            if message.HasField("delta"):
                break
        call.cancel()
        await rig.until_forgotten()

        assert [state for state, _, _ in rig.generator.only.endings] == [common_pb2.TERMINAL_STATE_CANCELLED]


async def test_a_call_that_runs_is_not_read_over_http_here_or_elsewhere(new_rig: NewRig) -> None:
    hold = asyncio.Event()
    first_token, *rest = one_by_one(IDS)
    async with new_rig(FakeGenerator([first_token, hold, *rest])) as rig, new_rig(rig.generator, "gateway-2") as other:
        call = rig.call()
        async for message in call:
            if message.HasField("delta"):
                break
        # Who holds a stream is written beside its run.
        await until(lambda: rig.records.holder("acme", message.request_id))
        path = f"/v1/streams/{message.request_id}"
        answers = [await AsgiClient(each.http).ask("GET", path) for each in (rig, other)]
        hold.set()
        left = [i async for message in call for i in message.delta.token_ids]

        assert [(answer.status, answer.error["code"]) for answer in answers] == [(400, "UNSUPPORTED")] * 2
        assert all("over gRPC" in str(answer.error["message"]) for answer in answers)
        assert left == IDS[1:]
        assert rig.generator.only.endings == [COMPLETED]


async def test_another_request_under_the_key_is_a_conflict(new_rig: NewRig) -> None:
    async with new_rig(FakeGenerator(one_by_one(IDS))) as rig, new_rig(rig.generator, "gateway-2") as other:
        await rig.messages()
        here = await rig.failure(prompt="ho")
        await rig.until_forgotten()
        there = await other.failure(max_token_count=4)

        assert (type(here), type(there)) == (IdempotencyConflict, IdempotencyConflict)
        assert len(rig.generator.requests) == 1


async def test_a_failure_reaches_its_client_with_its_reason_and_frees_the_key(new_rig: NewRig) -> None:
    steps: list[Step] = [tokens([72]), WorkerLost("Lost.")]
    async with new_rig(FakeGenerator(lambda _: steps)) as rig:
        failed = await rig.failure()
        # Freed once the failed run has ended.
        await until(lambda: bool(rig.generator.only.endings))
        steps[:] = one_by_one(IDS)
        answer = await rig.messages()

        assert (type(failed), failed.message) == (WorkerLost, "Lost.")
        assert [i for message in answer for i in message.delta.token_ids] == IDS
        assert len(rig.generator.generations) == 2


async def test_a_key_of_embeddings_is_refused_by_name(new_rig: NewRig) -> None:
    async with new_rig(FakeGenerator()) as rig:
        request = pb.EmbedRequest(model="tiny", inputs=[pb.EmbedInput(text="a")])
        sent = (("authorization", "Bearer secret"), ("idempotency-key", "a"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Embed(request, metadata=sent)
        error = error_from_rpc(caught.value)

        assert (type(error), error.param) == (Unsupported, "idempotency-key")


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ([("idempotency-key", "")], InvalidRequest),
        ([("idempotency-key", "x" * 256)], InvalidRequest),
        ([("idempotency-key", "a"), ("idempotency-key", "b")], InvalidRequest),
        ([("x-millrace-resume", "1")], Unsupported),
        ([("idempotency-key", "a"), ("last-event-id", "7")], Unsupported),
    ],
)
async def test_what_cannot_be_meant_is_refused_with_its_name(
    new_rig: NewRig, metadata: list[tuple[str, str]], kind: type[MillraceError]
) -> None:
    async with new_rig(FakeGenerator(one_by_one(IDS))) as rig:
        error = await rig.failure(*metadata)

        assert (type(error), error.param) == (kind, metadata[-1][0])
        assert rig.generator.requests == []
