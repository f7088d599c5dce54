"""Mirrored requests: two versions behind one gateway, real Redis, real workers whose answers follow from weights."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_store import AdmissionStore
from services.common.admission_types import SHADOW_TENANT
from services.common.lifecycle import new_ulid
from services.common.route_store import RouteStore
from services.common.routes import Route, RouteTable, Shadow, WeightedTarget
from services.gateway.generation import ValidRequest, token_events
from services.gateway.mirror import MAX_MIRRORED
from services.worker.engine.fake_model_runner import FakeScript
from services.worker.wiring import WorkerApp, build
from tests.helpers.gateway import KEY, FakeRouter, GatewayRig, read_all, running_back
from tests.helpers.redis import RedisProcess
from tests.helpers.rollouts import NEW, OLD
from tests.helpers.waiting import WAIT_S
from tests.helpers.worker import echo_config, scripted_echo


async def start_version(store: AdmissionStore, version: str, script: FakeScript) -> WorkerApp:
    config = dataclasses.replace(echo_config(), model_version=version)
    app = build(config, store=store, model=scripted_echo(config, script))
    await app.start()
    return app


@contextlib.asynccontextmanager
async def mirroring(
    redis: aioredis.Redis, url: str, folder: Path, shadow: FakeScript, *, share: float = 1.0
) -> AsyncIterator[GatewayRig]:
    """A gateway whose route mirrors `echo@1` to an `echo@2` of this script."""
    store = AdmissionStore(redis)
    route = Route("echo", (WeightedTarget(OLD, 1),), shadow=Shadow(NEW, share))
    await RouteStore(redis).replace(RouteTable(routes={"echo": route}), who="ann", why="look at 2")
    workers = [
        await start_version(store, "1", FakeScript(weights=b"good")),
        await start_version(store, "2", shadow),
    ]
    router = FakeRouter(store).start()
    try:
        async with running_back(url, redis, folder) as rig:
            await rig.until(lambda: OLD in rig.back.parts.directory and NEW in rig.back.parts.directory)
            yield rig
    finally:
        await router.stop()
        for worker in workers:
            await worker.stop()


def greedy(rig: GatewayRig, *, max_tokens: int = 12) -> ValidRequest:
    request = rig.request(max_tokens=max_tokens)
    request.sampling.temperature = 0
    request.sampling.logprob_count = 0
    return dataclasses.replace(request, route="echo", request_id=new_ulid())


async def events_of(rig: GatewayRig, count: int) -> tuple[usage_event_pb2.UsageEvent, usage_event_pb2.UsageEvent]:
    """The primary's event and the mirrored one's, once both are there."""
    async with asyncio.timeout(WAIT_S):
        while len(events := await rig.usage_events()) < count:
            await asyncio.sleep(0.01)
    by_tenant = {event.tenant: event for event in events}
    return by_tenant["acme"], by_tenant[SHADOW_TENANT]


@pytest.mark.parametrize(("weights", "equal"), [(b"good", 12), (b"wrong", 0)])
async def test_a_mirrored_answer_is_compared_and_goes_to_nobody_and_bills_nobody(
    redis_client: aioredis.Redis, redis_server: RedisProcess, tmp_path: Path, weights: bytes, equal: int
) -> None:
    async with mirroring(redis_client, redis_server.url, tmp_path, FakeScript(weights=weights)) as rig:
        generation = await rig.back.mirror.start(KEY, greedy(rig))
        answer = await read_all(generation)
        primary, shadow = await events_of(rig, 2)

    assert len(answer.tokens[0]) == 12
    assert (primary.model.version, primary.billed.completion_token_count) == ("1", 12)
    assert not primary.HasField("shadow")
    assert shadow.model.version == "2"
    assert shadow.terminal_state == common_pb2.TERMINAL_STATE_COMPLETED
    assert shadow.priority_class == common_pb2.PRIORITY_CLASS_BATCH
    assert shadow.billed == common_pb2.TokenUsage()
    assert shadow.delivered.completion_token_count == 12
    assert shadow.shadow.primary_request_id == generation.request_id
    assert (shadow.shadow.compared_token_count, shadow.shadow.equal_token_count) == (12, equal)
    assert shadow.shadow.HasField("drift_nats") == (equal > 0)
    assert shadow.request_id != primary.request_id


async def test_a_shadow_that_fails_is_told_and_does_not_touch_the_primary(
    redis_client: aioredis.Redis, redis_server: RedisProcess, tmp_path: Path
) -> None:
    broken = FakeScript(weights=b"good", row_error=lambda key, index: "broken" if index == 3 else None)
    async with mirroring(redis_client, redis_server.url, tmp_path, broken) as rig:
        answer = await read_all(await rig.back.mirror.start(KEY, greedy(rig)))
        primary, shadow = await events_of(rig, 2)

    assert answer.error is None
    assert primary.terminal_state == common_pb2.TERMINAL_STATE_COMPLETED
    assert shadow.terminal_state == common_pb2.TERMINAL_STATE_FAILED
    assert shadow.billed == common_pb2.TokenUsage()


async def test_an_answer_that_its_front_stops_is_compared_as_far_as_it_came(
    redis_client: aioredis.Redis, redis_server: RedisProcess, tmp_path: Path
) -> None:
    async with mirroring(redis_client, redis_server.url, tmp_path, FakeScript(weights=b"good")) as rig:
        generation = await rig.back.mirror.start(KEY, greedy(rig, max_tokens=400))
        received = 0
        async for event in token_events(generation):
            received += len(event.token_ids)
            if received >= 5:
                generation.stop_choice(0, 5)
                break
        await generation.finish(common_pb2.TERMINAL_STATE_COMPLETED, common_pb2.FINISH_REASON_STOP)
        _, shadow = await events_of(rig, 2)

    assert shadow.shadow.compared_token_count == shadow.shadow.equal_token_count >= 5
    assert not shadow.shadow.lengths_differ


async def test_what_is_not_of_the_share_or_names_its_version_or_is_an_embedding_is_not_mirrored(
    redis_client: aioredis.Redis, redis_server: RedisProcess, tmp_path: Path
) -> None:
    async with mirroring(redis_client, redis_server.url, tmp_path, FakeScript(), share=0.0) as rig:
        mirror = rig.back.mirror
        await read_all(await mirror.start(KEY, greedy(rig)))
        route = Route("echo", (WeightedTarget(OLD, 1),), shadow=Shadow(NEW, 1.0))
        rig.back.parts.routes.table = RouteTable(revision=9, routes={"echo": route})
        await read_all(await mirror.start(KEY, dataclasses.replace(greedy(rig), route="")))
        embedding = greedy(rig, max_tokens=1)
        embedding.sampling.embed = True
        await read_all(await mirror.start(KEY, embedding))
        await rig.published()

        assert [event.tenant for event in await rig.usage_events()] == ["acme"] * 3


async def test_no_more_are_mirrored_at_once_than_a_gateway_may(
    redis_client: aioredis.Redis, redis_server: RedisProcess, tmp_path: Path
) -> None:
    async with mirroring(redis_client, redis_server.url, tmp_path, FakeScript(weights=b"good")) as rig:
        requests = [greedy(rig, max_tokens=2) for _ in range(MAX_MIRRORED + 8)]
        generations = [await rig.back.mirror.start(KEY, request) for request in requests]
        live = [request.facts.key.tenant for request in rig.back.parts.table.requests()]
        for generation in generations:
            await read_all(generation)

    assert live.count(SHADOW_TENANT) <= MAX_MIRRORED
    assert live.count("acme") == MAX_MIRRORED + 8
