"""Workers that die or freeze under running streams: resumed elsewhere, never twice, never silent."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio as aioredis

from services.common.admission_store import AdmissionStore
from services.common.errors import WorkerLost
from tests.helpers.gateway import KEY, Answer, FakeRouter, GatewayRig, read_all, running_back
from tests.helpers.redis import RedisProcess
from tests.helpers.waiting import until
from tests.helpers.worker import echo_tokens
from tests.helpers.worker_processes import WorkerProcesses


@pytest.fixture
def workers(redis_server: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcesses]:
    workers = WorkerProcesses(redis_server.url, tmp_path_factory.mktemp("w"))
    workers.start("a")
    workers.start("b")
    yield workers
    workers.stop()


@pytest.fixture
async def rig(
    redis_server: RedisProcess, redis_client: aioredis.Redis, workers: WorkerProcesses, tmp_path: Path
) -> AsyncIterator[GatewayRig]:
    router = FakeRouter(AdmissionStore(redis_client)).start()
    async with running_back(redis_server.url, redis_client, tmp_path) as rig:
        await rig.until(lambda: len(rig.back.parts.pool.attached_instances()) == 2)
        yield rig
    await router.stop()


def owner(rig: GatewayRig, request_id: str) -> str:
    live = rig.back.parts.table.get(request_id)
    return live.core.binding.instance if live is not None and live.core.binding is not None else ""


async def test_killed_workers_lose_no_token_and_bill_none_twice(rig: GatewayRig, workers: WorkerProcesses) -> None:
    generations = [await rig.back.generator.start(KEY, rig.request(max_tokens=900, choices=2)) for _ in range(6)]
    answers = [Answer() for _ in generations]
    reading = [asyncio.create_task(read_all(g, a)) for g, a in zip(generations, answers, strict=True)]
    await rig.until(lambda: all(len(a.tokens.get(0, ())) >= 30 for a in answers))
    victim = owner(rig, generations[0].request_id)

    (await workers.of(rig.back.parts.store, victim)).send_signal(signal.SIGKILL)
    await asyncio.gather(*reading)

    for generation, answer in zip(generations, answers, strict=True):
        assert answer.error is None
        for choice in (0, 1):
            assert answer.tokens[choice] == echo_tokens(generation.request_id, choice, 900)
    await rig.published()
    events = await rig.usage_events()
    assert sorted(e.request_id for e in events) == sorted(g.request_id for g in generations)
    assert {e.billed.completion_token_count for e in events} == {1_800}
    assert {e.billed.prompt_token_count for e in events} == {5}
    assert any(e.attempt == 2 for e in events)


async def test_without_resume_a_killed_worker_is_an_error_that_bills_what_was_delivered(
    rig: GatewayRig, workers: WorkerProcesses
) -> None:
    generation = await rig.back.generator.start(KEY, rig.request(max_tokens=1_500, resume=False))
    answer = Answer()
    reading = asyncio.create_task(read_all(generation, answer))
    await rig.until(lambda: len(answer.tokens.get(0, ())) >= 30)

    (await workers.of(rig.back.parts.store, owner(rig, generation.request_id))).send_signal(signal.SIGKILL)
    await reading

    assert isinstance(answer.error, WorkerLost)
    assert answer.tokens[0] == echo_tokens(generation.request_id, 0, len(answer.tokens[0]))
    await rig.published()
    (event,) = await rig.usage_events()
    assert event.error_reason == "WORKER_LOST"
    assert event.billed.completion_token_count == len(answer.tokens[0])


@pytest.mark.fault
async def test_a_frozen_worker_is_left_and_its_late_frames_are_dropped(
    rig: GatewayRig, workers: WorkerProcesses
) -> None:
    generation = await rig.back.generator.start(KEY, rig.request(max_tokens=1_500))
    answer = Answer()
    reading = asyncio.create_task(read_all(generation, answer))
    await rig.until(lambda: len(answer.tokens.get(0, ())) >= 30)
    victim = owner(rig, generation.request_id)
    process = await workers.of(rig.back.parts.store, victim)

    process.send_signal(signal.SIGSTOP)
    await until(lambda: owner(rig, generation.request_id) not in ("", victim))
    process.send_signal(signal.SIGCONT)
    await reading

    assert answer.error is None
    assert answer.tokens[0] == echo_tokens(generation.request_id, 0, 1_500)
    await rig.published()
    (event,) = await rig.usage_events()
    assert (event.attempt, event.billed.completion_token_count) == (2, 1_500)
