"""What the platform around the engine costs: processor seconds of everything but the engine's steps, against the steps.

Starts a whole stack of the embedded model and keeps 16 streams running through the gateway. The platform is gateway,
router, Redis and usage, and of the worker every thread but those that compute, with what the engine's thread took
beyond its steps. Steps are seconds by the clock of `millrace_engine_step_seconds`, so the share says most on a machine
that does nothing else. Prints a table and writes `benchmarks/results/platform_share.json`. Never run by tests.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from benchmarks.results import cpu_ms, save
from cli.bench_client import Load, open_client
from cli.bench_load import Ending, Lengths, Shape, make_jobs, warm_up_job
from tests.helpers.stack import Stack, with_shared_kernels

MODEL = "smollm2-135m"
STREAMS = 16
PROMPT_WORDS = (100, 100)
OUTPUT_TOKENS = (64, 64)
TARGET = 0.10
_STEP_SUM = re.compile(r"^millrace_engine_step_seconds_sum\{[^}]*\} (\S+)$", re.MULTILINE)
# A socket's state in /proc/net/tcp.
_LISTENS = "0A"


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Seconds so far: steps by the clock, the rest by the processor. `computing` are threads of the worker by id."""

    step_s: float
    processes: dict[str, float]
    computing: dict[int, float]
    other_threads_s: float

    def parts_since(self, before: Sample) -> dict[str, float]:
        """Processor seconds of each part of the platform since `before`."""
        parts = {name: spent - before.processes[name] for name, spent in self.processes.items()}
        # The engine's own thread computes beside its helpers and works on between two steps: it is the busiest.
        busiest = max((spent - before.computing.get(task, 0.0) for task, spent in self.computing.items()), default=0.0)
        parts["worker: event loop, gRPC"] = self.other_threads_s - before.other_threads_s
        parts["worker: engine between steps"] = max(0.0, busiest - (self.step_s - before.step_s))
        return parts


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """Where one running stack is looked at."""

    processes: dict[str, int]
    worker: int
    metrics_url: str

    def sample(self) -> Sample:
        """All figures, one after the other. Python's and the kernels' threads have the process's name, gRPC's not."""
        text = httpx.get(self.metrics_url).raise_for_status().text
        name = Path(f"/proc/{self.worker}/comm").read_text()
        computing, others = {}, 0.0
        for task in Path(f"/proc/{self.worker}/task").iterdir():
            if int(task.name) != self.worker and (task / "comm").read_text() == name:
                computing[int(task.name)] = cpu_ms(self.worker, int(task.name)) / 1000
            else:
                others += cpu_ms(self.worker, int(task.name)) / 1000
        steps = sum(map(float, _STEP_SUM.findall(text)))
        processes = {name: cpu_ms(pid) / 1000 for name, pid in self.processes.items()}
        return Sample(steps, processes, computing, others)


def listening_port(pid: int) -> int:
    """The TCP port that a process listens on; a worker of `millrace up` has one, for its metrics."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in links:
            return int(fields[1].partition(":")[2], 16)
    raise SystemExit(f"process {pid} listens on no TCP port")


async def run_streams(stack: Stack, seconds: float, probe: Probe) -> tuple[Sample, Sample, int]:
    """Samples around `seconds` in which 16 streams run, each followed by the next; and how many requests."""
    jobs = make_jobs(Shape(Lengths(*PROMPT_WORDS), Lengths(*OUTPUT_TOKENS)), 10_000, seed=1)
    end, outcomes = asyncio.get_running_loop().time() + seconds, []
    async with open_client(stack.url, stack.key) as client:
        load = Load(client, MODEL)
        await load.send(warm_up_job(1))
        left = iter(jobs)

        async def lane() -> None:
            for job in left:
                outcomes.append(await load.send(job))
                if asyncio.get_running_loop().time() > end:
                    return

        before = await asyncio.to_thread(probe.sample)
        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(lane())
        after = await asyncio.to_thread(probe.sample)
    failed = [outcome for outcome in outcomes if outcome.ending is not Ending.COMPLETED]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0].error}")
    return before, after, len(outcomes)


def measure(seconds: float) -> list[dict[str, Any]]:
    """One stack from start to stop; a row each part and their sum."""
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(with_shared_kernels(Path(folder) / "home"), "--model", MODEL).wait_ready()
        try:
            processes = dict(stack.state.processes)
            worker = processes.pop("worker-1")
            probe = Probe(processes, worker, f"http://127.0.0.1:{listening_port(worker)}/metrics")
            before, after, requests = asyncio.run(run_streams(stack, seconds, probe))
        finally:
            stack.stop()
    return table(after.parts_since(before), after.step_s - before.step_s, requests)


def table(parts: Mapping[str, float], step_s: float, requests: int) -> list[dict[str, Any]]:
    """Rows of what each part took, their sum against the target last."""
    rows: list[dict[str, Any]] = [_row(part, spent, step_s) for part, spent in parts.items()]
    total = _row("platform", sum(parts.values()), step_s)
    judged = {"step_s": round(step_s, 2), "requests": requests, "target": TARGET, "met": total["share"] <= TARGET}
    return [*rows, total | judged]


def _row(part: str, cpu_s: float, step_s: float) -> dict[str, Any]:
    return {"part": part, "cpu_s": round(cpu_s, 2), "share": round(cpu_s / step_s, 4)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/platform_share.json")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long the streams run")
    arguments = parser.parse_args()
    rows = measure(arguments.seconds)
    for row in rows:
        print(f"{row['part']:<30} {row['cpu_s']:>8} s {row['share']:>8.1%}")
    config = {"model": MODEL, "streams": STREAMS, "prompt_words": PROMPT_WORDS, "output_tokens": OUTPUT_TOKENS}
    print(save("platform_share", config | {"seconds": arguments.seconds}, rows, arguments.json))


if __name__ == "__main__":
    main()
