"""A block's keys and values outside the pool: bytes that say what they are, sealed by a checksum.

Values only. Whatever left the pool (to a tier, to a peer) comes back through `is_intact` or not at all.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import NamedTuple


@dataclasses.dataclass(frozen=True, slots=True)
class KVLayout:
    """What the bytes of a block mean; only equal layouts may exchange blocks.

    `dtype` is of one value, `shape` of one block in values, `value_bytes` the size of a value.
    """

    dtype: str
    shape: tuple[int, ...]
    value_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) * self.value_bytes

    def describe(self) -> bytes:
        """The layout as bytes; distinct layouts give distinct ones."""
        return f"{self.dtype}:{self.value_bytes}:{'x'.join(map(str, self.shape))}".encode()


class KVBlock(NamedTuple):
    """One full block on its way: its hash, its bytes, and a checksum over layout, hash and bytes."""

    full_hash: bytes
    payload: bytes
    checksum: int


def sealed(full_hash: bytes, payload: bytes, layout: KVLayout) -> KVBlock:
    """The block with its checksum. Reads the whole payload once, about a millisecond a megabyte."""
    return KVBlock(full_hash, payload, _checksum(full_hash, payload, layout))


def is_intact(block: KVBlock, layout: KVLayout) -> bool:
    """True when the block is of this layout and its hash and bytes are those that were sealed."""
    if len(block.payload) != layout.block_bytes:
        return False
    return block.checksum == _checksum(block.full_hash, block.payload, layout)


def _checksum(full_hash: bytes, payload: bytes, layout: KVLayout) -> int:
    return zlib.crc32(payload, zlib.crc32(full_hash, zlib.crc32(layout.describe())))
