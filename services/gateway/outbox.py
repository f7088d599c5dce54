"""The usage outbox: terminal records on disk before Redis is asked, kept until the ledger has them.

Owns the folder `<data_dir>/outbox/<instance>`; takes over folders of dead incarnations at start. A record is
length, CRC-32 and payload; a torn tail ends the reading of its file. Writes are grouped, one fdatasync each 20 ms at
most, in a thread. Never talks to Redis. Called by metering's publisher.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError
from millrace.usage.v1 import usage_event_pb2

from services.common.clock import Clock
from services.gateway.outbox_file import pack_record, read_records

SYNC_INTERVAL_S = 0.020
SEGMENT_BYTES = 4_194_304
# At this size new work is refused.
OUTBOX_BYTES = 67_108_864
_TERMINAL, _RESOLVED = b"T", b"R"


@dataclasses.dataclass(frozen=True, slots=True)
class OutboxRecord:
    """A terminal of one request: its usage event, and the computed tokens that quotas settle on."""

    computed_tokens: int
    event: usage_event_pb2.UsageEvent

    @property
    def request_id(self) -> str:
        return self.event.request_id


@dataclasses.dataclass(slots=True)
class _Segment:
    path: Path
    size: int
    open_ids: set[str]


class OutboxError(Exception):
    """The outbox cannot be written; the record lives in memory only."""


class Outbox:
    """Append, resolve, replay. `full` or `broken` means: admit nothing new."""

    def __init__(self, data_dir: Path, instance: str, *, max_bytes: int, clock: Clock) -> None:
        self._root = data_dir / "outbox"
        self._dir = self._root / instance
        self._max_bytes = max_bytes
        self._clock = clock
        self._records: dict[str, OutboxRecord] = {}
        self._segments: list[_Segment] = []
        self._file = -1
        self._lock_file = -1
        self._pending: list[tuple[bytes, str, asyncio.Future[None]]] = []
        self._flush: asyncio.Task[None] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._last_sync = float("-inf")
        self.broken = False

    @property
    def records(self) -> list[OutboxRecord]:
        """Everything that is not resolved yet, oldest first."""
        return list(self._records.values())

    @property
    def full(self) -> bool:
        return sum(segment.size for segment in self._segments) >= self._max_bytes

    def open(self) -> None:
        """Create and lock the folder, take over what dead incarnations left. Blocks. Raises OSError."""
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_file = _locked(self._dir)
        if self._lock_file < 0:
            raise OSError("another process uses this outbox")
        self._new_segment()
        for orphan in sorted(path for path in self._root.iterdir() if path.is_dir() and path != self._dir):
            self._take_over(orphan)

    async def append(self, record: OutboxRecord) -> None:
        """Return once the record is on disk. Raises OutboxError when it cannot be; it is then kept in memory."""
        self._records[record.request_id] = record
        payload = _TERMINAL + record.computed_tokens.to_bytes(8, "little") + record.event.SerializeToString()
        await self._write(payload, record.request_id)

    async def resolve(self, request_ids: Sequence[str]) -> None:
        """Forget records that the ledger holds (or whose terminal another caller set)."""
        known = [request_id for request_id in request_ids if self._records.pop(request_id, None) is not None]
        for segment in self._segments:
            segment.open_ids.difference_update(known)
        for segment in [s for s in self._segments[:-1] if not s.open_ids]:
            self._segments.remove(segment)
            segment.path.unlink(missing_ok=True)
        if known and not self.broken:
            try:
                await self._write(_RESOLVED + "\n".join(known).encode(), None)
            except OutboxError:
                structlog.get_logger().warning("outbox_resolve_failed", count=len(known))

    async def mend(self) -> None:
        """After a failed write: try the disk again, with what lives in memory only. A gateway that admits nothing while
        it is broken would not find out by itself that there is room again."""
        on_disk = frozenset[str]().union(*(segment.open_ids for segment in self._segments))
        unwritten = [record for record in self.records if record.request_id not in on_disk]
        if unwritten:
            await asyncio.gather(*(self.append(record) for record in unwritten), return_exceptions=True)
        else:
            with contextlib.suppress(OutboxError):
                await self._write(_RESOLVED, None)

    async def close(self) -> None:
        """Flush, and delete the folder when nothing is left in it."""
        if self._flush is not None:
            await self._flush
        self._executor.shutdown(wait=True)
        if self._file >= 0:
            os.close(self._file)
        if not self._records:
            shutil.rmtree(self._dir, ignore_errors=True)
        if self._lock_file >= 0:
            os.close(self._lock_file)

    async def _write(self, payload: bytes, request_id: str | None) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((pack_record(payload), request_id or "", done))
        if self._flush is None or self._flush.done():
            self._flush = asyncio.create_task(self._flush_pending(), name="outbox-flush")
        await done

    async def _flush_pending(self) -> None:
        while self._pending:
            wait = self._last_sync + SYNC_INTERVAL_S - self._clock.monotonic()
            if wait > 0:
                await self._clock.sleep(wait)
            batch, self._pending = self._pending, []
            self._last_sync = self._clock.monotonic()
            error: OSError | None = None
            try:
                await asyncio.get_running_loop().run_in_executor(self._executor, self._sync, batch)
            except OSError as failure:
                error = failure
                structlog.get_logger().error("outbox_write_failed", error=type(failure).__name__, errno=failure.errno)
            self.broken = error is not None
            for _, _, done in batch:
                if not done.done():
                    if error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(OutboxError("the outbox cannot be written"))

    def _sync(self, batch: Sequence[tuple[bytes, str, asyncio.Future[None]]]) -> None:
        if self._segments[-1].size >= SEGMENT_BYTES:
            self._new_segment()
        segment = self._segments[-1]
        try:
            _write_all(self._file, b"".join(data for data, _, _ in batch))
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, segment.size)
            raise
        segment.size += sum(len(data) for data, _, _ in batch)
        segment.open_ids.update(request_id for _, request_id, _ in batch if request_id in self._records)

    def _new_segment(self) -> None:
        path = self._dir / f"{len(list(self._dir.glob('*.log'))):06d}-{os.urandom(4).hex()}.log"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._file = file
        self._segments.append(_Segment(path, 0, set()))

    def _take_over(self, folder: Path) -> None:
        lock = _locked(folder)
        if lock < 0:
            return
        try:
            found = _read_folder(folder)
            data = [
                pack_record(_TERMINAL + r.computed_tokens.to_bytes(8, "little") + r.event.SerializeToString())
                for r in found
            ]
            _write_all(self._file, b"".join(data))
            os.fdatasync(self._file)
            self._segments[-1].size += sum(map(len, data))
            self._segments[-1].open_ids.update(r.request_id for r in found)
            self._records.update({r.request_id: r for r in found})
            shutil.rmtree(folder)
            structlog.get_logger().info("outbox_taken_over", count=len(found))
        finally:
            os.close(lock)


def _read_folder(folder: Path) -> list[OutboxRecord]:
    found: dict[str, OutboxRecord] = {}
    resolved: set[str] = set()
    for path in sorted(folder.glob("*.log")):
        for payload in _payloads(path):
            if payload[:1] == _RESOLVED:
                resolved.update(payload[1:].decode("ascii", errors="replace").split("\n"))
            elif payload[:1] == _TERMINAL and len(payload) > 9:
                try:
                    event = usage_event_pb2.UsageEvent.FromString(payload[9:])
                except DecodeError:
                    continue
                record = OutboxRecord(int.from_bytes(payload[1:9], "little"), event)
                found[record.request_id] = record
    return [record for request_id, record in found.items() if request_id not in resolved]


def _payloads(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from read_records(file)
        if file.read(1):
            structlog.get_logger().warning("outbox_tail_dropped", file=path.name)


def _locked(folder: Path) -> int:
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return -1
    return file


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
