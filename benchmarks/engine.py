"""The engine alone, no network: loading, prefill by chunk, decode by batch and context, and memory besides the KV pool.

Each precision runs in a process of its own, so that its peak of memory is its own. Prints tables and writes
`benchmarks/results/engine.json` and `engine.svg`. Never run by tests.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import multiprocessing
import os
import pstats
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import RESULTS, save
from cli.svg_chart import Series, bar_chart
from services.worker.engine.engine import Engine
from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.request import EngineRequest, SamplingParams

_BLOCK_SIZE = 16
_WARMUP_STEPS = 4
_MIB = 1 << 20
_CONTEXT_CHUNK = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of one precision. Cells of more than `token_limit` tokens in all are left out."""

    model: str
    threads: int
    steps: int
    batches: Sequence[int]
    contexts: Sequence[int]
    chunks: Sequence[int]
    prefill_tokens: int
    token_limit: int

    def output_tokens(self, batch: int, context: int) -> int:
        """Enough for the first request of a batch to go on while the prompts of the others are computed."""
        prefill_steps = batch + -(-batch * context // (_CONTEXT_CHUNK - min(batch, _CONTEXT_CHUNK // 2)))
        return prefill_steps + self.steps + _WARMUP_STEPS + 1

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(batch, context) in tokens."""
        return [(b, c) for c in self.contexts for b in self.batches if b * c <= self.token_limit]

    @property
    def max_model_len(self) -> int:
        return max(self.prefill_tokens + 1, *(c + self.output_tokens(b, c) for b, c in self.cells))

    @property
    def num_blocks(self) -> int:
        """A pool for the largest cell."""
        cells = ((b, c + self.output_tokens(b, c)) for b, c in self.cells)
        return max(-(-self.max_model_len // _BLOCK_SIZE), *(b * -(-tokens // _BLOCK_SIZE) for b, tokens in cells)) + 1


def decode(runner: ModelRunner, batch: int, context: int, plan: Plan) -> dict[str, Any]:
    """Tokens a second of steps in which each of `batch` requests, `context` tokens long, gets one token."""
    engine = _engine(runner, batch=batch, chunk=_CONTEXT_CHUNK)
    for index in range(batch):
        engine.add_request(_request(runner, index, context, plan.output_tokens(batch, context)), now=0.0)
    steps_s: list[float] = []
    while len(steps_s) < plan.steps + _WARMUP_STEPS:
        start = time.perf_counter()
        outputs = engine.step(0.0)
        spent = time.perf_counter() - start
        if sum(bool(each.token_ids) and not each.started for each in outputs) == batch:
            steps_s.append(spent)
    for index in range(batch):
        engine.abort(f"r{index}")
    while engine.has_work():
        engine.step(0.0)
    engine.check_invariants()
    measured = steps_s[_WARMUP_STEPS:]
    return {
        "kind": "decode",
        "batch": batch,
        "context": context,
        "tokens_per_s": round(batch * len(measured) / sum(measured), 1),
        "best_tokens_per_s": round(batch / min(measured), 1),
    }


def prefill(runner: ModelRunner, chunk: int, plan: Plan) -> dict[str, Any]:
    """Prompt tokens a second of one request, computed `chunk` tokens a step."""
    engine = _engine(runner, batch=1, chunk=chunk)
    engine.add_request(_request(runner, chunk, plan.prefill_tokens, 1), now=0.0)
    start = time.perf_counter()
    while engine.has_work():
        engine.step(0.0)
    spent = time.perf_counter() - start
    engine.check_invariants()
    return {"kind": "prefill", "chunk": chunk, "tokens_per_s": round(plan.prefill_tokens / spent, 1)}


def _engine(runner: ModelRunner, *, batch: int, chunk: int) -> Engine:
    tokens = max(chunk, batch, 2)
    config = EngineConfig("bench@1", max_num_seqs=batch, max_num_batched_tokens=tokens, max_prefill_chunk=chunk)
    return Engine(runner, config)


def _request(runner: ModelRunner, seed: int, length: int, max_tokens: int) -> EngineRequest:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, runner.spec.vocab_size, length).astype(np.int32)
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=0.0, ignore_eos=True)
    return EngineRequest(f"r{seed}", 1, prompt, sampling, cache_salt=b"bench")


def measure(dtype: str, plan: Plan) -> list[dict[str, Any]]:
    """Every figure of one precision; meant for a fresh process."""
    start = time.perf_counter()
    # The import is itself a stage of loading.
    from services.worker.runtime import factory

    imported = time.perf_counter() - start
    options = factory.RunnerOptions(
        model=plan.model,
        dtype=dtype,
        threads=plan.threads,
        block_size=_BLOCK_SIZE,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        max_num_seqs=max(plan.batches),
        max_num_batched_tokens=max(*plan.chunks, *plan.batches, _CONTEXT_CHUNK),
    )
    profile = cProfile.Profile(builtins=False)
    start = time.perf_counter()
    loaded = profile.runcall(factory.load_runner, options)
    total = time.perf_counter() - start
    load = {"kind": "load", "import_s": round(imported, 2), "total_s": round(total, 2), "stages_s": _stages(profile)}
    after_load = _peak_mib()
    runner = loaded.runner
    # Every page of the pool is in memory from here on, so that what is besides it can be told.
    for block in range(runner.spec.num_blocks):
        runner.import_block(block, bytes(runner.kv_layout.block_bytes))
    results = [load, *(prefill(runner, chunk, plan) for chunk in plan.chunks)]
    results += [decode(runner, batch, context, plan) for batch, context in plan.cells]
    pool = runner.kv_layout.block_bytes * runner.spec.num_blocks / _MIB
    peak = _peak_mib()
    memory = {"after_load_mib": round(after_load), "peak_rss_mib": round(peak), "kv_pool_mib": round(pool)}
    results.append({"kind": "memory", **memory, "peak_besides_pool_mib": round(peak - pool)})
    return [{"dtype": dtype, **each} for each in results]


def _stages(profile: cProfile.Profile) -> dict[str, float]:
    """Seconds of each function that `load_runner` itself calls, from 10 ms on; the profiler makes them a bit longer."""
    found: dict[str, float] = {}
    for (_, _, name), (*_, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        spent = sum(times[3] for caller, times in callers.items() if caller[2] == "load_runner")
        if spent >= 0.01:
            found[name.lstrip("_")] = round(spent, 2)
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def chart(results: Sequence[dict[str, Any]]) -> str:
    """Decode tokens a second by batch at the shortest context, a bar each precision."""
    context = min(each["context"] for each in results if each["kind"] == "decode")
    speeds = {
        (each["dtype"], each["batch"]): round(each["tokens_per_s"])
        for each in results
        if each["kind"] == "decode" and each["context"] == context
    }
    dtypes, batches = (list(dict.fromkeys(values)) for values in zip(*speeds, strict=True))
    series = [Series(dtype, tuple(speeds[dtype, batch] for batch in batches)) for dtype in dtypes]
    return bar_chart(f"Decoded tokens a second by batch, context {context}", [str(b) for b in batches], series)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS / "engine.json", help="the plot lies beside it")
    parser.add_argument("--model", default="smollm2-135m", help="a packaged name, GGUF file or safetensors folder")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "int8"], default=["float32", "int8"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--prefill-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--token-limit", type=int, default=16_384, help="larger batch x context is left out")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = vars(parser.parse_args())
    target, dtypes = given.pop("json"), given.pop("dtypes")
    plan = Plan(**given)
    if not plan.cells or plan.steps < 1:
        parser.error("nothing to measure: --token-limit leaves no batch, or --steps is below 1")
    results: list[dict[str, Any]] = []
    for dtype in dtypes:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            measured = process.apply(measure, (dtype, plan))
        for each in measured:
            print("  ".join(f"{name}={value}" for name, value in each.items()), flush=True)
        results += measured
    print(save("engine", dataclasses.asdict(plan) | {"kv_dtype": "float32"}, results, target))
    target.with_suffix(".svg").write_text(chart(results), encoding="utf-8")


if __name__ == "__main__":
    main()
