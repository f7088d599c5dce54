"""A cold start told by its stages: no moment is lost or counted twice, and the line `worker_ready` shows them."""

from __future__ import annotations

from pathlib import Path

import structlog

from services.worker.runtime.factory import RunnerOptions, load_runner
from services.worker.stages import StageClock
from tests.helpers.fake_clock import FakeClock
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.worker import running_worker


def test_every_moment_belongs_to_the_stage_that_ends_it() -> None:
    clock = FakeClock()
    stages = StageClock(clock)

    for stage, seconds in (("map", 0.25), ("tokenizer", 1.0), ("map", 0.5)):
        clock.jump(seconds)
        stages.ended(stage)

    assert stages.seconds == {"map": 0.75, "tokenizer": 1.0, "total": 1.75}


def test_a_model_s_load_is_told_in_stages(tmp_path: Path) -> None:
    stages = StageClock()

    load_runner(
        RunnerOptions(model=str(write_tiny_model(tmp_path / "tiny")), dtype="float32", num_blocks=16, device="cpu"),
        stages,
    )

    assert list(stages.seconds) == ["tokenizer", "map", "digest", "kernels", "weights", "kv_pool", "grammars", "total"]


async def test_a_ready_worker_logs_its_stages() -> None:
    with structlog.testing.capture_logs() as lines:
        async with running_worker():
            pass

    (ready,) = [line for line in lines if line["event"] == "worker_ready"]
    assert list(ready["stages_s"]) == ["wiring", "canary", "total"]
