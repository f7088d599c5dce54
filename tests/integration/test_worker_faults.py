"""A worker whose engine breaks or freezes, whose gateway vanishes, or that is asked to leave."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest
from google.protobuf import duration_pb2
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb

from services.common.clock import SystemClock
from services.common.lifecycle import StartupError
from services.worker.engine.fake_model_runner import FakeScript
from services.worker.engine.outputs import SchedulerOutput
from services.worker.engine.request import RequestKey
from tests.helpers.waiting import WAIT_S
from tests.helpers.worker import Gate, GatewayClient, WorkerRig, echo_config, echo_tokens, entry, running_worker


class ShiftedClock(SystemClock):
    """The machine's clock, which a test may stop and move ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._stopped: float | None = None

    def stop(self) -> None:
        """From now on only the test moves it."""
        self._stopped = super().monotonic()

    def monotonic(self) -> float:
        return (super().monotonic() if self._stopped is None else self._stopped) + self.ahead


class Saboteur:
    """Runs `deed` once, in the step after it was armed."""

    def __init__(self, deed: object) -> None:
        self._deed = deed
        self.armed = False

    def __call__(self, _: SchedulerOutput) -> None:
        time.sleep(0.005)
        if self.armed:
            self.armed = False
            self._deed()  # type: ignore[operator]


def explode() -> None:
    raise RuntimeError("device lost: secret detail")


async def ready_gateway(rig: WorkerRig, instance: str = "gateway-1") -> GatewayClient:
    gateway = await rig.gateway(instance)
    await rig.until(lambda: rig.app.parts.table.is_attached(instance))
    return gateway


async def health(rig: WorkerRig, path: str = "/healthz") -> int:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{rig.app.metrics_port}{path}")).status_code


async def test_an_engine_exception_fails_every_request_as_retryable_and_turns_health_red() -> None:
    saboteur = Saboteur(explode)
    async with running_worker(script=FakeScript(before_step=saboteur)) as rig:
        gateway = await ready_gateway(rig)
        await gateway.submit(entry("r1", max_tokens=400))
        await gateway.submit(entry("r2", max_tokens=400, choices=2))
        await gateway.until(lambda: all(gateway.of(r).tokens for r in ("r1", "r2")))
        assert await health(rig) == 200

        saboteur.armed = True
        await gateway.finished("r1", "r2")

        for request_id in ("r1", "r2"):
            held = gateway.of(request_id)
            assert held.failed is not None
            assert (held.failed.reason, held.failed.retryable) == ("ENGINE_ERROR", True)
            assert "secret" not in held.failed.detail
            got = held.tokens[0]
            assert got == echo_tokens(request_id, 0, len(got))
        assert await health(rig) == 503
        assert not (await gateway.submit(entry("r3"))).accepted
        snapshot = await gateway.stub.Watch(pb.WatchRequest(router_instance="x")).read()
        assert not snapshot.ready
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()


async def test_the_fault_of_one_row_fails_its_request_alone() -> None:
    def fault(key: RequestKey, index: int) -> str | None:
        return "sampler fell over" if key.request_id == "bad" and index == 3 else None

    async with running_worker(script=FakeScript(row_error=fault)) as rig:
        gateway = await ready_gateway(rig)
        await gateway.submit(entry("good", max_tokens=50))
        await gateway.submit(entry("bad", max_tokens=50, choices=2))
        await gateway.finished("good", "bad")

        failed = gateway.of("bad").failed
        assert failed is not None
        assert (failed.reason, failed.retryable) == ("ENGINE_ERROR", False)
        assert gateway.of("good").tokens[0] == echo_tokens("good", 0, 50)
        assert await health(rig) == 200
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()
    rig.assert_engine_empty()


