"""A request that kills its workers: found by what two dead workers had in common, never tried a fourth time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_scripts import pool_key
from services.common.errors import Poisoned
from services.router.config import RouterConfig
from services.router.wiring import build
from tests.helpers.gateway import KEY, POOL, Answer, GatewayRig, read_all, running_back
from tests.helpers.redis import RedisProcess
from tests.helpers.worker import echo_tokens
from tests.helpers.worker_processes import DEADLY_PROMPT, DYING, WorkerProcesses

BYSTANDERS = 6
TOKENS = 1_200


@pytest.fixture
def workers(redis_server: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcesses]:
    workers = WorkerProcesses(redis_server.url, tmp_path_factory.mktemp("w"), module=DYING)
    yield workers
    workers.stop()


@pytest.fixture
async def rig(redis_server: RedisProcess, redis_client: aioredis.Redis, tmp_path: Path) -> AsyncIterator[GatewayRig]:
    router = build(RouterConfig(redis_url=redis_server.url))
    await router.start()
    async with running_back(redis_server.url, redis_client, tmp_path, models=False) as rig:
        yield rig
    await router.stop()


async def start(rig: GatewayRig, *, prompt: int, tokens: int) -> tuple[Answer, asyncio.Task[Answer], str]:
    generation = await rig.back.generator.start(KEY, rig.request(prompt=prompt, max_tokens=tokens))
    answer = Answer()
    return answer, asyncio.create_task(read_all(generation, answer)), generation.request_id


@pytest.mark.fault
async def test_a_deadly_request_ends_after_three_deaths_and_its_neighbours_lose_nothing(
    rig: GatewayRig, workers: WorkerProcesses, redis_client: aioredis.Redis
) -> None:
    first = workers.start("a")
    await rig.until(rig.back.ready)
    started = [await start(rig, prompt=5, tokens=TOKENS) for _ in range(BYSTANDERS)]
    await rig.until(lambda: all(len(answer.tokens.get(0, ())) >= 8 for answer, _, _ in started))
    _, deadly, deadly_id = await start(rig, prompt=len(DEADLY_PROMPT), tokens=50)

    # Every request was in hand of both: they run apart on the third and fourth worker.
    await asyncio.to_thread(first.wait)
    second = workers.start("b")
    await asyncio.to_thread(second.wait)
    rest = [workers.start(name) for name in "cd"]
    poisoned = await deadly
    ends = [process.poll() for process in rest]
    answers = await asyncio.gather(*(task for _, task, _ in started))

    assert isinstance(poisoned.error, Poisoned)
    assert (first.returncode, second.returncode, sorted(ends, key=str)) == (137, 137, [137, None])
    for answer, (_, _, request_id) in zip(answers, started, strict=True):
        assert answer.error is None
        assert answer.tokens[0] == echo_tokens(request_id, 0, TOKENS)
    await rig.published()
    events = {event.request_id: event for event in await rig.usage_events()}
    assert {event.billed.completion_token_count for i, event in events.items() if i != deadly_id} == {TOKENS}
    assert (events[deadly_id].error_reason, events[deadly_id].billed.prompt_token_count) == ("POISONED", 0)
    [(_, parked)] = await redis_client.xrange(pool_key(POOL, "parked"))
    assert parked[b"r"].decode() == deadly_id
    assert len(parked[b"w"].split()) == 3
    assert usage_event_pb2.UsageEvent.FromString(parked[b"e"]).tenant == KEY.tenant


async def test_the_only_request_that_two_dead_workers_had_in_common_ends_at_once(
    rig: GatewayRig, workers: WorkerProcesses
) -> None:
    first = workers.start("a")
    await rig.until(rig.back.ready)
    _, deadly, _ = await start(rig, prompt=len(DEADLY_PROMPT), tokens=50)
    await asyncio.to_thread(first.wait)
    second = workers.start("b")

    poisoned = await deadly

    assert isinstance(poisoned.error, Poisoned)
    assert await asyncio.to_thread(second.wait) == 137
    workers.start("c")
    await rig.until(lambda: len(rig.back.parts.pool.attached_instances()) == 1)
    _, fine, request_id = await start(rig, prompt=5, tokens=10)
    assert (await fine).tokens[0] == echo_tokens(request_id, 0, 10)
