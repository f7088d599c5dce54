"""CUDA graphs of decoding steps, one a batch size: hundreds of launches become one.

Owns the memory that a graph reads its step from. A step runs in the smallest graph that holds it; rows beyond its own
are not real, so they write no keys or values and nobody reads what they give. Called by `triton_forward`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from services.worker.runtime.device_step import DeviceStep, StepSize, decode_size, pack, unpack
from services.worker.runtime.forward import StepInputs
from services.worker.runtime.kv_store import KVStore


def bucket_sizes(max_requests: int) -> list[int]:
    """Batch sizes to capture, ascending: powers of two up to 8, then every eighth, and `max_requests` itself."""
    sizes = [size for size in (1, 2, 4) if size < max_requests]
    return [*sizes, *range(8, max_requests, 8), max_requests]


class DecodeGraphs:
    """Captures `run` over `store` for each bucket size; `run` enqueues a step and returns its rows (T, hidden)."""

    def __init__(
        self, run: Callable[[DeviceStep], torch.Tensor], store: KVStore, *, max_requests: int, table_width: int
    ) -> None:
        """Blocks while every size is compiled and recorded. The steps recorded have no real row."""
        self._store = store
        self._sizes = bucket_sizes(max_requests)
        room = decode_size(max_requests).fixed + max_requests * table_width
        self._packed = torch.zeros(room, dtype=torch.int32, device=store.data.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        pool = None
        for size in reversed(self._sizes):
            step = unpack(self._packed, decode_size(size))
            # Once outside: kernels are compiled and libraries set up, which a capture does not allow.
            run(step)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                rows = run(step)
            # The largest comes first, so that the others fit into its memory.
            pool = graph.pool()
            self._graphs[size] = graph, rows

    def fits(self, inputs: StepInputs, store: KVStore) -> bool:
        """True for a step over the captured store in which every request computes one token and has a graph."""
        count = len(inputs.token_ids)
        return store is self._store and count == len(inputs.query_starts) - 1 and count <= self._sizes[-1]

    def replay(self, inputs: StepInputs) -> torch.Tensor:
        """Rows of a step that fits; valid until the next replay."""
        count = len(inputs.token_ids)
        size = self._sizes[int(np.searchsorted(self._sizes, count))]
        packed = self._pack(inputs, decode_size(size))
        self._packed[: len(packed)].copy_(packed)
        graph, rows = self._graphs[size]
        graph.replay()
        return rows[:count]

    def _pack(self, inputs: StepInputs, size: StepSize) -> torch.Tensor:
        return torch.from_numpy(pack(inputs, size, self._store.block_size))
