"""Clients that come back, over two whole gateways, a real Redis and an echo worker."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1.gateway_service_pb2_grpc import GatewayServiceStub
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_store import AdmissionStore
from services.common.admission_types import KeyRecord, QuotaLimits
from services.common.grpc_client import open_channel
from services.gateway import resumable
from services.gateway.config import GatewayConfig
from services.gateway.wiring import GatewayApp, build
from services.worker.model_source import load_model
from services.worker.wiring import build as build_worker
from tests.helpers.gateway import KEY, POOL, FakeRouter
from tests.helpers.redis import RedisProcess, usage_events
from tests.helpers.resuming import Resumed, stream_with_cuts
from tests.helpers.waiting import WAIT_S, until
from tests.helpers.worker import echo_config, echo_tokens

SECRETS = {"mr_test_secret": KEY, "mr_other": KeyRecord("key-2", "other", "", (), 1.0, QuotaLimits())}
BODY = {"model": "echo", "prompt": "t1 t2 ", "max_tokens": 40, "ignore_eos": True}


class Pair:
    """Two gateways and a client of each."""

    def __init__(self, apps: list[GatewayApp], clients: list[httpx.AsyncClient], redis: aioredis.Redis) -> None:
        self.apps, self.clients, self._redis = apps, clients, redis

    async def usage_events(self, count: int) -> list[usage_event_pb2.UsageEvent]:
        """All of them, once there are `count` and nothing is live any more."""
        async with asyncio.timeout(WAIT_S):
            for app in self.apps:
                await app.back.parts.table.wait_empty()
                await app.back.parts.publisher.wait_published()
            while len(events := await usage_events(self._redis, POOL)) < count:
                await asyncio.sleep(0.02)
        return events


@pytest.fixture
async def pair(redis_server: RedisProcess, redis_client: aioredis.Redis, tmp_path: Path) -> AsyncIterator[Pair]:
    store = AdmissionStore(redis_client)
    await store.replace_keys({hashlib.sha256(secret.encode()).digest(): key for secret, key in SECRETS.items()})
    config = echo_config(step_ms=2.0, num_blocks=4_096)
    async with contextlib.AsyncExitStack() as stack:
        worker = build_worker(config, store=store, model=load_model(config))
        await worker.start()
        stack.push_async_callback(worker.stop)
        stack.push_async_callback(FakeRouter(store).start().stop)
        apps, clients = [], []
        for name in ("one", "two"):
            app = build(
                GatewayConfig(
                    redis_url=redis_server.url,
                    http_listen="127.0.0.1:0",
                    grpc_listen="127.0.0.1:0",
                    data_dir=str(tmp_path / name),
                    cache_secret="secret",
                )
            )
            await app.start()
            stack.push_async_callback(app.stop)
            headers = {"Authorization": "Bearer mr_test_secret"}
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.http_port}", headers=headers, timeout=WAIT_S)
            clients.append(await stack.enter_async_context(client))
            apps.append(app)
        await until(lambda: all(app.back.ready() for app in apps))
        yield Pair(apps, clients, redis_client)


def assert_whole(seen: Resumed, count: int) -> None:
    assert seen.done, (seen.refused, seen.error, seen.received[-300:])
    assert seen.numbers == list(range(len(seen.numbers)))
    assert seen.token_ids == echo_tokens(seen.request_id, 0, count)


async def test_fifty_equal_posts_over_two_gateways_are_one_generation_and_one_bill(pair: Pair) -> None:
    posts = [
        pair.clients[i % 2].post("/v1/completions", json=BODY, headers={"Idempotency-Key": "order 7"})
        for i in range(50)
    ]
    answers = await asyncio.gather(*posts)
    again = await pair.clients[1].post("/v1/completions", json=BODY, headers={"Idempotency-Key": "order 7"})

    assert {a.status_code for a in (*answers, again)} == {200}
    assert len({a.content for a in (*answers, again)}) == 1
    assert len({a.headers["x-request-id"] for a in (*answers, again)}) == 1
    [event] = await pair.usage_events(1)
    assert event.terminal_state == common_pb2.TERMINAL_STATE_COMPLETED
    assert event.billed.completion_token_count == 40


async def test_equal_grpc_calls_over_two_gateways_are_one_generation_and_one_bill(pair: Pair) -> None:
    request = pb.GenerateRequest(model="echo", prompt="t1 t2 ", max_token_count=40, ignore_eos=True)
    sent = (("authorization", "Bearer mr_test_secret"), ("idempotency-key", "order 7"))

    async def call(address: str) -> list[pb.GenerateResponse]:
        async with open_channel(address) as channel:
            return [message async for message in GatewayServiceStub(channel).Generate(request, metadata=sent)]

    answers = await asyncio.gather(*(call(pair.apps[i % 2].grpc_address) for i in range(10)))

    assert all(answer == answers[0] for answer in answers)
    assert answers[0][-1].completed.usage.completion_token_count == 40
    [event] = await pair.usage_events(1)
    assert event.terminal_state == common_pb2.TERMINAL_STATE_COMPLETED
    assert event.billed.completion_token_count == 40


async def test_forty_streams_cut_anywhere_go_on_through_any_gateway_with_the_same_bytes(pair: Pair) -> None:
    chance = random.Random(7)
    streams = []
    for number in range(40):
        # However tokens are gathered into events, there are two: the first cut always comes.
        cuts = [chance.randint(0, 1), *(chance.randint(0, 12) for _ in range(chance.randint(0, 3)))]
        headers = {"Idempotency-Key": f"k{number}"} if number % 2 else {"X-Millrace-Resume": "1"}
        streams.append(stream_with_cuts(pair.clients, BODY | {"stream": True}, cuts, chance, headers=headers))
    seen = await asyncio.gather(*streams)
    whole = [await chance.choice(pair.clients).get(f"/v1/streams/{s.request_id}") for s in seen]

    assert sum(s.cuts for s in seen) >= 40
    for one, all_of_it in zip(seen, whole, strict=True):
        assert_whole(one, 40)
        assert one.received == all_of_it.content, (all_of_it.text[:200], one.refused)
    events = await pair.usage_events(40)
    assert sorted(e.request_id for e in events) == sorted(s.request_id for s in seen)
    assert {(e.terminal_state, e.billed.completion_token_count) for e in events} == {
        (common_pb2.TERMINAL_STATE_COMPLETED, 40)
    }


async def test_the_grace_over_is_a_cancel_that_bills_what_was_delivered(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "GRACE_S", 0.2)
    seen = Resumed()
    body = BODY | {"stream": True, "max_tokens": 480}
    async with pair.clients[0].stream(
        "POST", "/v1/completions", json=body, headers={"X-Millrace-Resume": "1"}
    ) as response:
        await seen.read(response, 5)
    [event] = await pair.usage_events(1)
    gone = await pair.clients[1].get(f"/v1/streams/{seen.request_id}", headers={"Last-Event-ID": seen.last_event})

    assert event.terminal_state == common_pb2.TERMINAL_STATE_CANCELLED
    assert len(seen.token_ids) <= event.billed.completion_token_count < 480
    assert gone.status_code == 404
    assert len(pair.apps[0].answers) == 0


async def test_another_tenant_sees_neither_key_nor_stream(pair: Pair) -> None:
    mine = await pair.clients[0].post("/v1/completions", json=BODY | {"stream": True}, headers={"Idempotency-Key": "k"})
    other = {"Authorization": "Bearer mr_other"}
    theirs = await pair.clients[0].post(
        "/v1/completions", json=BODY | {"stream": True}, headers={"Idempotency-Key": "k"} | other
    )

    assert theirs.status_code == 200
    assert theirs.headers["x-request-id"] != mine.headers["x-request-id"]
    for client in pair.clients:
        answer = await client.get(f"/v1/streams/{mine.headers['x-request-id']}", headers=other)
        assert answer.status_code == 404
