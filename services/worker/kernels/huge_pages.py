"""Memory in large pages: a step reads every weight once, and small pages cost it a table walk and a cold start each.

A hint to the system: where it has no large pages, ordinary ones serve.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_HUGE_PAGE = 2 << 20
_ROOM_BYTES = 32 << 20
_ALIGNMENT = 64


def zeroed(size: int) -> torch.Tensor:
    """`size` zero bytes that begin a large page; used memory grows as they are written."""
    area = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel without large pages.
            area.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(area, dtype=torch.uint8)
    start = -data.data_ptr() % _HUGE_PAGE
    return data[start : start + size]


class Arena:
    """Hands out runs of bytes that share large pages; they are freed together with the last run."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """`size` bytes that begin a cache line."""
        if size > len(self._room):
            self._room = zeroed(max(size, _ROOM_BYTES))
        data, self._room = self._room[:size], self._room[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return data
