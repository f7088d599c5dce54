"""What the gateway notices by itself: lost queue entries, dead owners, terminals set elsewhere; and its trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.admission_scripts import slot_key
from services.common.admission_store import AdmissionStore
from services.common.admission_types import Ownership, Terminal
from services.common.errors import Cancelled
from services.gateway import admission
from services.worker.model_source import load_model
from services.worker.wiring import WorkerApp, build
from tests.helpers.gateway import KEY, POOL, FakeRouter, GatewayRig, read_all, running_back
from tests.helpers.redis import RedisProcess
from tests.helpers.worker import echo_config, echo_tokens


@pytest.fixture
async def store(redis_client: aioredis.Redis) -> AdmissionStore:
    return AdmissionStore(redis_client)


@pytest.fixture
async def worker(store: AdmissionStore) -> AsyncIterator[WorkerApp]:
    config = echo_config()
    app = build(config, store=store, model=load_model(config))
    await app.start()
    yield app
    await app.stop()


@pytest.fixture
async def router(store: AdmissionStore) -> AsyncIterator[FakeRouter]:
    router = FakeRouter(store)
    router.paused = True
    router.start()
    yield router
    await router.stop()


@pytest.fixture
async def rig(
    redis_server: RedisProcess, redis_client: aioredis.Redis, worker: WorkerApp, router: FakeRouter, tmp_path: Path
) -> AsyncIterator[GatewayRig]:
    async with running_back(redis_server.url, redis_client, tmp_path) as rig:
        yield rig


async def test_a_queue_that_redis_lost_is_filled_again(
    rig: GatewayRig, router: FakeRouter, store: AdmissionStore, redis_client: aioredis.Redis
) -> None:
    generation = await rig.back.generator.start(KEY, rig.request())
    reading = asyncio.create_task(read_all(generation))
    for key in [key async for key in redis_client.scan_iter(f"mr:{{{POOL.tag}}}:*")]:
        await redis_client.delete(key)
    await redis_client.delete(slot_key("acme", "live"))
    router.paused = False

    answer = await reading

    assert answer.error is None
    assert answer.tokens[0] == echo_tokens(generation.request_id, 0, 8)
    await rig.published()
    assert len(await rig.usage_events()) == 1


async def test_a_request_owned_by_a_worker_that_is_gone_is_admitted_again(
    rig: GatewayRig, router: FakeRouter, store: AdmissionStore, worker: WorkerApp
) -> None:
    generation = await rig.back.generator.start(KEY, rig.request())
    reading = asyncio.create_task(read_all(generation))
    (claimed,) = await store.claim(POOL, "router-9", 1)
    dead = Ownership(generation.request_id, claimed.claim_number << 8 | 1, "worker-dead")
    await store.own(POOL, [dead])
    router.paused = False

    answer = await reading

    assert answer.error is None
    await rig.published()
    (event,) = await rig.usage_events()
    assert event.attempt == 2
    assert event.worker_instance == worker.instance


async def test_a_terminal_that_another_set_ends_the_stream_and_makes_no_second_event(
    rig: GatewayRig, store: AdmissionStore
) -> None:
    generation = await rig.back.generator.start(KEY, rig.request())
    reading = asyncio.create_task(read_all(generation))
    (claimed,) = await store.claim(POOL, "router-9", 1)
    event = usage_event_pb2.UsageEvent(
        request_id=claimed.entry.request_id,
        tenant="acme",
        terminal_state=common_pb2.TERMINAL_STATE_CANCELLED,
        gateway_instance="somebody else",
    )
    await store.finish(POOL, [Terminal("acme", event.request_id, 0, event.terminal_state, 0, event)])

    answer = await reading

    assert isinstance(answer.error, Cancelled)
    await rig.published()
    (found,) = await rig.usage_events()
    assert found.gateway_instance == "somebody else"
    await rig.until(lambda: not rig.back.parts.outbox.records)


async def test_a_living_gateway_keeps_its_lease_and_a_stopped_one_has_none(
    redis_server: RedisProcess, redis_client: aioredis.Redis, store: AdmissionStore, tmp_path: Path
) -> None:
    async with running_back(redis_server.url, redis_client, tmp_path, instance="gateway-7", models=False) as rig:
        await rig.until(lambda: rig.back.closed_because() is None)
        assert "gateway-7" in await store.list_gateways()

    assert "gateway-7" not in await store.list_gateways()


async def test_reservations_of_live_requests_are_renewed(
    rig: GatewayRig, redis_client: aioredis.Redis, store: AdmissionStore
) -> None:
    generation = await rig.back.generator.start(KEY, rig.request())
    before = await redis_client.zscore(slot_key("acme", "live"), generation.request_id)
    await asyncio.sleep(0.05)

    await rig.back.watchdogs.renew_reservations()

    after = await redis_client.zscore(slot_key("acme", "live"), generation.request_id)
    assert before is not None
    assert after is not None
    assert after > before
    await generation.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED)


async def test_the_root_span_covers_admission_and_end_and_carries_no_prompt(
    rig: GatewayRig, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(admission, "tracer", lambda: provider.get_tracer("test"))
    router.paused = False

    generation = await rig.back.generator.start(KEY, rig.request())
    await read_all(generation)
    await rig.published()

    spans = {span.name: span for span in exporter.get_finished_spans()}
    root, enqueue = spans["gateway.request"], spans["admission.enqueue"]
    assert root.context is not None
    assert root.kind is trace.SpanKind.SERVER
    assert enqueue.parent is not None
    assert enqueue.parent.span_id == root.context.span_id
    attributes = dict(root.attributes or {})
    assert attributes["millrace.request_id"] == generation.request_id
    assert attributes["millrace.tenant"] == "acme"
    assert attributes["gen_ai.request.model"] == "echo"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (5, 8)
    (event,) = await rig.usage_events()
    assert event.traceparent.split("-")[1] == format(root.context.trace_id, "032x")
