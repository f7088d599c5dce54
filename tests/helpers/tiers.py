"""Tiers for small engines: a real store over memory and a folder, and one that loses and spoils what it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.common.clock import Clock, SystemClock
from services.worker.engine.kv_blocks import KVBlock, KVLayout
from services.worker.engine.kv_tiers import Place, Tier
from services.worker.engine.outputs import TierStats
from services.worker.engine.request import RequestKey
from services.worker.runtime.tier_disk import DiskTier
from services.worker.runtime.tier_file import FileFormat
from services.worker.runtime.tier_store import TierStore


def make_tiers(
    layout: KVLayout,
    *,
    host_blocks: int = 0,
    disk_blocks: int = 0,
    path: Path | None = None,
    version: str = "m@1",
    clock: Clock | None = None,
) -> TierStore:
    """A store for so many blocks of this layout; the disk tier needs `path`."""
    clock = clock if clock is not None else SystemClock()
    disk = None
    if path is not None:
        form = FileFormat(layout, version)
        disk = DiskTier(path, form, capacity_bytes=disk_blocks * form.file_bytes, clock=clock)
    host_bytes = host_blocks * layout.block_bytes
    return TierStore(host_bytes=host_bytes, block_bytes=layout.block_bytes, disk=disk, clock=clock)


def settle(step: Callable[[], object], is_done: Callable[[], bool]) -> None:
    """Step until done, giving a disk's thread the processor in between."""
    for _ in range(20_000):
        if is_done():
            return
        step()
        time.sleep(0)
    raise AssertionError("it does not come to an end")


class FaultyTiers:
    """A slow disk under script: a read is done when the test says so; what is kept may be lost or spoilt meanwhile."""

    def __init__(self) -> None:
        self.seconds = 1e-6
        self.kept: dict[bytes, KVBlock] = {}
        self.in_memory: set[bytes] = set()
        self.reading: dict[RequestKey, list[bytes]] = {}
        self.fetched: dict[RequestKey, list[bytes]] = {}

    def holds(self, full_hash: bytes) -> bool:
        return full_hash in self.kept

    def put(self, block: KVBlock) -> None:
        self.kept[block.full_hash] = block
        if len(self.kept) % 2:
            self.in_memory.add(block.full_hash)

    def locate(self, key: RequestKey, hashes: Sequence[bytes]) -> list[Place]:
        places: list[Place] = []
        for full_hash in hashes:
            if full_hash not in self.kept:
                break
            is_near = full_hash in self.in_memory or full_hash in self.fetched.get(key, ())
            places.append(Place(self.seconds, in_memory=is_near))
        return places

    def fetch(self, key: RequestKey, hashes: Sequence[bytes]) -> None:
        self.reading[key] = list(hashes)

    def is_fetching(self, key: RequestKey) -> bool:
        return key in self.reading

    def read(self, key: RequestKey, full_hash: bytes) -> tuple[Tier, KVBlock] | None:
        block = self.kept.get(full_hash)
        if block is None:
            return None
        if full_hash in self.in_memory:
            return Tier.HOST, block
        return (Tier.DISK, block) if full_hash in self.fetched.get(key, ()) else None

    def release(self, key: RequestKey) -> None:
        self.reading.pop(key, None)
        self.fetched.pop(key, None)

    def discard(self, full_hash: bytes) -> None:
        self.kept.pop(full_hash, None)

    def stats(self) -> TierStats:
        return TierStats()

    # --- the script --------------------------------------------------------------------------------------------------
    def finish_reads(self) -> None:
        """What was asked for arrives."""
        self.fetched.update(self.reading)
        self.reading.clear()

    def lose(self, number: int) -> None:
        """A block is gone, in the middle of whatever is going on."""
        if self.kept:
            self.kept.pop(sorted(self.kept)[number % len(self.kept)])

    def spoil(self, number: int) -> None:
        """One byte of a block changes."""
        if self.kept:
            full_hash = sorted(self.kept)[number % len(self.kept)]
            block = self.kept[full_hash]
            payload = bytearray(block.payload)
            payload[number % len(payload)] ^= 0x40
            self.kept[full_hash] = block._replace(payload=bytes(payload))

    def swap(self, number: int) -> None:
        """A block is found under the hash of another."""
        if len(self.kept) > 1:
            hashes = sorted(self.kept)
            self.kept[hashes[number % len(hashes)]] = self.kept[hashes[(number + 1) % len(hashes)]]
