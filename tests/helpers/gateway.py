"""The gateway's back on a real Redis, a router that only claims and submits, and a client that plays the front."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import redis.asyncio as aioredis
from google.protobuf import duration_pb2
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2
from millrace.worker.v1 import worker_service_pb2 as pb
from millrace.worker.v1 import worker_service_pb2_grpc

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Claimed, KeyRecord, Ownership, Pool, QuotaLimits
from services.common.clock import SystemClock
from services.common.errors import MillraceError
from services.common.grpc_client import open_channel
from services.common.lifecycle import end_tasks
from services.gateway.back import Back, build_parts
from services.gateway.config import GatewayConfig
from services.gateway.generation import Generation, TokenEvent, ValidRequest, token_events
from tests.helpers.redis import usage_events
from tests.helpers.waiting import WAIT_S, until

POOL = Pool("echo")
KEY = KeyRecord(
    key_id="key-1", tenant="acme", project="", models=(), weight=1.0, limits=QuotaLimits(concurrent_requests=1_000)
)


# A worker that is frozen is left for the next one after it.
SUBMIT_S = 5.0


class FakeRouter:
    """Claims what is queued and submits it to the first worker that takes it."""

    def __init__(self, store: AdmissionStore) -> None:
        self.store = store
        self.paused = False
        self.submitted: list[tuple[str, str, int]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> FakeRouter:
        self._task = asyncio.create_task(self._run())
        return self

    async def stop(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(MillraceError):
                for claimed in [] if self.paused else await self.store.claim(POOL, "router-1", 8):
                    if not await self._submit(claimed):
                        await self.store.return_claims(POOL, [claimed.claim_id])
            await asyncio.sleep(0.01)

    async def _submit(self, claimed: Claimed) -> bool:
        for number, worker in enumerate(await self.store.list_workers(), start=1):
            epoch = claimed.claim_number << 8 | number
            remaining = duration_pb2.Duration()
            remaining.FromMilliseconds(claimed.remaining_ms)
            request = pb.SubmitRequest(
                entry=claimed.entry, attempt=claimed.entry.attempt, epoch=epoch, remaining=remaining
            )
            async with open_channel(worker.address) as channel:
                try:
                    answer = await worker_service_pb2_grpc.WorkerServiceStub(channel).Submit(request, timeout=SUBMIT_S)
                except grpc.aio.AioRpcError:
                    continue
            if answer.accepted:
                self.submitted.append((claimed.entry.request_id, worker.instance, epoch))
                await self.store.own(POOL, [Ownership(claimed.entry.request_id, epoch, worker.instance)])
                return True
        return False


@dataclasses.dataclass
class GatewayRig:
    """A running back and what its tests look at."""

    back: Back
    redis: aioredis.Redis

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition)

    async def usage_events(self) -> list[usage_event_pb2.UsageEvent]:
        return await usage_events(self.redis, POOL)

    async def published(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.back.parts.publisher.wait_published()

    def request(self, *, prompt: int = 5, max_tokens: int = 8, **options: object) -> ValidRequest:
        """A valid request of the echo model."""
        fields = {"choices": 1, "timeout_s": 60.0, "resume": True, **options}
        sampling = common_pb2.SamplingParams(
            temperature=1.0,
            top_p=1.0,
            seed=7,
            choice_count=fields["choices"],  # type: ignore[arg-type]
            max_token_count=max_tokens,
            repetition_penalty=1.0,
        )
        return ValidRequest(
            model=self.back.parts.directory.resolve("echo"),
            prompt_token_ids=array("I", range(1, prompt + 1)),
            sampling=sampling,
            stop=(),
            priority_class=common_pb2.PRIORITY_CLASS_INTERACTIVE,
            resume_policy=common_pb2.RESUME_POLICY_RESUME if fields["resume"] else common_pb2.RESUME_POLICY_FAIL,
            timeout_s=fields["timeout_s"],  # type: ignore[arg-type]
        )


@contextlib.asynccontextmanager
async def running_back(
    redis_url: str, redis: aioredis.Redis, data_dir: Path, *, instance: str = "gateway-1", models: bool = True
) -> AsyncIterator[GatewayRig]:
    """A gateway without doors; with `models` it is ready when this returns."""
    config = GatewayConfig(redis_url=redis_url, data_dir=str(data_dir), cache_secret="test-secret")
    back = Back(build_parts(config, SystemClock(), instance))
    await back.open()
    back.start("127.0.0.1:1")
    rig = GatewayRig(back, redis)
    try:
        if models:
            await rig.until(back.ready)
        yield rig
    finally:
        await back.stop()


@dataclasses.dataclass
class Answer:
    """What the front got of one generation."""

    tokens: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    finishes: dict[int, int] = dataclasses.field(default_factory=dict)
    error: MillraceError | None = None
    events: list[TokenEvent] = dataclasses.field(default_factory=list)

    def take(self, event: TokenEvent) -> None:
        held = self.tokens.setdefault(event.choice, [])
        assert event.first_index == len(held), "a gap or a duplicate"
        held += event.token_ids
        self.events.append(event)
        if event.finish_reason is not None:
            assert event.choice not in self.finishes
            self.finishes[event.choice] = event.finish_reason


async def read_all(generation: Generation, answer: Answer | None = None, *, finish: bool = True) -> Answer:
    """Read to the end as a front does, delivering all, then finish."""
    answer = answer if answer is not None else Answer()
    try:
        async for event in token_events(generation):
            answer.take(event)
            generation.mark_delivered(event.choice, len(answer.tokens[event.choice]))
    except MillraceError as error:
        answer.error = error
    if finish:
        await end(generation, answer)
    return answer


async def end(generation: Generation, answer: Answer) -> common_pb2.TokenUsage:
    """Finish as a front does."""
    error = answer.error
    if error is None:
        reason = common_pb2.FinishReason.ValueType(answer.finishes.get(0, 0))
        return await generation.finish(common_pb2.TERMINAL_STATE_COMPLETED, reason)
    states = {
        "DEADLINE_EXCEEDED": common_pb2.TERMINAL_STATE_EXPIRED,
        "CANCELLED": common_pb2.TERMINAL_STATE_CANCELLED,
    }
    state = states.get(error.row.reason, common_pb2.TERMINAL_STATE_FAILED)
    return await generation.finish(state, common_pb2.FINISH_REASON_ERROR, error.row.reason)
