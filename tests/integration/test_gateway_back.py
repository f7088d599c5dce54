"""The gateway's back with a real Redis and a real worker of the echo model, a test router between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2

from services.common.admission_store import AdmissionStore
from services.worker.model_source import load_model
from services.worker.wiring import WorkerApp, build
from tests.helpers.gateway import KEY, FakeRouter, read_all, running_back
from tests.helpers.redis import RedisProcess
from tests.helpers.worker import echo_config, echo_tokens


@pytest.fixture
async def store(redis_client: aioredis.Redis) -> AdmissionStore:
    return AdmissionStore(redis_client)


@pytest.fixture
async def router(store: AdmissionStore) -> AsyncIterator[FakeRouter]:
    router = FakeRouter(store).start()
    yield router
    await router.stop()


async def start_worker(store: AdmissionStore, *, step_ms: float = 0.5) -> WorkerApp:
    config = echo_config(step_ms=step_ms)
    app = build(config, store=store, model=load_model(config))
    await app.start()
    return app


@pytest.fixture
async def worker(store: AdmissionStore) -> AsyncIterator[WorkerApp]:
    app = await start_worker(store)
    yield app
    await app.stop()


async def test_a_request_runs_to_its_end_and_is_billed_once(
    redis_server: RedisProcess, redis_client: aioredis.Redis, worker: WorkerApp, router: FakeRouter, tmp_path: Path
) -> None:
    async with running_back(redis_server.url, redis_client, tmp_path) as rig:
        generation = await rig.back.generator.start(KEY, rig.request(max_tokens=40, choices=2))

        answer = await read_all(generation)

        assert answer.error is None
        for choice in (0, 1):
            assert answer.tokens[choice] == echo_tokens(generation.request_id, choice, len(answer.tokens[choice]))
        await rig.published()
        (event,) = await rig.usage_events()
        assert event.request_id == generation.request_id
        assert event.terminal_state == common_pb2.TERMINAL_STATE_COMPLETED
        assert event.billed.prompt_token_count == 5
        assert event.billed.completion_token_count == sum(len(t) for t in answer.tokens.values())
        assert event.worker_instance == worker.instance
        await rig.until(lambda: len(worker.parts.table) == 0)
