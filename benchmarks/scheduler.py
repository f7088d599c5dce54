"""Microseconds of the scheduler per step, at 1, 64, 256 and 1,024 running requests, with no model behind it.

Prints a table and writes `benchmarks/results/scheduler.json`. Never run by tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.results import save
from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.model_runner import RunnerSpec
from services.worker.engine.outputs import ModelRunnerOutput, SampledRow
from services.worker.engine.request import EngineRequest, SamplingParams
from services.worker.engine.scheduler import Scheduler

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 512
_WARMUP_STEPS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Microseconds a step (schedule and update): by the wall, and of this thread's own time on a busy machine.

    `cpu_best` is the least disturbed step; growth is judged by it.
    """

    running: int
    wall_p50: float
    wall_p99: float
    cpu_p50: float
    cpu_best: float
    cpu_per_request: float


def measure(running: int, *, steps: int) -> Result:
    """Decode steps of `running` requests with one prompt each; the runner's answer is free."""
    max_tokens = steps + _WARMUP_STEPS + 8
    blocks = running * (2 + (_PROMPT_TOKENS + max_tokens) // _BLOCK_SIZE) + 64
    spec = RunnerSpec(32_000, 65_536, _BLOCK_SIZE, blocks, frozenset(), deterministic=True)
    config = EngineConfig(
        model_version="bench@1",
        max_num_seqs=running,
        max_num_batched_tokens=running * (_PROMPT_TOKENS + 1),
        max_prefill_chunk=512,
    )
    scheduler = Scheduler(spec, config)
    rng = np.random.default_rng(0)
    for index in range(running):
        # Lengths differ, so that the requests do not all fill a block in the same step.
        prompt = rng.integers(0, spec.vocab_size, _PROMPT_TOKENS - index % _BLOCK_SIZE).astype(np.int32)
        sampling = SamplingParams(max_tokens=max_tokens, seed=index)
        tenant = f"tenant-{index % 8}"
        request = EngineRequest(f"r{index}", 1, prompt, sampling, tenant=tenant, cache_salt=tenant.encode())
        scheduler.add(request, now=0.0)
    token, nothing = SampledRow(token_ids=(7,)), SampledRow()
    wall_us: list[float] = []
    cpu_us: list[float] = []
    decodes = 0
    while decodes < steps + _WARMUP_STEPS:
        clocks = (time.perf_counter_ns(), time.thread_time_ns())
        decision = scheduler.schedule(0.0)
        wall, cpu = time.perf_counter_ns() - clocks[0], time.thread_time_ns() - clocks[1]
        result = ModelRunnerOutput(tuple([token if row.samples else nothing for row in decision.scheduled]))
        clocks = (time.perf_counter_ns(), time.thread_time_ns())
        scheduler.update(decision, result, now=0.0)
        wall += time.perf_counter_ns() - clocks[0]
        cpu += time.thread_time_ns() - clocks[1]
        if len(decision.scheduled) == running and decision.num_tokens == running:
            decodes += 1
            if decodes > _WARMUP_STEPS:
                wall_us.append(wall / 1000)
                cpu_us.append(cpu / 1000)
        del decision, result  # as the engine does before the next step
    wall_us.sort()
    cpu_p50 = statistics.median(cpu_us)
    return Result(
        running=running,
        wall_p50=round(statistics.median(wall_us), 1),
        wall_p99=round(wall_us[int(len(wall_us) * 0.99)], 1),
        cpu_p50=round(cpu_p50, 1),
        cpu_best=round(min(cpu_us), 1),
        cpu_per_request=round(cpu_p50 / running, 2),
    )


def growth_exponent(results: list[Result]) -> float:
    """Slope of log(time) over log(requests) from 64 requests on, by least squares: 1 is linear."""
    points = [(math.log(each.running), math.log(each.cpu_best)) for each in results if each.running >= 64]
    return round(statistics.linear_regression(*zip(*points, strict=True)).slope, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write instead")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    arguments = parser.parse_args()
    gc.freeze()
    results = [measure(running, steps=arguments.steps) for running in arguments.running]
    columns = [field.name for field in dataclasses.fields(Result)]
    print(" ".join(f"{column:>15}" for column in columns), " (µs)")
    for each in results:
        print(" ".join(f"{value:>15}" for value in dataclasses.astuple(each)))
    config = {"block_size": _BLOCK_SIZE, "prompt_tokens": _PROMPT_TOKENS, "steps": arguments.steps}
    if sum(each.running >= 64 for each in results) > 1:
        config["growth_exponent"] = growth_exponent(results)
        print(f"time grows with requests to the power of {config['growth_exponent']}")
    print(save("scheduler", config, [dataclasses.asdict(each) for each in results], arguments.json))


if __name__ == "__main__":
    main()
