"""A step's inputs as the Triton kernels take them: one array, sent to the device in one copy, and its parts.

Owns the order of the parts. A step may be packed for more rows than it has (a captured graph has one size); the rest
is no real row. Called by `triton_forward` and `graphs`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from services.worker.kernels.paged_attention import PagedBatch, QueryTiles, tile_rows, tile_tokens
from services.worker.kernels.rotary_kv import WritePlaces
from services.worker.runtime.forward import IntArray, StepInputs

# Parts begin at multiples of 16 bytes: a kernel is compiled anew for a pointer that does not.
_ALIGNED = 4


@dataclasses.dataclass(frozen=True, slots=True)
class StepSize:
    """Rows that a packed step has room for; a tile takes at most `tile_tokens` query tokens."""

    tokens: int
    requests: int
    tiles: int
    tile_tokens: int

    @property
    def parts(self) -> list[int]:
        """Lengths: how many tokens, tiles and table entries a request are real; then what is a token's, and so on."""
        return [1, 1, 1, *[self.tokens] * 3, self.requests + 1, self.tiles, self.tiles]

    @property
    def fixed(self) -> int:
        """Values before the block tables, which come last because their width differs from step to step."""
        return sum(map(_room, self.parts))


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceStep:
    """Views of one packed step on the device."""

    token_ids: torch.Tensor
    places: WritePlaces
    batch: PagedBatch


def decode_size(requests: int) -> StepSize:
    """Room for `requests` that each compute one token."""
    return StepSize(requests, requests, requests, 1)


def step_size(inputs: StepInputs, group: int) -> StepSize:
    """Exactly the room that `inputs` need; `group` query heads share a key/value head."""
    tokens, requests = len(inputs.token_ids), len(inputs.query_starts) - 1
    if tokens == requests:
        return decode_size(requests)
    most = tile_tokens(group, rows=tile_rows(group, tokens=tokens, requests=requests))
    tiles = int(np.sum(-(-np.diff(inputs.query_starts) // most)))
    return StepSize(tokens, requests, tiles, most)


def pack(inputs: StepInputs, size: StepSize, block_size: int) -> IntArray:
    """The step as one array, as long as it needs to be."""
    starts = inputs.query_starts
    lengths = np.diff(starts)
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    slots = inputs.block_tables[rows, inputs.positions // block_size] * block_size + inputs.positions % block_size
    tiles = -(-lengths // size.tile_tokens)
    requests = np.repeat(np.arange(len(lengths), dtype=np.int32), tiles)
    before = np.repeat(np.cumsum(tiles) - tiles, tiles)
    firsts = starts[requests] + (np.arange(len(requests)) - before) * size.tile_tokens
    packed = np.zeros(size.fixed + inputs.block_tables.size, dtype=np.int32)
    counts = ([len(rows)], [len(requests)], [inputs.block_tables.shape[1]])
    parts = (*counts, inputs.token_ids, inputs.positions, slots, starts, requests, firsts)
    at = 0
    for part, length in zip(parts, size.parts, strict=True):
        packed[at : at + len(part)] = part
        at += _room(length)
    packed[size.fixed :] = inputs.block_tables.reshape(-1)
    return packed


def unpack(packed: torch.Tensor, size: StepSize) -> DeviceStep:
    """The parts of what `pack` made, on the device, without a copy."""
    parts, at = [], 0
    for length in size.parts:
        parts.append(packed[at : at + length])
        at += _room(length)
    tokens, tiles, stride, token_ids, positions, slots, starts, requests, firsts = parts
    return DeviceStep(
        token_ids,
        WritePlaces(positions, slots, tokens),
        PagedBatch(
            tokens,
            positions,
            starts,
            packed[size.fixed :],
            stride,
            QueryTiles(requests, firsts, tiles, size.tile_tokens),
        ),
    )


def _room(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED
