"""The disk tier: blocks as files in one folder, bounded in bytes, read and written by a thread of its own.

Owns the folder while it runs (a lock keeps a second worker out) and the order in which files are given up. Whatever
goes wrong with the disk turns this tier off, with a warning, and nothing else. Called by the tier store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path

import structlog

from services.common.clock import Clock
from services.worker.engine.kv_blocks import KVBlock
from services.worker.engine.request import RequestKey
from services.worker.runtime import tier_file
from services.worker.runtime.tier_file import FileFormat, SpoiltFileError

# Bytes that wait to be written; a spill that finds them all taken is skipped.
QUEUE_BYTES = 64 << 20
CLOSE_S = 5.0
# Until the first read has been timed.
_ASSUMED_BYTES_PER_S = 200e6
_RATE_WEIGHT = 0.2
_LOCK = "millrace-kv.lock"


@dataclasses.dataclass(frozen=True, slots=True)
class DiskStats:
    """Bytes on disk now; blocks never written for want of time, and those torn, foreign or unreadable, ever."""

    is_on: bool
    size: int
    skipped_total: int
    dropped_total: int


@dataclasses.dataclass(slots=True)
class _Job:
    """What one request has asked to be read."""

    remaining: int
    blocks: dict[bytes, KVBlock]
    is_cancelled: bool = False


class DiskTier:
    """All methods are for the engine's thread and return at once, but the first, which scans, and `close`."""

    def __init__(self, path: Path, form: FileFormat, *, capacity_bytes: int, clock: Clock) -> None:
        """Takes over what earlier runs left in `path`, made if absent. Never raises for what the disk does."""
        self._path = path
        self._form = form
        self._capacity = capacity_bytes // form.file_bytes
        self._queue_capacity = max(1, QUEUE_BYTES // form.file_bytes)
        self._clock = clock
        self._folder = -1
        self._is_on = False
        self._skipped = 0
        self._dropped = 0
        self._read_s = form.file_bytes / _ASSUMED_BYTES_PER_S
        # Files, the longest unused first; blocks to be written; hashes of files to delete; all under the condition.
        self._index: OrderedDict[bytes, None] = OrderedDict()
        self._writes: OrderedDict[bytes, KVBlock] = OrderedDict()
        self._trash: deque[bytes] = deque()
        self._reads: deque[tuple[_Job, bytes]] = deque()
        self._jobs: dict[RequestKey, _Job] = {}
        self._condition = threading.Condition()
        self._close_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        try:
            self._open()
        except OSError as error:
            self._turn_off(error)
        self._thread.start()

    @property
    def read_seconds(self) -> float:
        """What reading one block takes, as measured."""
        return self._read_s

    def has(self, full_hash: bytes) -> bool:
        """True for a block on disk or on its way there."""
        with self._condition:
            return full_hash in self._index or full_hash in self._writes

    def touch(self, full_hash: bytes) -> bool:
        """`has`, and the block counts as used just now."""
        with self._condition:
            if full_hash in self._index:
                self._index.move_to_end(full_hash)
                return True
            return full_hash in self._writes

    def put(self, block: KVBlock) -> None:
        """Have the block written, unless too many wait."""
        with self._condition:
            if not self._is_on or block.full_hash in self._index or block.full_hash in self._writes:
                return
            if len(self._writes) >= self._queue_capacity or self._capacity < 1:
                self._skipped += 1
                return
            self._writes[block.full_hash] = block
            self._condition.notify()

    def read(self, key: RequestKey, hashes: Sequence[bytes]) -> None:
        """Have blocks read for a request, in order; replaces what it asked for before."""
        self.cancel(key)
        with self._condition:
            job = self._jobs[key] = _Job(0, {})
            for full_hash in hashes:
                waiting = self._writes.get(full_hash)
                if waiting is not None:
                    job.blocks[full_hash] = waiting
                elif full_hash in self._index:
                    job.remaining += 1
                    self._reads.append((job, full_hash))
            self._condition.notify()

    def is_reading(self, key: RequestKey) -> bool:
        """True until all that the request asked for has been read or given up."""
        with self._condition:
            job = self._jobs.get(key)
            return job is not None and job.remaining > 0

    def take_read(self, key: RequestKey) -> dict[bytes, KVBlock]:
        """What has been read for a request since the last call."""
        with self._condition:
            job = self._jobs.get(key)
            if job is None:
                return {}
            blocks, job.blocks = job.blocks, {}
            return blocks

    def cancel(self, key: RequestKey) -> None:
        """The request needs nothing more."""
        with self._condition:
            job = self._jobs.pop(key, None)
            if job is not None:
                job.is_cancelled = True

    def discard(self, full_hash: bytes) -> None:
        """Delete a block that turned out to be spoilt."""
        with self._condition:
            self._writes.pop(full_hash, None)
            if full_hash in self._index:
                del self._index[full_hash]
                self._trash.append(full_hash)
                self._condition.notify()

    def stats(self) -> DiskStats:
        """Counts as of now."""
        with self._condition:
            return DiskStats(self._is_on, len(self._index) * self._form.file_bytes, self._skipped, self._dropped)

    def close(self) -> None:
        """Write what waits for at most `CLOSE_S`, end the thread, let go of the folder."""
        with self._condition:
            self._close_by = self._clock.monotonic() + CLOSE_S
            self._condition.notify()
        self._thread.join(2 * CLOSE_S)
        if self._folder >= 0 and not self._thread.is_alive():
            os.close(self._lock)
            os.close(self._folder)
            self._folder = -1

    # --- start -------------------------------------------------------------------------------------------------------
    def _open(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise
        except OSError:
            os.close(folder)
            raise
        self._folder, self._lock = folder, lock
        self._scan()
        self._is_on = True

    def _scan(self) -> None:
        """Index the files of this model and layout; delete others of our naming; leave what is not ours alone."""
        found: list[tuple[float, bytes]] = []
        for name in os.listdir(self._folder):
            full_hash = tier_file.hash_of(name)
            if full_hash is None:
                if tier_file.is_unfinished(name):
                    self._unlink(name)
                continue
            try:
                found.append((tier_file.check_file(self._folder, full_hash, self._form), full_hash))
            except (OSError, SpoiltFileError):
                self._dropped += 1
                self._unlink(name)
        self._index.update((full_hash, None) for _, full_hash in sorted(found))
        while len(self._index) > self._capacity:
            full_hash, _ = self._index.popitem(last=False)
            self._unlink(tier_file.name_of(full_hash))

    # --- the disk's thread -------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._reads or self._trash or self._writes or self._close_by is not None):
                    self._condition.wait()
                if self._is_past_closing() or not (self._reads or self._trash or self._writes):
                    return
                read = self._reads.popleft() if self._reads else None
                trash = self._trash.popleft() if read is None and self._trash else None
                block = next(iter(self._writes.values()), None)
            if read is not None:
                self._read(*read)
            elif trash is not None:
                self._unlink(tier_file.name_of(trash))
            elif block is not None:
                self._write(block)

    def _is_past_closing(self) -> bool:
        return self._close_by is not None and self._clock.monotonic() >= self._close_by

    def _read(self, job: _Job, full_hash: bytes) -> None:
        block: KVBlock | None = None
        started = self._clock.monotonic()
        if not job.is_cancelled:
            try:
                block = tier_file.read_block(self._folder, full_hash, self._form)
            except (OSError, SpoiltFileError):
                self._drop(full_hash)
        with self._condition:
            if block is not None:
                job.blocks[full_hash] = block
                self._read_s += _RATE_WEIGHT * (self._clock.monotonic() - started - self._read_s)
            job.remaining -= 1

    def _write(self, block: KVBlock) -> None:
        try:
            with self._condition:
                oldest = [self._index.popitem(last=False)[0]] if len(self._index) >= self._capacity else []
            for full_hash in oldest:
                self._unlink(tier_file.name_of(full_hash))
            tier_file.write_block(self._folder, block, self._form)
        except OSError as error:
            self._turn_off(error)
            return
        with self._condition:
            if self._writes.pop(block.full_hash, None) is not None:
                self._index[block.full_hash] = None
            else:
                self._trash.append(block.full_hash)

    def _drop(self, full_hash: bytes) -> None:
        """A file that cannot be served: forget and delete it, unless it was deleted before it was read."""
        with self._condition:
            if full_hash not in self._index:
                return
            del self._index[full_hash]
            self._dropped += 1
        self._unlink(tier_file.name_of(full_hash))

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def _turn_off(self, error: OSError) -> None:
        """The disk is full, read-only, gone or another worker's: go on without it. What is on it stays there."""
        structlog.get_logger().warning("kv_disk_tier_off", path=str(self._path), error=error.strerror)
        with self._condition:
            self._is_on = False
            self._index.clear()
            self._writes.clear()
            self._trash.clear()
            self._reads.clear()
            for job in self._jobs.values():
                job.remaining = 0