async def test_a_frozen_engine_turns_health_red_and_takes_nothing_until_it_moves_again() -> None:
    thaw, frozen = threading.Event(), threading.Event()

    def freeze() -> None:
        frozen.set()
        thaw.wait(30)

    saboteur, clock = Saboteur(freeze), ShiftedClock()
    async with running_worker(script=FakeScript(before_step=saboteur), clock=clock) as rig:
        gateway = await ready_gateway(rig)
        await gateway.submit(entry("r1", max_tokens=200))
        saboteur.armed = True
        await asyncio.to_thread(frozen.wait, 10)
        assert await health(rig) == 200

        clock.ahead = 6.0
        red = await health(rig)
        refused = await gateway.submit(entry("r2"))
        snapshot = await gateway.stub.Watch(pb.WatchRequest(router_instance="x")).read()
        thaw.set()
        await gateway.finished("r1")

        assert red == 503
        assert not refused.accepted
        assert not snapshot.ready
        assert snapshot.progress_age.ToSeconds() >= 6
        assert await health(rig) == 200
        assert gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 200)
        await gateway.close()


async def test_a_gateway_that_stays_away_is_billed_for_what_it_acknowledged() -> None:
    clock = ShiftedClock()
    async with running_worker(config=echo_config(step_ms=5), clock=clock) as rig:
        gateway = await ready_gateway(rig)
        work = entry("r1", max_tokens=500, choices=2)
        await gateway.submit(work)
        await gateway.until(lambda: min(gateway.of("r1").next_indices() or [0]) >= 6)
        gateway.acking = False
        gateway.ack("r1")
        acked = gateway.of("r1").next_indices()
        stream = rig.app.parts.table.get("r1")
        assert stream is not None
        await rig.until(lambda: stream.delivered_counts() == acked)

        clock.stop()
        await gateway.hang_up()
        await rig.until(lambda: not rig.app.parts.table.is_attached("gateway-1"))
        clock.ahead = 4.9
        assert rig.app.parts.table.expire(clock.monotonic()) == []
        assert rig.app.parts.table.get("r1") is stream
        clock.ahead = 5.1
        await rig.until(lambda: bool(rig.store.terminals))

        pool, terminal = rig.store.terminals[0]
        event = terminal.event
        assert pool.tag == "echo/default/0"
        assert terminal.state == common_pb2.TERMINAL_STATE_FAILED
        assert (event.error_reason, event.gateway_instance) == ("GATEWAY_LOST", "gateway-1")
        assert list(event.choice_token_counts) == acked
        assert event.delivered.completion_token_count == sum(acked)
        assert event.billed.completion_token_count == sum(acked)
        assert event.billed.prompt_token_count == 3
        assert event.worker_instance == rig.app.instance
        assert terminal.computed_tokens >= 3 + sum(acked)
        await gateway.close()
    rig.assert_engine_empty()


async def test_a_gateway_that_held_tokens_and_delivered_none_costs_nothing() -> None:
    clock = ShiftedClock()
    async with running_worker(config=echo_config(step_ms=5), clock=clock) as rig:
        gateway = await ready_gateway(rig)
        gateway.acking = False
        await gateway.submit(entry("r1", max_tokens=500))
        await gateway.until(lambda: sum(gateway.of("r1").next_indices()) >= 20)
        gateway.ack("r1", delivered=[0])
        stream = rig.app.parts.table.get("r1")
        assert stream is not None
        await rig.until(lambda: stream.choices[0].base >= 20)

        await gateway.hang_up()
        await rig.until(lambda: not rig.app.parts.table.is_attached("gateway-1"))
        clock.ahead = 5.1
        await rig.until(lambda: bool(rig.store.terminals))

        event = rig.store.terminals[0][1].event
        assert event.error_reason == "GATEWAY_LOST"
        assert event.delivered.completion_token_count == 0
        assert event.billed == common_pb2.TokenUsage()
        await gateway.close()


async def test_a_gateway_lost_before_any_acknowledgement_costs_nothing() -> None:
    clock = ShiftedClock()
    async with running_worker(config=echo_config(step_ms=5), clock=clock) as rig:
        gateway = await ready_gateway(rig)
        gateway.acking = False
        await gateway.submit(entry("r1", max_tokens=500))
        await gateway.until(lambda: bool(gateway.of("r1").tokens))

        await gateway.hang_up()
        await rig.until(lambda: not rig.app.parts.table.is_attached("gateway-1"))
        clock.ahead = 5.1
        await rig.until(lambda: bool(rig.store.terminals))

        event = rig.store.terminals[0][1].event
        assert event.billed == common_pb2.TokenUsage()
        assert event.delivered.completion_token_count == 0
        await gateway.close()


