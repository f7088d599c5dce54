"""A router between a real Redis and fake workers over real gRPC: late binding, loss, restarts, drain."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2
from millrace.router.v1 import router_service_pb2, router_service_pb2_grpc
from millrace.worker.v1 import worker_service_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Claimed, Pool, PoolCaps, RequestPhase
from services.common.redis_client import connect
from services.router.config import RouterConfig
from services.router.filters import is_routable
from services.router.wiring import RouterApp, build
from tests.helpers.admission import CAPS, POOL, StoreTime, make_entry, make_terminal
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.redis import RedisProcess, usage_events
from tests.helpers.waiting import WAIT_S, until


class Rig:
    """A store whose time stands still, workers, and routers that share them."""

    def __init__(self, client: aioredis.Redis) -> None:
        self.client = client
        self.time = StoreTime()
        self.store = AdmissionStore(client, now_ms=self.time)
        self.workers: list[FakeWorker] = []
        self.routers: list[RouterApp] = []

    async def worker(
        self, instance: str, *, slots: int = 2, version: str = "1", role: str = "aggregated"
    ) -> FakeWorker:
        worker = await FakeWorker(instance, slots=slots, version=version, role=role).start()
        await worker.register(self.store)
        self.workers.append(worker)
        return worker

    async def router(self, instance: str = "router-1") -> RouterApp:
        app = build(RouterConfig(), store=self.store, instance=instance)
        await app.start()
        self.routers.append(app)
        return app

    async def enqueue(self, *request_ids: str, choices: int = 1, remaining_ms: int = 600_000, prompt: int = 10) -> None:
        for request_id in request_ids:
            entry = make_entry(request_id, prompt=prompt)
            entry.sampling.choice_count = choices
            await self.store.enqueue(POOL, entry, CAPS, remaining_ms=remaining_ms)

    async def phase(self, request_id: str) -> RequestPhase | None:
        [record] = await self.store.read_requests(POOL, [request_id])
        return record.phase if record is not None else None

    async def all_owned(self, request_ids: list[str]) -> bool:
        return [await self.phase(r) for r in request_ids] == [RequestPhase.OWNED] * len(request_ids)

    def running(self) -> set[str]:
        return {request_id for worker in self.workers for request_id in worker.running}

    async def crash(self, app: RouterApp) -> None:
        """Without drain: what it held stays claimed."""
        self.routers.remove(app)
        await app.stop()

    async def close(self) -> None:
        for app in self.routers:
            await app.stop()
        for worker in self.workers:
            await worker.kill()


def seen(app: RouterApp) -> int:
    """Workers that a router knows the room of: only these are chosen."""
    return sum(endpoint.view is not None for endpoint in app.registry.endpoints())


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("services.router.claim.tracer", lambda: provider.get_tracer("test"))
    monkeypatch.setattr("services.router.dispatcher.tracer", lambda: provider.get_tracer("test"))
    return exporter


@pytest.fixture
async def rig(redis_client: aioredis.Redis) -> AsyncIterator[Rig]:
    made = Rig(redis_client)
    yield made
    await made.close()


async def test_a_request_reaches_a_worker_and_is_owned_by_it(rig: Rig) -> None:
    worker = await rig.worker("worker-1")
    await rig.router()
    await rig.enqueue("r1")

    await until(lambda: rig.all_owned(["r1"]))

    [record] = await rig.store.read_requests(POOL, ["r1"])
    [submit] = worker.submits
    assert record is not None
    assert (record.worker_instance, record.epoch) == ("worker-1", submit.epoch)
    assert submit.epoch == 1 << 8 | 1
    assert 590 < submit.remaining.ToTimedelta().total_seconds() <= 600
    assert (submit.attempt, submit.router_instance) == (1, "router-1")
    assert await rig.store.count_queued(POOL) == 0


async def test_nothing_is_submitted_beyond_the_room_of_the_workers(rig: Rig) -> None:
    names = [f"r{i}" for i in range(60)]
    first, second = await rig.worker("worker-1", slots=3), await rig.worker("worker-2", slots=2)
    await rig.enqueue(*names)
    app = await rig.router()
    await until(lambda: len(rig.running()) == 5)
    await until(lambda: _queued(rig, 55))

    done: set[str] = set()
    async with asyncio.timeout(WAIT_S):
        while len(done) < 60:
            for worker in rig.workers:
                for request_id in list(worker.running)[:1]:
                    worker.finish(request_id)
                    done.add(request_id)
            await asyncio.sleep(0.002)

    assert (first.most_running, second.most_running) == (3, 2)
    assert first.overbooked + second.overbooked == 0
    assert sorted(s.entry.request_id for w in rig.workers for s in w.submits) == sorted(names)
    await until(lambda: app.claims.held_count == 0)


async def test_a_queue_found_empty_is_asked_again_when_its_bell_rings_and_for_no_change_of_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.claim.EMPTY_PERIOD_S", math.inf)
    await rig.worker("worker-1")
    app = await rig.router()
    await until(lambda: seen(app) and app.claims._emptied)
    asked: list[int] = []
    claim = rig.store.claim

    async def counted(pool: Pool, router: str, count: int, *, workers: int = 1) -> list[Claimed]:
        asked.append(count)
        return await claim(pool, router, count, workers=workers)

    rig.store.claim = counted  # type: ignore[method-assign]
    assert not await app.claims.step()
    assert asked == []

    await rig.enqueue("r1")

    await until(lambda: rig.all_owned(["r1"]))
    assert asked


async def test_a_router_that_waits_is_woken_by_the_bell(rig: Rig) -> None:
    await rig.worker("worker-1")
    app = await rig.router()
    await until(lambda: seen(app))
    app.claims._clock.sleep = lambda seconds: asyncio.Event().wait()  # type: ignore[attr-defined]  # no timer wakes it
    app.claims._clock.wait = lambda event, seconds: event.wait()  # type: ignore[attr-defined]

    await rig.enqueue("r1")

    await until(lambda: rig.running() == {"r1"})


# 99: of a worker whose release is later than this one.
@pytest.mark.parametrize("refusal", [worker_service_pb2.SUBMIT_REFUSAL_GATEWAY_NOT_ATTACHED, 99])
async def test_a_typed_refusal_goes_to_the_next_worker_with_a_higher_epoch(rig: Rig, refusal: Any) -> None:
    refusing = await rig.worker("worker-1", slots=9)
    taking = await rig.worker("worker-2", slots=2)
    taking.running["other"] = 1  # so that it is the second choice
    refusing.refuse_with = refusal
    app = await rig.router()
    await until(lambda: seen(app) == 2)

    await rig.enqueue("r1")
    await until(lambda: rig.all_owned(["r1"]))

    assert [s.epoch for s in taking.submits] == [258]
    assert [s.epoch for s in refusing.submits] == [257]


async def test_a_request_no_worker_takes_is_held_and_leased_until_one_does(rig: Rig) -> None:
    worker = await rig.worker("worker-1")
    worker.refuse_with = worker_service_pb2.SUBMIT_REFUSAL_NO_ROOM
    app = await rig.router()
    await rig.enqueue("r1")
    await until(lambda: app.claims.held_count == 1 and len(worker.submits) >= 1)
    rig.time.advance(9_000)
    await rig.store.register_worker(worker.record)
    await app.claims.renew()
    rig.time.advance(9_000)
    assert await rig.store.claim(POOL, "router-2", 1) == []

    worker.refuse_with = None
    worker.change()

    await until(lambda: rig.running() == {"r1"})


async def test_a_request_that_fits_no_worker_ever_fails_unbilled(rig: Rig) -> None:
    for name in ("worker-1", "worker-2"):
        (await rig.worker(name)).refuse_with = worker_service_pb2.SUBMIT_REFUSAL_NEVER_FITS
    app = await rig.router()
    await until(lambda: seen(app) == 2)
    await rig.enqueue("r1")

    await until(lambda: _is_finished(rig, "r1"))

    [record] = await rig.store.read_requests(POOL, ["r1"])
    assert record is not None
    assert record.error_reason == "CONTEXT_LENGTH_EXCEEDED"
    [event] = await usage_events(rig.client, POOL)
    assert (event.terminal_state, event.billed.prompt_token_count) == (common_pb2.TERMINAL_STATE_FAILED, 0)
    await until(lambda: app.claims.held_count == 0)


async def test_a_request_that_fits_a_worker_which_restarts_waits_for_it(rig: Rig) -> None:
    small, large = await rig.worker("worker-1", slots=9), await rig.worker("worker-2", slots=1)
    small.refuse_with = worker_service_pb2.SUBMIT_REFUSAL_NEVER_FITS
    large.running["other"] = 1
    record = large.record
    app = await rig.router()
    await until(lambda: seen(app) == 2)
    await rig.enqueue("r1")
    await until(lambda: small.submits)

    await large.kill()
    await rig.store.deregister_worker(record)
    await until(lambda: [e.instance for e in app.registry.endpoints()] == ["worker-1"])
    await app.claims.step()
    restarted = await rig.worker("worker-3")

    await until(lambda: rig.all_owned(["r1"]))
    assert set(restarted.running) == {"r1"}


async def test_prompts_too_long_for_any_worker_eject_none(rig: Rig) -> None:
    workers = [await rig.worker(name, slots=64) for name in ("worker-1", "worker-2")]
    for worker in workers:
        worker.refuse_with = worker_service_pb2.SUBMIT_REFUSAL_NEVER_FITS
    app = await rig.router()
    await until(lambda: seen(app) == 2)
    await rig.enqueue(*(f"r{i}" for i in range(50)))

    await until(lambda: _queued(rig, 0))

    assert len(workers[0].submits) == len(workers[1].submits) == 50
    now = app.claims._clock.monotonic()
    assert [e.open(now) and is_routable(e, now) for e in app.registry.endpoints()] == [True, True]
    for worker in workers:
        worker.refuse_with = None
    await rig.enqueue("fits")
    await until(lambda: rig.running() == {"fits"})


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.CANCELLED])
async def test_an_error_that_is_not_the_workers_fault_does_not_eject_it(rig: Rig, code: grpc.StatusCode) -> None:
    first, second = await rig.worker("worker-1"), await rig.worker("worker-2")
    first.abort_with = second.abort_with = code
    app = await rig.router()
    await rig.enqueue("r1")
    await until(lambda: first.submits and second.submits)

    now = app.claims._clock.monotonic()
    assert all(e.open(now) for e in app.registry.endpoints())


async def test_a_worker_that_breaks_is_ejected_and_the_other_serves_all(rig: Rig) -> None:
    broken, good = await rig.worker("worker-1", slots=32), await rig.worker("worker-2", slots=32)
    broken.abort_with = grpc.StatusCode.INTERNAL
    app = await rig.router()
    await until(lambda: seen(app) == 2)
    first, then = [f"r{i}" for i in range(16)], [f"r{i}" for i in range(16, 32)]
    await rig.enqueue(*first)
    await until(lambda: set(good.running) == set(first))
    tried = len(broken.submits)

    await rig.enqueue(*then)

    await until(lambda: set(good.running) == {*first, *then})
    assert tried > 0
    assert len(broken.submits) - tried < len(then), "only a probe at a time may try the broken worker"
    assert app.healthy()


async def _queued(rig: Rig, count: int) -> bool:
    return await rig.store.count_queued(POOL) == count


async def _is_finished(rig: Rig, request_id: str) -> bool:
    return await rig.phase(request_id) is RequestPhase.FINISHED


async def test_a_large_request_that_waited_gets_the_next_room(rig: Rig) -> None:
    worker = await rig.worker("worker-1", slots=2)
    app = await rig.router()
    await rig.enqueue("a", "b")
    await until(lambda: rig.running() == {"a", "b"})
    worker.finish("a")
    await until(lambda: any(e.free(app.claims._clock.monotonic())[0] == 1 for e in app.registry.endpoints()))
    await rig.enqueue("large", choices=2)
    await until(lambda: any(e.reserved_for == "large" for e in app.registry.endpoints()))

    await rig.enqueue("small")
    worker.finish("b")
    await until(lambda: "large" in rig.running())

    assert rig.running() == {"large"}
    worker.finish("large")
    await until(lambda: rig.running() == {"small"})


async def test_a_killed_worker_gets_nothing_more_and_the_other_goes_on(rig: Rig) -> None:
    first, second = await rig.worker("worker-1", slots=20), await rig.worker("worker-2", slots=20)
    record = first.record
    app = await rig.router()
    await rig.enqueue(*(f"a{i}" for i in range(10)))
    await until(lambda: len(rig.running()) == 10)

    await first.kill()
    await rig.enqueue(*(f"b{i}" for i in range(10)))

    await until(lambda: {f"b{i}" for i in range(10)} <= set(second.running))
    await until(lambda: all(e.view is None for e in app.registry.endpoints() if e.instance == "worker-1"))
    await rig.store.deregister_worker(record)
    await until(lambda: [e.instance for e in app.registry.endpoints()] == ["worker-2"])


async def test_a_frozen_worker_is_given_up_and_the_request_runs_elsewhere(rig: Rig) -> None:
    frozen = await rig.worker("worker-1", slots=9)
    app = await rig.router()
    frozen.hang = True
    await rig.enqueue("r1")
    await until(lambda: len(frozen.submits) == 1)

    taking = await rig.worker("worker-2")

    await until(lambda: "r1" in taking.running)
    assert taking.submits[0].epoch > frozen.submits[0].epoch
    assert app.healthy()


async def test_a_restarted_router_takes_the_claims_of_a_dead_one_when_their_lease_is_over(rig: Rig) -> None:
    worker = await rig.worker("worker-1", slots=0)
    lost = await rig.store.claim(POOL, "dead-router", 1)
    assert lost == []
    await rig.enqueue("r1", "r2")
    [claim] = await rig.store.claim(POOL, "dead-router", 1)
    app = await rig.router("router-2")
    worker.slots = 5
    worker.change()
    await until(lambda: rig.running() == {"r2"})

    rig.time.advance(10_000)
    await rig.store.register_worker(worker.record)
    worker.change()

    await until(lambda: rig.running() == {"r1", "r2"})
    assert next(s.epoch for s in worker.submits if s.entry.request_id == claim.entry.request_id) == 2 << 8 | 1
    await until(lambda: app.claims.held_count == 0)


async def test_a_drained_router_gives_its_claims_back_at_once(rig: Rig) -> None:
    worker = await rig.worker("worker-1", slots=3)
    worker.refuse_with = worker_service_pb2.SUBMIT_REFUSAL_NO_ROOM
    app = await rig.router()
    await rig.enqueue("r1", "r2", "r3")
    await until(lambda: app.claims.held_count == 3)

    await app.drain(1.0)
    await rig.enqueue("r4")

    assert app.claims.held_count == 0
    assert not app.ready()
    taken = await rig.store.claim(POOL, "router-2", 32)
    assert sorted(claim.entry.request_id for claim in taken) == ["r1", "r2", "r3", "r4"]


async def test_a_cancelled_request_is_dropped_from_the_hands_of_the_router(rig: Rig) -> None:
    worker = await rig.worker("worker-1")
    worker.refuse_with = worker_service_pb2.SUBMIT_REFUSAL_NO_ROOM
    app = await rig.router()
    await rig.enqueue("r1")
    await until(lambda: app.claims.held_count == 1 and worker.submits)
    worker.slots = 0
    worker.change()

    await rig.store.finish(POOL, [make_terminal("r1", state=common_pb2.TERMINAL_STATE_CANCELLED)])

    async def dropped() -> bool:
        await app.claims.renew()
        return app.claims.held_count == 0

    await until(dropped)


async def test_status_tells_what_the_router_sees_and_drain_works_over_the_wire(rig: Rig) -> None:
    await rig.worker("worker-1", slots=4)
    app = await rig.router()
    async with grpc.aio.insecure_channel(app.address) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        await until(lambda: seen(app))

        status = await stub.GetStatus(router_service_pb2.GetStatusRequest())
        await stub.Drain(router_service_pb2.DrainRequest())

        [endpoint] = status.endpoints
        assert (endpoint.worker_instance, endpoint.healthy, endpoint.free_slot_count) == ("worker-1", True, 4)
        assert endpoint.HasField("view_age")
        await until(lambda: app.claims.draining)
        assert (await stub.GetStatus(router_service_pb2.GetStatusRequest())).draining


async def test_a_crashed_redis_loses_nothing_and_the_router_goes_on(tmp_path: Path) -> None:
    server = RedisProcess().start()
    client = connect(server.url)
    rig = Rig(client)
    try:
        worker = await rig.worker("worker-1", slots=2)
        app = await rig.router()
        names = [f"r{i}" for i in range(20)]
        await rig.enqueue(*names)
        await until(lambda: len(rig.running()) == 2)

        server.kill()
        for request_id in list(worker.running):
            worker.finish(request_id)
        await until(lambda: app.claims.store_away)
        server.start()

        done: set[str] = set()
        async with asyncio.timeout(WAIT_S):
            while {s.entry.request_id for s in worker.submits} != set(names) or worker.running:
                for request_id in list(worker.running):
                    worker.finish(request_id)
                    done.add(request_id)
                await asyncio.sleep(0.005)
        await until(lambda: rig.all_owned(names))
        assert len(worker.submits) == 20
        assert app.ready()
    finally:
        await rig.close()
        await client.aclose()
        server.stop()


async def test_claim_and_submit_are_spans_of_the_entrys_trace(rig: Rig, spans: InMemorySpanExporter) -> None:
    await rig.worker("worker-1")
    await rig.router()
    entry = make_entry("r1")
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    entry.traceparent = f"00-{trace_id}-b7ad6b7169203331-01"

    await rig.store.enqueue(POOL, entry, PoolCaps(), remaining_ms=60_000)

    await until(lambda: {s.name for s in spans.get_finished_spans()} >= {"router.claim", "router.submit"})
    for span in spans.get_finished_spans():
        assert format(span.context.trace_id, "032x") == trace_id
        assert span.parent is not None
        assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"


async def test_suspects_that_must_run_apart_hold_up_nobody_else(rig: Rig) -> None:
    worker = await rig.worker("worker-1", slots=4)
    await rig.router()
    for number in range(40):
        entry = make_entry(f"s{number}", attempt=3)
        entry.lost_workers.extend(("a", "b"))
        # None is the only one that both dead workers had.
        await rig.client.sadd(f"mr:{{{POOL.tag}}}:lost:a", "s40")
        await rig.client.hset(f"mr:{{{POOL.tag}}}:req:s40", "owner", "b")
        await rig.store.enqueue(POOL, entry, CAPS, readmit=True, remaining_ms=600_000)
    await rig.enqueue("fresh-1", "fresh-2", "fresh-3")

    await until(lambda: rig.all_owned(["fresh-1", "fresh-2", "fresh-3"]))

    def suspects() -> list[str]:
        return [request_id for request_id in worker.running if request_id.startswith("s")]

    assert len(suspects()) == 1
    for left in range(40, 0, -1):
        await until(lambda: len(suspects()) == 1)
        worker.finish(suspects()[0])
        assert sum(s.entry.request_id.startswith("s") for s in worker.submits) >= 41 - left
    assert worker.overbooked == 0


async def test_a_submit_names_the_prefill_worker_that_spares_running_answers(rig: Rig) -> None:
    decoding = await rig.worker("decode-1", slots=9, role="decode")
    prefilling = await rig.worker("prefill-1", slots=9, role="prefill")
    address = prefilling.record.address
    app = await rig.router()
    await until(lambda: seen(app) == 2)
    await rig.enqueue("idle", prompt=1_200)
    await until(lambda: "idle" in decoding.running)
    await until(lambda: [e.token_load for e in app.registry.endpoints()] == [0, 0])
    assert any(e.view is not None and e.view.running_count for e in app.registry.endpoints())

    await rig.enqueue("long", prompt=1_200)
    await rig.enqueue("short", prompt=100)
    await until(lambda: rig.all_owned(["idle", "short", "long"]))
    await until(lambda: [e.token_load for e in app.registry.endpoints()] == [0, 0])
    await prefilling.kill()
    await until(lambda: seen(app) == 1)
    await rig.enqueue("alone", prompt=1_200)
    await until(lambda: rig.all_owned(["alone"]))

    peers = {submit.entry.request_id: submit.prefill_peer for submit in decoding.submits}
    assert not prefilling.submits
    assert (peers["long"].worker_instance, peers["long"].address) == ("prefill-1", address)
    assert {name for name, peer in peers.items() if not peer.worker_instance} == {"idle", "short", "alone"}
    placed = app.metrics.prefill_placings_total
    reasons = ("sooner_here", "few_tokens", "spares_running", "no_peer")
    assert [placed.labels("echo", "1", reason)._value.get() for reason in reasons] == [1, 1, 1, 1]


async def test_a_pool_of_prefill_workers_alone_takes_nothing_from_the_queue(rig: Rig) -> None:
    prefilling = await rig.worker("prefill-1", role="prefill")
    app = await rig.router()
    await until(lambda: seen(app))

    await rig.enqueue("r1")
    assert not await app.claims.step()

    assert app.claims.held_count == 0
    assert await rig.store.count_queued(POOL) == 1
    assert not prefilling.submits


async def test_what_no_decoding_worker_can_ever_take_fails_beside_prefill_workers_too(rig: Rig) -> None:
    worker = await rig.worker("decode-1", role="decode")
    await rig.worker("prefill-1", role="prefill")
    worker.refuse_with = worker_service_pb2.SUBMIT_REFUSAL_NEVER_FITS
    await rig.router()

    await rig.enqueue("r1")

    await until(lambda: _is_finished(rig, "r1"))
