"""The engine's thread: hand-over by values, batching of reports, heartbeat, failure, stop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from services.common.clock import SystemClock
from services.worker.engine.engine import Engine
from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.fake_model_runner import FakeModelRunner, FakeScript
from services.worker.engine.model_runner import RunnerSpec
from services.worker.engine.outputs import SchedulerOutput
from services.worker.engine.request import EngineRequest, FinishReason, SamplingParams
from services.worker.engine_loop import STALE_FLOOR_S, STALE_STEPS, EngineLoop, LoopReport
from services.worker.requests import Abort
from tests.helpers.fake_clock import FakeClock
from tests.helpers.waiting import WAIT_S, until

SPEC = RunnerSpec(1_000, 256, 16, 64, frozenset(), True)


class Rig:
    """A loop over the real engine; `gate` holds the thread in a step, `before` runs in each step."""

    def __init__(self, before: Callable[[], None] = lambda: None, clock: FakeClock | SystemClock | None = None) -> None:
        self.before = before
        self.gate = threading.Event()
        self.gate.set()
        self.steps = 0
        self.reports: list[LoopReport] = []
        self.clock = clock if clock is not None else SystemClock()
        script = FakeScript(before_step=self._before_step)
        self.engine = Engine(FakeModelRunner(SPEC, script=script), EngineConfig("echo@1", max_num_seqs=8))
        self.loop = EngineLoop(self.engine, clock=self.clock)
        self._changed = asyncio.Event()

    def start(self) -> None:
        self.loop.start(self._take)

    def _before_step(self, _: SchedulerOutput) -> None:
        self.steps += 1
        self.gate.wait(WAIT_S)
        self.before()

    def _take(self, report: LoopReport) -> None:
        self.reports.append(report)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def finished(self, request_id: str) -> FinishReason | None:
        for report in self.reports:
            for output in report.outputs:
                if output.key.request_id == request_id and output.finish_reason is not None:
                    return output.finish_reason
        return None

    def token_count(self, request_id: str) -> int:
        return sum(len(o.token_ids) for r in self.reports for o in r.outputs if o.key.request_id == request_id)


def hits(rig: Rig) -> int:
    return rig.engine.stats(0.0).prefix_hit_token_total


def request(request_id: str, *, max_tokens: int = 10, prompt: int = 3) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return EngineRequest(request_id, 1, np.arange(prompt, dtype=np.int32), sampling)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    made.start()
    yield made
    made.gate.set()
    await made.loop.stop()


async def test_a_submitted_request_comes_back_whole(rig: Rig) -> None:
    rig.loop.submit(request("r1"))

    await rig.until(lambda: rig.finished("r1") is not None)

    assert rig.finished("r1") is FinishReason.LENGTH
    assert rig.token_count("r1") == 10


async def test_shares_of_steps_and_idle_time_sum_to_the_wall_clock(rig: Rig) -> None:
    rig.before = lambda: time.sleep(0.002)
    since = rig.loop.time_spent
    for n in range(12):
        rig.loop.submit(request(f"r{n}", max_tokens=3 + n, prompt=1 + 20 * (n % 3)))
        await rig.until(lambda n=n: rig.finished(f"r{n}") is not None if n % 4 == 3 else True)  # type: ignore[misc]
    await rig.until(lambda: all(rig.finished(f"r{n}") is not None for n in range(12)))
    await rig.loop.stop()
    spent = rig.loop.time_spent

    costs = [cost for report in rig.reports for cost in report.costs]
    shares = sum(cost.prefill_seconds + cost.decode_seconds for cost in costs)
    assert shares > 12 * 0.002
    assert shares + spent.idle_s - since.idle_s == pytest.approx(spent.until - since.until, rel=0.01)
    assert sorted(cost.decode_token_count for cost in costs) == [n + 2 for n in range(12)]
    assert sum(cost.prefill_token_count for cost in costs) == sum(1 + 20 * (n % 3) for n in range(12)) - hits(rig)


async def test_an_abort_ends_the_request_as_cancelled(rig: Rig) -> None:
    rig.gate.clear()
    rig.loop.submit(request("r1", max_tokens=200))
    rig.loop.abort([Abort("r1", 1)])
    rig.gate.set()

    await rig.until(lambda: rig.finished("r1") is not None)

    assert rig.finished("r1") is FinishReason.CANCELLED


async def test_a_request_that_the_engine_refuses_comes_back_as_a_rejection(rig: Rig) -> None:
    rig.gate.clear()
    rig.loop.submit(request("long", max_tokens=1_000))
    rig.loop.submit(request("twice", max_tokens=100))
    rig.loop.submit(request("twice", max_tokens=100))
    rig.gate.set()

    await rig.until(lambda: sum(len(r.rejections) for r in rig.reports) == 2)

    found = {r.request_id: r.reason for report in rig.reports for r in report.rejections}
    assert found == {"long": "CONTEXT_LENGTH_EXCEEDED", "twice": "INVALID_REQUEST"}


async def test_steps_while_the_event_loop_is_busy_share_one_report(rig: Rig) -> None:
    done = threading.Event()
    rig.before = lambda: done.set() if rig.steps >= 40 else None
    rig.loop.submit(request("r1", max_tokens=60))

    # The event loop is held here on purpose while the engine runs.
    done.wait(20)
    await rig.until(lambda: rig.finished("r1") is not None)

    assert len(rig.reports) < 30
    assert rig.token_count("r1") == 60
    assert sum(len(r.step_seconds) for r in rig.reports) == rig.steps


async def test_an_exception_of_a_step_is_reported_once_and_is_for_good(rig: Rig) -> None:
    def explode() -> None:
        raise RuntimeError("boom")

    rig.before = explode
    rig.loop.submit(request("r1"))
    await rig.until(lambda: any(r.failed for r in rig.reports))

    assert rig.loop.failed
    assert not rig.loop.healthy()
    assert await rig.loop.stop()
    rig.engine.check_invariants()


async def test_age_grows_only_while_there_is_work_and_the_engine_stands() -> None:
    clock = FakeClock()
    rig = Rig(clock=clock)
    rig.start()
    rig.loop.submit(request("r1"))
    await rig.until(lambda: rig.finished("r1") is not None)
    rig.gate.clear()
    rig.loop.submit(request("r2"))
    await until(lambda: rig.loop.progress_age() is not None)

    clock.jump(STALE_FLOOR_S)
    at_limit = rig.loop.healthy()
    clock.jump(0.5)
    over, age = rig.loop.healthy(), rig.loop.progress_age()
    rig.gate.set()
    await rig.until(lambda: rig.finished("r2") is not None)

    assert at_limit
    assert not over
    assert age == STALE_FLOOR_S + 0.5
    assert rig.loop.healthy()
    await rig.loop.stop()


async def test_a_slow_model_may_take_ten_times_its_mean_step() -> None:
    clock = FakeClock()
    rig = Rig(before=lambda: clock.jump(2.0), clock=clock)
    rig.start()
    rig.loop.submit(request("r1", max_tokens=5))
    await rig.until(lambda: rig.finished("r1") is not None)
    rig.gate.clear()
    rig.before = lambda: None
    rig.loop.submit(request("r2"))
    await until(lambda: rig.loop.progress_age() is not None)

    clock.jump(STALE_STEPS * 2.0 - 0.5)
    within = rig.loop.healthy()
    clock.jump(1.0)
    over = rig.loop.healthy()

    assert within
    assert not over
    rig.gate.set()
    await rig.loop.stop()


async def test_an_idle_engine_keeps_beating() -> None:
    clock = FakeClock()
    rig = Rig(clock=clock)
    rig.start()

    clock.jump(100.0)
    await until(rig.loop.healthy)

    assert rig.loop.progress_age() is None
    await rig.loop.stop()


async def test_the_canary_is_one_generated_token(rig: Rig) -> None:
    await rig.loop.canary(0, 20.0)

    assert rig.token_count("canary") == 1
    assert rig.loop.healthy()


async def test_a_canary_that_does_not_come_is_an_error() -> None:
    def explode() -> None:
        raise RuntimeError("boom")

    rig = Rig(before=explode)
    rig.start()
    with pytest.raises(RuntimeError, match="canary"):
        await rig.loop.canary(0, 20.0)
    await rig.loop.stop()

    late = Rig()
    late.gate.clear()
    late.start()
    with pytest.raises(TimeoutError):
        await late.loop.canary(0, 0.05)
    late.gate.set()
    await late.loop.stop()


async def test_broken_accounting_found_when_idle_turns_health_red(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def broken() -> None:
        raise AssertionError("a block is held by nobody")

    monkeypatch.setattr(rig.engine, "check_invariants", broken)
    rig.start()
    rig.loop.submit(request("r1"))

    await rig.until(lambda: any(r.failed for r in rig.reports))

    assert rig.finished("r1") is FinishReason.LENGTH
    assert not rig.loop.healthy()
    await rig.loop.stop()
