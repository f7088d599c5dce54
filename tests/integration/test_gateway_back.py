"""The gateway's back with a real Redis and real workers of the echo model, a test router between them."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2

from services.common.admission_scripts import pool_key, slot_key
from services.common.admission_store import AdmissionStore
from services.common.admission_types import KeyRecord, QuotaLimits
from services.common.errors import (
    BudgetExhausted,
    Cancelled,
    ConcurrencyLimited,
    DeadlineExceeded,
    Draining,
    NotFound,
    NotReady,
    NoWorker,
    StoreUnavailable,
)
from services.gateway.generation import Generation, token_events
from services.worker.engine.fake_model_runner import echo_embedding
from services.worker.model_source import load_model
from services.worker.wiring import WorkerApp, build
from tests.helpers.admission import open_budget
from tests.helpers.gateway import KEY, POOL, Answer, FakeRouter, GatewayRig, end, read_all, running_back
from tests.helpers.redis import RedisProcess
from tests.helpers.waiting import WAIT_S
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
    app = await start_worker(store, step_ms=2.0)
    yield app
    await app.stop()


@pytest.fixture
async def rig(
    redis_server: RedisProcess, redis_client: aioredis.Redis, worker: WorkerApp, router: FakeRouter, tmp_path: Path
) -> AsyncIterator[GatewayRig]:
    async with running_back(redis_server.url, redis_client, tmp_path) as rig:
        yield rig


def limited(**limits: int) -> KeyRecord:
    return dataclasses.replace(KEY, limits=QuotaLimits(**limits))


async def read_some(generation: Generation, count: int) -> Answer:
    """Deliver at least `count` tokens of choice 0, as a front does that then stops reading."""
    answer = Answer()
    async for event in token_events(generation):
        answer.take(event)
        generation.mark_delivered(event.choice, len(answer.tokens[event.choice]))
        if len(answer.tokens[event.choice]) >= count:
            break
    return answer


def assert_echo(generation: Generation, answer: Answer) -> None:
    for choice, ids in answer.tokens.items():
        assert ids == echo_tokens(generation.request_id, choice, len(ids))


async def assert_idle(rig: GatewayRig, store: AdmissionStore) -> None:
    """Nothing is queued, live, unsettled or reserved."""
    await rig.published()
    assert await store.count_queued(POOL) == 0
    assert await store.list_live(POOL) == {}
    assert await rig.redis.zcard(pool_key(POOL, "unsettled")) == 0
    assert await rig.redis.exists(slot_key("acme", "live")) == 0


async def test_a_request_runs_to_its_end_and_is_billed_once(
    rig: GatewayRig, worker: WorkerApp, store: AdmissionStore
) -> None:
    generation = await rig.back.generator.start(KEY, rig.request(max_tokens=40, choices=2))

    answer = await read_all(generation)

    assert answer.error is None
    assert_echo(generation, answer)
    await assert_idle(rig, store)
    (event,) = await rig.usage_events()
    assert event.request_id == generation.request_id
    assert event.terminal_state == common_pb2.TERMINAL_STATE_COMPLETED
    assert event.billed.prompt_token_count == 5
    assert event.billed.completion_token_count == sum(len(t) for t in answer.tokens.values())
    assert event.worker_instance == worker.instance
    await rig.until(lambda: len(worker.parts.table) == 0)


async def test_an_embedding_takes_the_way_of_every_request_and_pays_for_its_prompt_alone(
    rig: GatewayRig, worker: WorkerApp, store: AdmissionStore
) -> None:
    request = rig.request(prompt=40, max_tokens=1)
    request.sampling.embed = True
    await open_budget(store, datetime.now(UTC).date())
    generation = await rig.back.generator.start(limited(budget_tokens=41, concurrent_requests=1), request)

    answer = await read_all(generation)

    assert (answer.error, answer.tokens) == (None, {0: []})
    assert generation.embedding == echo_embedding(range(1, 41))
    await assert_idle(rig, store)
    (event,) = await rig.usage_events()
    assert event.terminal_state == common_pb2.TERMINAL_STATE_COMPLETED
    assert event.billed == common_pb2.TokenUsage(prompt_token_count=40)
    await rig.until(lambda: len(worker.parts.table) == 0)


async def test_many_requests_at_once_each_get_their_own_tokens_and_one_bill(
    rig: GatewayRig, store: AdmissionStore
) -> None:
    second = await start_worker(store)
    await rig.until(lambda: len(rig.back.parts.pool.attached_instances()) == 2)

    async def one(number: int) -> tuple[Generation, Answer]:
        generation = await rig.back.generator.start(KEY, rig.request(prompt=1 + number, max_tokens=1 + number))
        return generation, await read_all(generation)

    done = await asyncio.gather(*(one(number) for number in range(32)))

    for generation, answer in done:
        assert answer.error is None
        assert_echo(generation, answer)
    await assert_idle(rig, store)
    events = {event.request_id: event for event in await rig.usage_events()}
    assert len(events) == 32
    for number, (generation, answer) in enumerate(done):
        billed = events[generation.request_id].billed
        assert (billed.prompt_token_count, billed.completion_token_count) == (1 + number, len(answer.tokens[0]))
    await second.stop()


async def test_a_cut_client_stops_the_worker_and_pays_for_what_was_delivered(
    rig: GatewayRig, worker: WorkerApp, store: AdmissionStore
) -> None:
    generation = await rig.back.generator.start(KEY, rig.request(max_tokens=400))
    answer = await read_some(generation, 3)

    usage = await generation.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED)

    assert usage.completion_token_count == len(answer.tokens[0])
    assert usage.prompt_token_count == 5
    await rig.until(lambda: len(worker.parts.table) == 0)
    await assert_idle(rig, store)
    (event,) = await rig.usage_events()
    assert event.terminal_state == common_pb2.TERMINAL_STATE_CANCELLED


async def test_a_second_finish_changes_nothing(rig: GatewayRig) -> None:
    generation = await rig.back.generator.start(KEY, rig.request())
    answer = await read_all(generation)

    again = await generation.finish(common_pb2.TERMINAL_STATE_FAILED, common_pb2.FINISH_REASON_ERROR, "INTERNAL")

    assert again.completion_token_count == len(answer.tokens[0])
    await rig.published()
    assert len(await rig.usage_events()) == 1


async def test_a_queued_request_that_is_cut_leaves_the_queue_and_is_free(
    rig: GatewayRig, router: FakeRouter, store: AdmissionStore
) -> None:
    router.paused = True
    generation = await rig.back.generator.start(KEY, rig.request())
    assert await store.count_queued(POOL) == 1

    usage = await generation.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED)

    assert usage == common_pb2.TokenUsage()
    await assert_idle(rig, store)


async def test_a_stopped_choice_ends_alone(rig: GatewayRig, worker: WorkerApp) -> None:
    generation = await rig.back.generator.start(KEY, rig.request(max_tokens=300, choices=2))
    answer = Answer()
    async for event in token_events(generation):
        answer.take(event)
        if event.choice == 0 and not answer.finishes and len(answer.tokens[0]) >= 3:
            generation.mark_delivered(0, 2)
            generation.stop_choice(0, 2)
        elif event.choice == 1:
            generation.mark_delivered(1, len(answer.tokens[1]))
    usage = await end(generation, answer)

    assert len(answer.tokens[1]) == 300
    assert len(answer.tokens[0]) < 300
    assert usage.completion_token_count == 302
    await rig.until(lambda: len(worker.parts.table) == 0)


async def test_the_deadline_ends_a_request_that_no_worker_takes(
    rig: GatewayRig, router: FakeRouter, store: AdmissionStore
) -> None:
    router.paused = True
    generation = await rig.back.generator.start(KEY, rig.request(timeout_s=0.2))

    answer = await read_all(generation)

    assert isinstance(answer.error, DeadlineExceeded)
    await assert_idle(rig, store)
    (event,) = await rig.usage_events()
    assert event.terminal_state == common_pb2.TERMINAL_STATE_EXPIRED
    assert event.billed.prompt_token_count == 0


async def test_a_request_is_cancelled_by_id_from_this_gateway_and_from_another(
    rig: GatewayRig, redis_server: RedisProcess, redis_client: aioredis.Redis, tmp_path: Path
) -> None:
    async with running_back(redis_server.url, redis_client, tmp_path / "b", instance="gateway-2") as other:
        for canceller in (rig.back.generator, other.back.generator):
            generation = await rig.back.generator.start(KEY, rig.request(max_tokens=400))
            await read_some(generation, 1)
            await rig.until(lambda: not len(rig.back.generator._tasks))  # `where` is written behind the answer

            assert await canceller.cancel(KEY, generation.request_id)

            with pytest.raises(Cancelled):
                async for _ in token_events(generation):
                    pass
            await generation.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED)
            await rig.published()


async def test_requests_of_other_tenants_cannot_be_seen_or_cancelled(rig: GatewayRig) -> None:
    generation = await rig.back.generator.start(KEY, rig.request(max_tokens=400))
    stranger = dataclasses.replace(KEY, tenant="other")

    for request_id in (generation.request_id, "0" * 26, "x", "{" * 26):
        with pytest.raises(NotFound):
            await rig.back.generator.cancel(stranger, request_id)

    await generation.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED)


async def test_a_refused_request_leaves_nothing_behind(
    rig: GatewayRig, router: FakeRouter, store: AdmissionStore
) -> None:
    router.paused = True
    key = limited(concurrent_requests=1)
    generation = await rig.back.generator.start(key, rig.request())

    with pytest.raises(ConcurrencyLimited) as refused:
        await rig.back.generator.start(key, rig.request())

    assert refused.value.retry_after_s is not None
    assert len(rig.back.parts.table) == 1
    await generation.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED)
    await assert_idle(rig, store)
    again = await rig.back.generator.start(key, rig.request())
    await again.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED)


async def test_a_budget_stops_the_stream_at_exactly_its_last_token(rig: GatewayRig, store: AdmissionStore) -> None:
    key = limited(budget_tokens=105)
    await open_budget(store, datetime.now(UTC).date())
    generation = await rig.back.generator.start(key, rig.request(prompt=5, max_tokens=300))

    answer = await read_all(generation)

    assert answer.error is None
    assert len(answer.tokens[0]) == 100
    assert answer.finishes[0] == common_pb2.FINISH_REASON_BUDGET
    await assert_idle(rig, store)
    with pytest.raises(BudgetExhausted):
        await rig.back.generator.start(key, rig.request(prompt=5))


async def test_64_streams_share_a_budget_to_its_last_token_and_not_past_it(
    rig: GatewayRig, store: AdmissionStore, router: FakeRouter, redis_client: aioredis.Redis
) -> None:
    router.paused = True
    budget = 5_000
    key = dataclasses.replace(KEY, key_limits=QuotaLimits(daily_budget_tokens=budget))
    await open_budget(store, datetime.now(UTC).date(), "acme", KEY.key_id)
    streams = [await rig.back.generator.start(key, rig.request(prompt=5, max_tokens=300)) for _ in range(64)]
    router.paused = False

    answers = await asyncio.gather(*(read_all(stream) for stream in streams))

    assert {answer.finishes[0] for answer in answers} == {common_pb2.FINISH_REASON_BUDGET}
    delivered = sum(5 + len(answer.tokens[0]) for answer in answers)
    assert budget - 64 < delivered <= budget
    await assert_idle(rig, store)
    assert await redis_client.hget(f"mr:{{acme}}:budget|{KEY.key_id}", "day_tokens") == str(delivered).encode()
    with pytest.raises(BudgetExhausted) as refused:
        await rig.back.generator.start(key, rig.request(prompt=65))
    assert "of the day of this key" in refused.value.message
    assert refused.value.retry_after_s is not None


async def test_without_a_worker_the_refusal_is_quick_and_ends_when_one_comes(
    redis_server: RedisProcess,
    redis_client: aioredis.Redis,
    store: AdmissionStore,
    router: FakeRouter,
    tmp_path: Path,
) -> None:
    async with running_back(redis_server.url, redis_client, tmp_path, models=False) as rig:
        await rig.until(lambda: rig.back.closed_because() is None)
        assert not rig.back.ready()
        with pytest.raises(NoWorker):
            rig.request()

        worker = await start_worker(store)
        await rig.until(rig.back.ready)
        request = rig.request()
        answer = await read_all(await rig.back.generator.start(KEY, request))
        assert answer.error is None

        await worker.drain(1.0)
        await worker.stop()
        await rig.until(lambda: not rig.back.parts.pool.attached_instances())
        with pytest.raises(NoWorker):
            await rig.back.generator.start(KEY, request)


async def test_a_broken_stream_continues_without_loss(rig: GatewayRig, worker: WorkerApp) -> None:
    generation = await rig.back.generator.start(KEY, rig.request(max_tokens=400))
    answer = Answer()
    reading = asyncio.create_task(read_all(generation, answer))
    for count in (20, 100, 200):
        await rig.until(lambda count=count: len(answer.tokens.get(0, ())) >= count)
        worker.parts.hub.close_sessions()

    await reading

    assert answer.error is None
    assert len(answer.tokens[0]) == 400
    assert_echo(generation, answer)
    await rig.published()
    (event,) = await rig.usage_events()
    assert event.attempt == 1, "a short break is no new attempt"


async def test_a_worker_that_leaves_hands_its_streams_to_another(
    rig: GatewayRig, worker: WorkerApp, store: AdmissionStore, router: FakeRouter
) -> None:
    generation = await rig.back.generator.start(KEY, rig.request(max_tokens=400))
    answer = Answer()
    reading = asyncio.create_task(read_all(generation, answer))
    await rig.until(lambda: len(answer.tokens.get(0, ())) >= 20)
    second = await start_worker(store)
    await rig.until(lambda: len(rig.back.parts.pool.attached_instances()) == 2)

    await worker.drain(0.0)
    await reading

    assert answer.error is None
    assert len(answer.tokens[0]) == 400
    assert_echo(generation, answer)
    await rig.published()
    (event,) = await rig.usage_events()
    assert event.attempt == 2
    assert event.worker_instance == second.instance
    assert event.billed.completion_token_count == 400
    await second.stop()


async def test_a_drain_lets_streams_end_and_refuses_new_work(
    rig: GatewayRig, router: FakeRouter, store: AdmissionStore
) -> None:
    router.paused = True
    running = await rig.back.generator.start(KEY, rig.request(max_tokens=5))
    reading = asyncio.create_task(read_all(running))

    draining = asyncio.create_task(rig.back.drain(WAIT_S))
    await rig.until(lambda: rig.back.draining)
    with pytest.raises(Draining):
        await rig.back.generator.start(KEY, rig.request())
    assert not rig.back.ready()
    router.paused = False
    await draining

    assert (await reading).error is None
    await assert_idle(rig, store)
    assert len(await rig.usage_events()) == 1


async def test_a_drain_tells_what_outlives_its_grace(
    rig: GatewayRig, router: FakeRouter, store: AdmissionStore
) -> None:
    router.paused = True
    waiting = await rig.back.generator.start(KEY, rig.request(max_tokens=5))
    reading = asyncio.create_task(read_all(waiting))

    await rig.back.drain(0.05)

    assert isinstance((await reading).error, Draining)
    await assert_idle(rig, store)
    assert len(await rig.usage_events()) == 1


async def test_streams_run_on_while_redis_is_away_and_are_billed_when_it_is_back(tmp_path: Path) -> None:
    redis = RedisProcess().start()
    client = aioredis.Redis.from_url(redis.url)
    store = AdmissionStore(client)
    worker = await start_worker(store, step_ms=2.0)
    router = FakeRouter(store).start()
    try:
        async with running_back(redis.url, client, tmp_path / "data") as rig:
            generation = await rig.back.generator.start(KEY, rig.request(max_tokens=300))
            answer = Answer()
            reading = asyncio.create_task(read_all(generation, answer))
            await rig.until(lambda: len(answer.tokens.get(0, ())) >= 5)
            redis.kill()

            await reading

            assert answer.error is None
            assert len(answer.tokens[0]) == 300
            with pytest.raises(StoreUnavailable):
                await rig.back.generator.start(KEY, rig.request())
            await rig.until(lambda: not rig.back.ready())
            assert rig.back.parts.publisher.unpublished_count >= 1

            redis.start()
            await rig.until(rig.back.ready)
            await rig.published()
            events = [e for e in await rig.usage_events() if e.request_id == generation.request_id]
            assert [e.billed.completion_token_count for e in events] == [300]
    finally:
        await router.stop()
        await worker.stop()
        await client.aclose()
        redis.stop()


async def test_what_a_dead_gateway_left_in_its_outbox_is_published_by_the_next(
    rig: GatewayRig, redis_server: RedisProcess, redis_client: aioredis.Redis, store: AdmissionStore, tmp_path: Path
) -> None:
    data = tmp_path / "shared"
    async with running_back(redis_server.url, redis_client, data, instance="gateway-2") as dying:
        generation = await dying.back.generator.start(KEY, dying.request())
        await dying.back.parts.publisher.close()
        await read_all(generation)
        assert await dying.usage_events() == []

    async with running_back(redis_server.url, redis_client, data, instance="gateway-3") as heir:
        await heir.published()

        (event,) = await heir.usage_events()
        assert event.request_id == generation.request_id
        assert event.gateway_instance == "gateway-2"
        await assert_idle(heir, store)


async def test_a_record_stays_until_the_ledger_has_it(rig: GatewayRig, redis_client: aioredis.Redis) -> None:
    generation = await rig.back.generator.start(KEY, rig.request())
    await read_all(generation)
    await rig.published()
    assert [r.request_id for r in rig.back.parts.outbox.records] == [generation.request_id]

    await redis_client.zadd(pool_key(POOL, "committed"), {generation.request_id: 1.0})

    await rig.until(lambda: not rig.back.parts.outbox.records)


async def test_a_full_disk_ends_what_runs_once_and_refuses_what_is_new_until_it_has_room(
    rig: GatewayRig, store: AdmissionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    running = await rig.back.generator.start(KEY, rig.request(max_tokens=20))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", no_space)
        assert (await read_all(running)).error is None
        await rig.published()
        with pytest.raises(NotReady) as refused:
            await rig.back.generator.start(KEY, rig.request())
        assert not rig.back.ready()
    await rig.until(rig.back.ready)

    assert refused.value.retry_after_s is not None
    (event,) = await rig.usage_events()
    assert (event.request_id, event.billed.completion_token_count) == (running.request_id, 20)
    await assert_idle(rig, store)


async def test_a_slow_disk_holds_up_the_end_of_a_request_and_no_other_stream(
    rig: GatewayRig, store: AdmissionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, release, sync = threading.Event(), threading.Event(), os.fdatasync

    def slow(file: int) -> None:
        reached.set()
        release.wait(WAIT_S)
        sync(file)

    monkeypatch.setattr(os, "fdatasync", slow)
    first = await rig.back.generator.start(KEY, rig.request(max_tokens=5))
    answer = await read_all(first, finish=False)
    ending = asyncio.create_task(end(first, answer))
    await rig.until(reached.is_set)
    other = await rig.back.generator.start(KEY, rig.request(max_tokens=30))
    beside = await read_all(other, finish=False)
    assert not ending.done()
    release.set()
    await asyncio.gather(ending, end(other, beside))

    assert_echo(other, beside)
    await assert_idle(rig, store)
    billed = {e.request_id: e.billed.completion_token_count for e in await rig.usage_events()}
    assert billed == {first.request_id: 5, other.request_id: 30}
