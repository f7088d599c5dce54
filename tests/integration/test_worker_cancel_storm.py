"""Many cancels at once, at each phase on a worker: everything is free within one step, and counted."""

from __future__ import annotations

import asyncio
import threading

import pytest
from millrace.common.v1 import common_pb2

from services.worker.engine.fake_model_runner import FakeScript
from services.worker.engine.outputs import SchedulerOutput
from tests.helpers.waiting import WAIT_S
from tests.helpers.worker import echo_config, entry, running_worker

COUNT = 24


class StepMeter:
    """Lets the engine do so many steps; the next one stands until there are more."""

    def __init__(self) -> None:
        self.steps = 0
        self._limit = 1_000_000
        self._moved = threading.Condition()

    def __call__(self, _: SchedulerOutput) -> None:
        with self._moved:
            self.steps += 1
            self._moved.notify_all()
            self._moved.wait_for(lambda: self.steps <= self._limit, WAIT_S)

    def allow(self, steps: int) -> None:
        """So many more beyond the one that stands or comes next."""
        with self._moved:
            self._limit = self.steps + steps
            self._moved.notify_all()

    def wait_standing(self) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: self.steps > self._limit, WAIT_S)


@pytest.mark.parametrize(
    ("phase", "prompt", "steps"),
    [("queued", 8, 0), ("prefill", 160, 5), ("decode", 8, 6)],
    ids=str,
)
async def test_a_storm_of_cancels_frees_everything_within_one_step(phase: str, prompt: int, steps: int) -> None:
    meter = StepMeter()
    config = echo_config(max_num_seqs=COUNT, num_blocks=1_024, max_prefill_chunk=16, max_num_batched_tokens=COUNT * 16)
    names = [f"r{number}" for number in range(COUNT)]
    async with running_worker(config=config, script=FakeScript(before_step=meter)) as rig:
        gateway = await rig.gateway()
        await rig.until(lambda: rig.app.parts.table.is_attached("gateway-1"))
        meter.allow(0)
        for number, name in enumerate(names):
            tokens = range(number, number + prompt)
            assert (await gateway.submit(entry(name, prompt=tokens, max_tokens=200))).accepted
        await asyncio.to_thread(meter.wait_standing)
        if steps:
            meter.allow(steps)
            await asyncio.to_thread(meter.wait_standing)
        table = rig.app.parts.table
        # Only some prompts are computed at a time: the rest of that storm is still queued.
        await rig.until(lambda: any((s := table.get(name)) is not None and s.marks.phase == phase for name in names))
        before = meter.steps

        for name in names:
            gateway.cancel(name)
        await rig.until(lambda: all((s := table.get(name)) is not None and s.abandoned for name in names))
        meter.allow(1_000_000)
        await gateway.finished(*names)
        await rig.until(lambda: len(table) == 0)

        stats = rig.app.parts.board.stats
        assert stats is not None
        assert (stats.held_block_count, stats.running_count, stats.waiting_count) == (0, 0, 0)
        assert meter.steps <= before + 1
        assert {gateway.of(name).finishes[0].reason for name in names} == {common_pb2.FINISH_REASON_CANCELLED}
        counted = {}
        for name in ("queued", "prefill", "decode"):
            labels = {"model": "echo", "version": "1", "phase": name}
            found = rig.app.parts.metrics.registry.get_sample_value("millrace_cancel_seconds_count", labels)
            counted[name] = found or 0
        assert sum(counted.values()) == COUNT
        assert counted[phase] > 0
        await gateway.close()
    rig.assert_engine_empty()
