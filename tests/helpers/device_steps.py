"""Steps given straight to a Forward, for tests and benchmarks of devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.worker.runtime.forward import StepInputs


def step_inputs(
    requests: Sequence[tuple[int, int]], *, vocab_size: int, block_size: int = 16, seed: int = 0
) -> StepInputs:
    """Requests as (positions before, tokens) with random tokens; the last row of each is selected.

    Block 0 is nobody's; every request has blocks of its own, one run after the other.
    """
    lengths = [count for _, count in requests]
    needs = [-(-(start + count) // block_size) for start, count in requests]
    tables = np.zeros((len(requests), max(needs)), dtype=np.int32)
    first = 1
    for row, need in zip(tables, needs, strict=True):
        row[:need] = np.arange(first, first + need)
        first += need
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    return StepInputs(
        token_ids=np.random.default_rng(seed).integers(0, vocab_size, starts[-1]).astype(np.int32),
        positions=np.concatenate([np.arange(at, at + count, dtype=np.int32) for at, count in requests]),
        query_starts=starts,
        block_tables=tables,
        selected=starts[1:] - 1,
    )


def blocks_of(requests: Sequence[tuple[int, int]], *, block_size: int = 16) -> int:
    """Blocks that `step_inputs` of these requests names, with nobody's."""
    return 1 + sum(-(-(start + count) // block_size) for start, count in requests)