async def test_a_lost_gateway_is_finished_when_redis_comes_back() -> None:
    clock = ShiftedClock()
    async with running_worker(config=echo_config(step_ms=5), clock=clock) as rig:
        gateway = await ready_gateway(rig)
        await gateway.submit(entry("r1", max_tokens=500))
        await gateway.until(lambda: bool(gateway.of("r1").tokens))
        rig.store.away = True

        await gateway.hang_up()
        await rig.until(lambda: not rig.app.parts.table.is_attached("gateway-1"))
        clock.ahead = 5.1
        await rig.until(lambda: len(rig.app.parts.terminals) == 1)
        rig.store.away = False
        await rig.until(lambda: len(rig.store.terminals) == 1)

        assert len(rig.app.parts.terminals) == 0
        await gateway.close()


async def test_a_drain_lets_streams_end_refuses_work_and_leaves_the_registry() -> None:
    gate = Gate()
    async with running_worker(script=FakeScript(before_step=gate)) as rig:
        gateway = await ready_gateway(rig)
        await rig.until(lambda: bool(rig.store.workers))
        gate.open.clear()
        await gateway.submit(entry("r1", max_tokens=100))

        drain = asyncio.create_task(rig.app.drain(WAIT_S))
        await rig.until(lambda: rig.app.parts.board.draining)
        refused = await gateway.submit(entry("r2"))
        snapshot = await gateway.stub.Watch(pb.WatchRequest(router_instance="x")).read()
        not_ready = await health(rig, "/readyz")
        gate.open.set()
        await gateway.finished("r1")
        await drain

        assert refused.refusal == pb.SUBMIT_REFUSAL_DRAINING
        assert (snapshot.draining, snapshot.ready) == (True, False)
        assert not_ready == 503
        assert gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 100)
        assert rig.store.workers == {}
        await gateway.close()
    rig.assert_engine_empty()


async def test_streams_that_outlast_the_grace_are_told_to_go_elsewhere() -> None:
    async with running_worker(config=echo_config(step_ms=10)) as rig:
        gateway = await ready_gateway(rig)
        await gateway.submit(entry("r1", max_tokens=500))
        await gateway.until(lambda: bool(gateway.of("r1").tokens))

        await rig.app.drain(0.05)
        await gateway.finished("r1")

        failed = gateway.of("r1").failed
        assert failed is not None
        assert (failed.reason, failed.retryable) == ("DRAINING", True)
        await gateway.close()
    rig.assert_engine_empty()


async def test_a_drain_by_rpc_answers_how_much_still_runs() -> None:
    gate = Gate()
    async with running_worker(script=FakeScript(before_step=gate)) as rig:
        gateway = await ready_gateway(rig)
        gate.open.clear()
        await gateway.submit(entry("r1", max_tokens=50))

        grace = duration_pb2.Duration(seconds=int(WAIT_S))
        response = await gateway.stub.Drain(pb.DrainRequest(grace=grace), timeout=WAIT_S)
        await rig.until(lambda: rig.app.parts.board.draining)
        gate.open.set()
        await gateway.finished("r1")

        assert response.running_count == 1
        assert gateway.of("r1").failed is None
        await gateway.close()


async def test_a_worker_whose_first_token_never_comes_does_not_start() -> None:
    with pytest.raises(StartupError, match="first token"):
        async with running_worker(script=FakeScript(before_step=lambda _: explode())):
            pass


async def test_metrics_return_to_zero_when_idle() -> None:
    async with running_worker() as rig:
        gateway = await ready_gateway(rig)
        await gateway.submit(entry("r1", max_tokens=30, choices=2))
        await gateway.finished("r1")
        await rig.until(lambda: len(rig.app.parts.table) == 0)

        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{rig.app.metrics_port}/metrics")).text

        assert 'millrace_running_requests{model="echo",version="1"} 0.0' in text
        assert 'millrace_kv_blocks_used{model="echo",version="1"} 0.0' in text
        assert "r1" not in text
        assert isinstance(rig.app.parts.metrics.render(), bytes)
        await gateway.close()
