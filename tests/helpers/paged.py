"""A paged cache and a mixed batch over it, as the GPU kernels take them, on the device that this machine has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from services.worker.kernels.paged_attention import PagedBatch, QueryTiles, tile_rows, tile_tokens
from services.worker.kernels.rotary_kv import WritePlaces
from services.worker.runtime.devices import FP8_CAPABILITY
from services.worker.runtime.kv_store import KVStore

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
has_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY,
    reason="the device multiplies no fp8",
)
# How far a result in this dtype may be from the reference's, which rounds once, at the end.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclasses.dataclass(frozen=True)
class Heads:
    """Heads of one layer."""

    query: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.query // self.kv


def integers(values: object) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """Requests as (context before the step, tokens in the step) over a cache of random values in shuffled blocks."""

    heads: Heads
    requests: Sequence[tuple[int, int]]
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    padding: int = 0
    seed: int = 0

    @property
    def token_count(self) -> int:
        return sum(count for _, count in self.requests)

    def positions(self) -> list[int]:
        return [position for start, count in self.requests for position in range(start, start + count)]

    def tables(self) -> list[list[int]]:
        """Blocks of each request, no two alike, padded with block 0, which nobody owns."""
        needs = [-(-(start + count) // self.block_size) for start, count in self.requests]
        order = torch.randperm(sum(needs), generator=torch.Generator().manual_seed(self.seed)).add(1).tolist()
        width = max(needs)
        return [[*(order.pop() for _ in range(need)), *[0] * (width - need)] for need in needs]

    def store(self) -> KVStore:
        """Every value random, those of nobody's block not numbers: whoever uses them shows it."""
        blocks = 1 + sum(-(-(start + count) // self.block_size) for start, count in self.requests)
        store = KVStore(
            num_blocks=blocks,
            layers=2,
            kv_heads=self.heads.kv,
            head_dim=self.heads.dim,
            block_size=self.block_size,
            dtype=self.dtype,
            device=DEVICE,
        )
        noise = torch.randn(store.data.shape, generator=torch.Generator().manual_seed(self.seed))
        store.data.copy_(noise)
        store.data[0] = float("nan")
        return store

    def query(self) -> torch.Tensor:
        """(T + padding, heads, head_dim)."""
        noise = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.token_count + self.padding, self.heads.query, self.heads.dim)
        return torch.randn(shape, generator=noise).to(self.dtype).to(DEVICE)

    def batch(self, *, rows: int | None = None) -> PagedBatch:
        """The step, its tiles of `rows` rows; the padding is tokens and tiles that are not real."""
        starts = np.cumsum([0, *(count for _, count in self.requests)])
        if rows is None:
            rows = tile_rows(self.heads.group, tokens=self.token_count, requests=len(self.requests))
        tokens = tile_tokens(self.heads.group, rows=rows)
        cut = [
            (request, first)
            for request in range(len(self.requests))
            for first in range(starts[request], starts[request + 1], tokens)
        ]
        padded = cut + [(len(self.requests) + 7, 10**6)] * self.padding
        tables = self.tables()
        return PagedBatch(
            count=integers([self.token_count]),
            positions=integers([*self.positions(), *[10**6] * self.padding]),
            query_starts=integers(starts),
            tables=integers(tables).flatten(),
            table_stride=integers([len(tables[0])]),
            tiles=QueryTiles(
                requests=integers([request for request, _ in padded]),
                firsts=integers([first for _, first in padded]),
                count=integers([len(cut)]),
                tokens=tokens,
            ),
        )

    def places(self) -> WritePlaces:
        """Where the step's tokens are written; the padding would write to block 0."""
        tables = self.tables()
        slots = [
            tables[request][position // self.block_size] * self.block_size + position % self.block_size
            for request, (start, count) in enumerate(self.requests)
            for position in range(start, start + count)
        ]
        return WritePlaces(
            positions=integers([*self.positions(), *[0] * self.padding]),
            slots=integers([*slots, *[0] * self.padding]),
            count=integers([len(slots)]),
        )


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within what one rounding of the result's dtype allows."""
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)
