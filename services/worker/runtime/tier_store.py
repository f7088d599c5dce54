"""Cached blocks beyond the pool: host memory by use, below it a folder on disk.

Owns the host tier and what was fetched for whom. Belongs to the engine's thread; the disk has a thread of its own.
Built by wiring, which also closes it.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence

from services.common.clock import Clock
from services.worker.engine.kv_blocks import KVBlock
from services.worker.engine.kv_tiers import Place, Tier
from services.worker.engine.outputs import TierStats
from services.worker.engine.request import RequestKey
from services.worker.runtime.tier_disk import DiskTier

# Bytes that requests may have fetched from disk and not used yet.
FETCH_BYTES = 256 << 20
_PROBE = bytes(1 << 20)


class TierStore:
    """See `KVTiers`. Blocks that the host tier has no room for go to `disk`, the longest unused first."""

    def __init__(self, *, host_bytes: int, block_bytes: int, disk: DiskTier | None, clock: Clock) -> None:
        """`host_bytes` 0 is no host tier; `disk` None no disk tier. Copies a megabyte to learn what a copy costs."""
        self._block_bytes = block_bytes
        self._host_capacity = host_bytes // block_bytes
        self._host: OrderedDict[bytes, KVBlock] = OrderedDict()
        self._disk = disk
        self._fetched: dict[RequestKey, dict[bytes, KVBlock]] = {}
        self._copy_s = _copy_seconds(clock) * block_bytes / len(_PROBE)

    def holds(self, full_hash: bytes) -> bool:
        """See `KVTiers.holds`."""
        if full_hash in self._host:
            self._host.move_to_end(full_hash)
            return True
        return self._disk is not None and self._disk.touch(full_hash)

    def put(self, block: KVBlock) -> None:
        """See `KVTiers.put`."""
        self._host[block.full_hash] = block
        self._host.move_to_end(block.full_hash)
        while len(self._host) > self._host_capacity:
            _, oldest = self._host.popitem(last=False)
            if self._disk is not None:
                self._disk.put(oldest)

    def locate(self, key: RequestKey, hashes: Sequence[bytes]) -> list[Place]:
        """See `KVTiers.locate`."""
        places: list[Place] = []
        fetched = self._collect(key)
        read_s = self._disk.read_seconds if self._disk is not None else 0.0
        for full_hash in hashes:
            if full_hash in self._host or full_hash in fetched:
                places.append(Place(self._copy_s, in_memory=True))
            elif self._disk is not None and self._disk.has(full_hash):
                places.append(Place(read_s + self._copy_s, in_memory=False))
            else:
                break
        return places

    def fetch(self, key: RequestKey, hashes: Sequence[bytes]) -> None:
        """See `KVTiers.fetch`."""
        blocks = self._fetched[key] = {}
        room = FETCH_BYTES // self._block_bytes - sum(map(len, self._fetched.values()))
        wanted: list[bytes] = []
        for full_hash in hashes:
            kept = self._host.get(full_hash)
            if kept is not None:
                blocks[full_hash] = kept
            elif len(wanted) < room:
                wanted.append(full_hash)
            else:
                break
        if self._disk is not None:
            self._disk.read(key, wanted)

    def is_fetching(self, key: RequestKey) -> bool:
        """See `KVTiers.is_fetching`."""
        return self._disk is not None and self._disk.is_reading(key)

    def read(self, key: RequestKey, full_hash: bytes) -> tuple[Tier, KVBlock] | None:
        """See `KVTiers.read`."""
        kept = self._host.get(full_hash)
        if kept is not None:
            return Tier.HOST, kept
        kept = self._collect(key).get(full_hash)
        return None if kept is None else (Tier.DISK, kept)

    def release(self, key: RequestKey) -> None:
        """See `KVTiers.release`."""
        self._fetched.pop(key, None)
        if self._disk is not None:
            self._disk.cancel(key)

    def discard(self, full_hash: bytes) -> None:
        """See `KVTiers.discard`."""
        self._host.pop(full_hash, None)
        if self._disk is not None:
            self._disk.discard(full_hash)

    def stats(self) -> TierStats:
        """See `KVTiers.stats`."""
        host_bytes = len(self._host) * self._block_bytes
        if self._disk is None:
            return TierStats(host_bytes=host_bytes)
        disk = self._disk.stats()
        return TierStats(
            host_bytes=host_bytes,
            disk_bytes=disk.size,
            disk_on=disk.is_on,
            skipped_block_total=disk.skipped_total,
            dropped_block_total=disk.dropped_total,
        )

    def close(self) -> None:
        """Write what waits to be written, a few seconds at most, and end the disk's thread."""
        if self._disk is not None:
            self._disk.close()

    def _collect(self, key: RequestKey) -> dict[bytes, KVBlock]:
        """What has been fetched for a request so far."""
        blocks = self._fetched.get(key)
        if blocks is None:
            return {}
        if self._disk is not None:
            blocks.update(self._disk.take_read(key))
        return blocks


def _copy_seconds(clock: Clock) -> float:
    """What one copy and one checksum of the probe take."""
    started = clock.monotonic()
    zlib.crc32(bytearray(_PROBE))
    return clock.monotonic() - started
