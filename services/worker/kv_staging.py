"""Places where a peer's blocks land before they are checked and moved into the pool: a fixed number, one block each.

Owns the memory, and which slot is free, leased or quarantined. A slot that somebody may still write to is quarantined,
never leased, until it is certain that nobody does. Belongs to the event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Memory = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class StagingCounts:
    """Slots by state."""

    free: int
    leased: int
    quarantined: int


class StagingArea:
    """`memory` is (slots, block bytes), of bytes; untouched pages take no memory."""

    def __init__(self, *, block_bytes: int, area_bytes: int) -> None:
        """As many slots as fit into `area_bytes`, two at least."""
        slot_count = max(2, area_bytes // block_bytes)
        self.memory: Memory = np.zeros((slot_count, block_bytes), dtype=np.uint8)
        self._free = list(range(slot_count - 1, -1, -1))
        self._leased: set[int] = set()
        self._quarantined: set[int] = set()
        self.is_closed = False

    @property
    def slot_count(self) -> int:
        return int(self.memory.shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self.memory.shape[1])

    def lease(self, count: int) -> list[int]:
        """Up to `count` slots for one request; none when all are taken, or while the area is closed."""
        if self.is_closed:
            return []
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        self._leased.update(slots)
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Leased slots that nobody will write to. Raises KeyError for others."""
        for slot in slots:
            self._leased.remove(slot)
            self._free.append(slot)

    def quarantine(self, slots: Iterable[int]) -> None:
        """Leased slots that somebody may still write to. Raises KeyError for others."""
        for slot in slots:
            self._leased.remove(slot)
            self._quarantined.add(slot)

    def settle(self) -> None:
        """Nobody writes to quarantined slots any more: all of them are free."""
        self._free += self._quarantined
        self._quarantined.clear()

    def read(self, slot: int) -> bytes:
        """A copy of what the slot holds."""
        return bytes(self.memory[slot])

    def write(self, slot: int, offset: int, data: bytes) -> None:
        """Put a part of a block into a leased slot. Raises ValueError outside of it."""
        end = offset + len(data)
        if slot not in self._leased or not 0 <= offset <= end <= self.block_bytes:
            raise ValueError("a part lies outside of its slot")
        self.memory[slot, offset:end] = np.frombuffer(data, dtype=np.uint8)

    def counts(self) -> StagingCounts:
        """Slots by state."""
        return StagingCounts(len(self._free), len(self._leased), len(self._quarantined))

    def check_invariants(self) -> None:
        """Raise AssertionError unless each slot is in one state."""
        slots = [*self._free, *self._leased, *self._quarantined]
        assert sorted(slots) == list(range(len(self.memory))), "a slot is in two states or in none"
