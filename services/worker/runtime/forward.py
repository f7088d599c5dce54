"""The seam between the runner and whatever computes a transformer: one flat batch in, hidden rows and logits out.

Values and a Protocol only. Implemented by `torch_forward` (reference), `native_forward` (CPU) and
`triton_forward` (CUDA).
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.runtime.kv_store import KVStore

IntArray = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """A mixed batch of R requests and T tokens, flattened request after request.

    `token_ids`, `positions` (T,); `query_starts` (R + 1,) cut the tokens by request; `block_tables` (R, widest)
    padded with 0; `selected` (L,) are the token rows whose hidden state is wanted, ascending.
    """

    token_ids: IntArray
    positions: IntArray
    query_starts: IntArray
    block_tables: IntArray
    selected: IntArray


class Forward(Protocol):
    """A loaded transformer. Blocks until done. Not thread-safe."""

    @property
    def deterministic(self) -> bool:
        """Same bits for a token in any batch and chunking."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    def hidden(self, inputs: StepInputs, store: KVStore) -> torch.Tensor:
        """Writes keys and values of all T tokens to `store`; returns the normed rows (L, hidden).

        Float32 on the CPU, in the products' dtype on a device."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (L, vocab) float32 beside `hidden`, real vocabulary only, for rows that `hidden` gave."""
        ...
