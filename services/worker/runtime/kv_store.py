"""Keys and values of every block, in one tensor whose blocks are contiguous.

Owns the memory and its layout; which block holds what is the KV cache manager's business. Called by the runner.
A block is (layer, key | value, head, …): keys lie (head_dim, block_size) so that one load covers a block's
positions, values lie (block_size, head_dim). A block is copied, spilled or sent as one run of bytes.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from services.worker.engine.kv_blocks import KVLayout
from services.worker.kernels.huge_pages import zeroed

KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class KVStore:
    """`data` is (blocks, layers, 2, kv_heads, head_dim * block_size)."""

    def __init__(
        self,
        *,
        num_blocks: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """Memory of the host, unless `device` is another."""
        self.block_size = block_size
        self.head_dim = head_dim
        shape = (num_blocks, layers, 2, kv_heads, head_dim * block_size)
        if device is None or device.type == "cpu":
            self.data = zeroed(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_blocks(self) -> int:
        return int(self.data.shape[0])

    @property
    def layout(self) -> KVLayout:
        """What the bytes of `export_block` mean."""
        return KVLayout(
            str(self.data.dtype).removeprefix("torch."), tuple(self.data.shape[1:]), self.data.element_size()
        )

    @property
    def block_bytes(self) -> int:
        return int(self.data[0].numel()) * self.data.element_size()

    def keys(self, layer: int) -> torch.Tensor:
        """View (blocks, kv_heads, head_dim, block_size)."""
        return self._part(layer, 0, self.head_dim, self.block_size)

    def values(self, layer: int) -> torch.Tensor:
        """View (blocks, kv_heads, block_size, head_dim)."""
        return self._part(layer, 1, self.block_size, self.head_dim)

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy whole blocks, source to destination, in order."""
        for source, destination in copies:
            self.data[destination].copy_(self.data[source])

    def export_block(self, block: int) -> bytes:
        """The block's bytes, for a tier or a peer with the same layout."""
        return self.data[block].cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def import_block(self, block: int, payload: bytes) -> None:
        """Overwrite a block; raises ValueError unless `payload` is exactly one block."""
        if len(payload) != self.block_bytes:
            raise ValueError(f"a block is {self.block_bytes} bytes, got {len(payload)}")
        received = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
        self.data[block].view(-1).view(torch.uint8).copy_(received)

    def _part(self, layer: int, part: int, rows: int, columns: int) -> torch.Tensor:
        return self.data[:, layer, part].view(self.num_blocks, -1, rows, columns)
