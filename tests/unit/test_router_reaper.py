"""The reaper on a real Redis: who is dead, what is billed, what it leaves alone."""

from __future__ import annotations

import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Ownership, QuotaLimits, RequestPhase, Reserve, WorkerRecord
from services.common.errors import StoreUnavailable
from services.router.reaper import QUIET_S, Reaper
from services.router.registry import EndpointRegistry
from tests.helpers.admission import CAPS, POOL, StoreTime, make_entry, make_terminal
from tests.helpers.fake_clock import FakeClock
from tests.helpers.redis import usage_events
from tests.unit.test_router_policy import make_endpoint, make_view

WORKER = WorkerRecord("worker-1", "unix:/nowhere", "echo", "1", POOL, "aggregated")


class AgedStore(AdmissionStore):
    """A store whose Redis has been up for as long as the test says."""

    uptime_s = 1_000
    run_id = "run-1/master"
    away = False

    async def uptime(self) -> tuple[int, str]:
        if self.away:
            raise StoreUnavailable("away")
        return self.uptime_s, self.run_id


class Sweeper:
    """A reaper with everything around it."""

    def __init__(self, client: aioredis.Redis) -> None:
        self.client = client
        self.time = StoreTime()
        self.clock = FakeClock()
        self.store = AgedStore(client, now_ms=self.time, clock=self.clock)
        self.registry = EndpointRegistry(self.store, "router-1", self.clock, lambda: None)
        self.reaper = Reaper(self.store, self.registry, self.clock)

    async def start(self) -> None:
        """The pool is known, and the reaper's connection is old."""
        await self.store.register_worker(WORKER)
        assert await self.reaper.sweep() == 0
        self.clock.jump(QUIET_S)

    async def enqueue(self, request_id: str, *, gateway: str = "dead-gateway", attempt: int = 1) -> None:
        """With a deadline in ten minutes."""
        await self.store.reserve(Reserve("acme", request_id, 0, 20, 20, QuotaLimits()))
        entry = make_entry(request_id, gateway=gateway, attempt=attempt)
        await self.store.enqueue(POOL, entry, CAPS, remaining_ms=600_000)

    async def sweep(self) -> int:
        return await self.reaper.sweep() + await self.reaper.sweep()

    async def events(self) -> list[usage_event_pb2.UsageEvent]:
        return await usage_events(self.client, POOL)


@pytest.fixture
async def sweeper(redis_client: aioredis.Redis) -> Sweeper:
    made = Sweeper(redis_client)
    await made.start()
    return made


async def test_queued_and_claimed_requests_of_a_dead_gateway_end_unbilled(sweeper: Sweeper) -> None:
    await sweeper.enqueue("r1")
    await sweeper.enqueue("r2")
    await sweeper.store.claim(POOL, "router-1", 1)

    assert await sweeper.sweep() == 2

    events = await sweeper.events()
    assert {e.request_id for e in events} == {"r1", "r2"}
    assert {(e.terminal_state, e.error_reason) for e in events} == {(common_pb2.TERMINAL_STATE_FAILED, "GATEWAY_LOST")}
    assert {e.billed.prompt_token_count + e.billed.completion_token_count for e in events} == {0}
    assert events[0].tenant == "acme"
    assert await sweeper.store.count_queued(POOL) == 0
    assert await sweeper.client.hget("mr:{acme}:budget", "reserved") is None
    assert await sweeper.store.list_unsettled(POOL, 0) == []
    assert await sweeper.sweep() == 0


async def test_a_gateway_with_a_lease_or_an_attached_worker_is_alive(sweeper: Sweeper) -> None:
    await sweeper.enqueue("r1", gateway="leased")
    await sweeper.enqueue("r2", gateway="attached")
    await sweeper.store.renew_gateway("leased", "host:1")
    endpoint = make_endpoint(view=make_view(gateways=("attached",)), now=sweeper.clock.monotonic())
    sweeper.registry.endpoints = lambda pool=None: [endpoint]  # type: ignore[method-assign]

    assert await sweeper.sweep() == 0

    sweeper.clock.jump(4)  # the view is unknown by now
    assert await sweeper.sweep() == 1
    assert [e.request_id for e in await sweeper.events()] == ["r2"]


async def test_a_gateway_missing_once_is_only_a_suspect(sweeper: Sweeper) -> None:
    await sweeper.enqueue("r1", gateway="late")

    assert await sweeper.reaper.sweep() == 0
    await sweeper.store.renew_gateway("late", "host:1")

    assert await sweeper.sweep() == 0


async def test_a_running_request_is_its_workers_to_end_while_that_lives(sweeper: Sweeper) -> None:
    await sweeper.enqueue("r1")
    await sweeper.store.own(POOL, [Ownership("r1", 257, "worker-1")])

    assert await sweeper.sweep() == 0
    [record] = await sweeper.store.read_requests(POOL, ["r1"])
    assert record is not None
    assert record.phase is RequestPhase.OWNED


async def test_a_request_that_its_live_worker_never_ended_ends_two_leases_after_its_deadline(sweeper: Sweeper) -> None:
    await sweeper.enqueue("r1")
    await sweeper.store.own(POOL, [Ownership("r1", 257, "worker-1")])

    sweeper.clock.jump(600 + QUIET_S - 0.1)
    assert await sweeper.sweep() == 0
    sweeper.clock.jump(0.1)
    assert await sweeper.sweep() == 1

    [event] = await sweeper.events()
    assert (event.billed.prompt_token_count, event.billed.completion_token_count) == (10, 0)


async def test_with_gateway_and_worker_dead_the_prompt_only_is_billed(sweeper: Sweeper) -> None:
    await sweeper.enqueue("r1")
    await sweeper.store.own(POOL, [Ownership("r1", 257, "dead-worker")])

    assert await sweeper.sweep() == 1

    [event] = await sweeper.events()
    assert (event.billed.prompt_token_count, event.billed.completion_token_count) == (10, 0)
    assert (event.worker_instance, event.epoch) == ("dead-worker", 257)
    assert await sweeper.client.hget("mr:{acme}:budget", "spent") == b"10"


async def test_nothing_is_reaped_while_redis_or_the_connection_is_young(redis_client: aioredis.Redis) -> None:
    sweeper = Sweeper(redis_client)
    await sweeper.store.register_worker(WORKER)
    await sweeper.enqueue("r1")
    assert await sweeper.sweep() == 0
    sweeper.clock.jump(QUIET_S - 0.1)
    assert await sweeper.sweep() == 0
    sweeper.clock.jump(0.1)
    sweeper.store.uptime_s = int(QUIET_S) - 1
    assert await sweeper.sweep() == 0

    sweeper.store.uptime_s = int(QUIET_S)
    assert await sweeper.sweep() == 1


async def test_a_redis_that_was_away_makes_the_reaper_wait_again(sweeper: Sweeper) -> None:
    await sweeper.enqueue("r1")
    sweeper.store.away = True
    with pytest.raises(StoreUnavailable):
        await sweeper.reaper.sweep()
    sweeper.store.away = False

    assert await sweeper.sweep() == 0
    sweeper.clock.jump(QUIET_S)
    assert await sweeper.sweep() == 1


async def test_a_promoted_replica_makes_the_reaper_wait_again(sweeper: Sweeper) -> None:
    await sweeper.enqueue("r1")
    sweeper.store.run_id = "run-2/master"

    assert await sweeper.sweep() == 0


async def test_unsettled_terminals_are_settled_after_a_lease(sweeper: Sweeper) -> None:
    await sweeper.enqueue("r1", gateway="gateway-1")
    await sweeper.store.renew_gateway("gateway-1", "host:1")
    await sweeper.store.finish(POOL, [make_terminal("r1", prompt=10, completion=5)])
    await sweeper.sweep()
    assert len(await sweeper.store.list_unsettled(POOL, 0)) == 1

    sweeper.time.advance(10_000)
    await sweeper.sweep()

    assert await sweeper.store.list_unsettled(POOL, 0) == []
    assert await sweeper.client.hget("mr:{acme}:budget", "spent") == b"15"
