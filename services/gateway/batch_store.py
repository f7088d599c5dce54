"""Files and batches by tenant, in an SQLite file and a folder of JSONL.

Gateways that share the folder share them. Owns the tables and the files' place; knows no meaning of a line.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec

from services.common.clock import Clock
from services.common.errors import InvalidRequest, PayloadTooLarge, StoreUnavailable
from services.common.lifecycle import new_ulid
from services.gateway.batch_types import UNFINISHED, Batch, FileObject, RequestCounts
from services.gateway.limits import Limits
from services.gateway.sqlite_file import SqliteFile

KEPT_S = 30 * 86_400
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS files (tenant TEXT NOT NULL, id TEXT NOT NULL, purpose TEXT NOT NULL, "
    "size INTEGER NOT NULL, expires_at REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY (tenant, id)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS batches (tenant TEXT NOT NULL, id TEXT NOT NULL, status TEXT NOT NULL, "
    "input_file TEXT NOT NULL, key_digest BLOB NOT NULL, body BLOB NOT NULL, PRIMARY KEY (tenant, id)) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS batches_status ON batches (status)",
    "CREATE TABLE IF NOT EXISTS lines (batch TEXT NOT NULL, number INTEGER NOT NULL, failed INTEGER NOT NULL, "
    "result BLOB NOT NULL, PRIMARY KEY (batch, number)) WITHOUT ROWID",
    # Counts are read each second: not from the pages of the results.
    "CREATE INDEX IF NOT EXISTS lines_failed ON lines (batch, failed, number)",
)
T = TypeVar("T")
_UNFINISHED = ", ".join(f"'{status}'" for status in UNFINISHED)
_PAGE = 200
_BATCH_KEPT_S = 60 * 86_400
_PART_S = 86_400
# Expired files that one upload removes.
_SWEEP = 100


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedBatch:
    """A batch with whose it is; `key_digest` is the SHA-256 of the secret of the key that made it."""

    tenant: str
    key_digest: bytes
    batch: Batch


def batch_database(folder: Path) -> SqliteFile:
    """The tables that both stores share."""
    return SqliteFile(folder / "batches.sqlite3", _SCHEMA, what="batches")


class FileStore:
    """Files of JSONL, kept for 30 days. Every method raises StoreUnavailable."""

    def __init__(self, database: SqliteFile, folder: Path, clock: Clock, limits: Limits) -> None:
        self._database = database
        self._folder = folder
        self._clock = clock
        self._limits = limits

    async def add_input(self, tenant: str, file_id: str, name: str, source: BinaryIO) -> FileObject:
        """Keep a copy of `source`. Raises InvalidRequest or PayloadTooLarge, by the limit that it is over."""
        await self._sweep()
        query = "SELECT count(*), coalesce(sum(size), 0) FROM files WHERE tenant = ?"
        ((count, held),), _ = await self._database.run(query, (tenant,))
        if count >= self._limits.tenant_files:
            raise InvalidRequest(f"At most {self._limits.tenant_files} files are kept: delete some.", param="file")
        size = await _in_thread(lambda: self._write(file_id, _checked_lines(source, self._limits)))
        most = self._limits.tenant_file_bytes
        if held + size > most:
            await _in_thread(lambda: self.path(file_id).unlink(missing_ok=True))
            raise PayloadTooLarge(f"Files take at most {most} bytes in all: delete some.", param="file")
        return await self._register(tenant, file_id, name, size, "batch")

    async def add_output(self, tenant: str, file_id: str, pages: AsyncIterator[Sequence[bytes]]) -> bool:
        """Keep the lines of a batch, in place of an earlier try; False when there are none."""
        part = self._folder / f"{file_id}.{new_ulid()}.part"
        size = 0
        async for page in pages:
            size += await _in_thread(functools.partial(_append, part, "ab" if size else "wb", page))
        if size == 0:
            return False
        await _in_thread(lambda: part.replace(self.path(file_id)))
        await self._register(tenant, file_id, f"{file_id}.jsonl", size, "batch_output")
        return True

    async def get(self, tenant: str, file_id: str) -> FileObject | None:
        """The file's facts, or None."""
        query = "SELECT body FROM files WHERE tenant = ? AND id = ? AND expires_at > ?"
        rows, _ = await self._database.run(query, (tenant, file_id, self._clock.wall()))
        return msgspec.json.decode(rows[0][0], type=FileObject) if rows else None

    async def newest(self, tenant: str, *, purpose: str, after: str, limit: int) -> list[FileObject]:
        """Newest first, from behind the id `after`; empty texts ask for all."""
        query = (
            "SELECT body FROM files WHERE tenant = ? AND expires_at > ? AND (? = '' OR id < ?) "
            "AND (? = '' OR purpose = ?) ORDER BY id DESC LIMIT ?"
        )
        values = (tenant, self._clock.wall(), after, after, purpose, purpose, limit)
        rows, _ = await self._database.run(query, values)
        return [msgspec.json.decode(body, type=FileObject) for (body,) in rows]

    async def delete(self, tenant: str, file_id: str) -> bool:
        """False when there was none. Raises InvalidRequest while a batch reads it."""
        query = f"SELECT id FROM batches WHERE tenant = ? AND input_file = ? AND status IN ({_UNFINISHED})"  # noqa: S608
        rows, _ = await self._database.run(query, (tenant, file_id))
        if rows:
            raise InvalidRequest(f"The file is read by {rows[0][0]}: cancel that first.", param="file_id")
        _, changed = await self._database.run("DELETE FROM files WHERE tenant = ? AND id = ?", (tenant, file_id))
        if changed:
            await _in_thread(lambda: self.path(file_id).unlink(missing_ok=True))
        return changed > 0

    def path(self, file_id: str) -> Path:
        """Where the file lies. The id must be of a file that is known."""
        return self._folder / f"{file_id}.jsonl"

    async def _register(
        self, tenant: str, file_id: str, name: str, size: int, purpose: Literal["batch", "batch_output"]
    ) -> FileObject:
        now = int(self._clock.wall())
        facts = FileObject(file_id, size, now, now + KEPT_S, name, purpose)
        row = (tenant, file_id, purpose, size, facts.expires_at, msgspec.json.encode(facts))
        await self._database.run("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
        return facts

    async def _sweep(self) -> None:
        query = "SELECT tenant, id FROM files WHERE expires_at <= ? LIMIT ?"
        rows, _ = await self._database.run(query, (self._clock.wall(), _SWEEP))
        for tenant, file_id in rows:
            await self._database.run("DELETE FROM files WHERE tenant = ? AND id = ?", (tenant, file_id))
            await _in_thread(functools.partial(self.path(file_id).unlink, missing_ok=True))
        await _in_thread(self._remove_parts)

    def _remove_parts(self) -> None:
        """What a crash left of files that were being written."""
        for part in self._folder.glob("*.part"):
            if part.stat().st_mtime < self._clock.wall() - _PART_S:
                part.unlink(missing_ok=True)

    def _write(self, file_id: str, lines: Iterable[bytes]) -> int:
        part = self._folder / f"{file_id}.part"
        try:
            size = _append(part, "wb", lines)
            part.replace(self.path(file_id))
        finally:
            part.unlink(missing_ok=True)
        return size


class BatchStore:
    """Batches and the results of their lines. Every method raises StoreUnavailable."""

    def __init__(self, database: SqliteFile, limits: Limits) -> None:
        self._database = database
        self._limits = limits

    async def add(self, owned: OwnedBatch) -> None:
        """Keep a new batch. Raises InvalidRequest when the tenant has too many that are not finished.

        Finished ones older than 60 days are dropped: the first ten characters of an id are its time.
        """
        oldest = "batch_" + new_ulid(owned.batch.created_at - _BATCH_KEPT_S)[:10]
        dropped = f"DELETE FROM batches WHERE tenant = ? AND id < ? AND status NOT IN ({_UNFINISHED})"  # noqa: S608
        await self._database.run(dropped, (owned.tenant, oldest))
        query = f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN ({_UNFINISHED})"  # noqa: S608
        ((count,),), _ = await self._database.run(query, (owned.tenant,))
        if count >= self._limits.unfinished_batches:
            most = self._limits.unfinished_batches
            raise InvalidRequest(f"At most {most} batches of a tenant are under way at once.", param="input_file_id")
        batch = owned.batch
        row = (owned.tenant, batch.id, batch.status, batch.input_file_id, owned.key_digest, msgspec.json.encode(batch))
        await self._database.run("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)", row)

    async def get(self, tenant: str, batch_id: str) -> Batch | None:
        """The batch with its counts as they are now, or None."""
        rows, _ = await self._database.run("SELECT body FROM batches WHERE tenant = ? AND id = ?", (tenant, batch_id))
        return await self._counted(rows[0][0]) if rows else None

    async def newest(self, tenant: str, *, after: str, limit: int) -> list[Batch]:
        """Newest first, from behind the id `after` unless it is empty."""
        query = "SELECT body FROM batches WHERE tenant = ? AND (? = '' OR id < ?) ORDER BY id DESC LIMIT ?"
        rows, _ = await self._database.run(query, (tenant, after, after, limit))
        return [await self._counted(body) for (body,) in rows]

    async def unfinished(self) -> list[OwnedBatch]:
        """Of every tenant, oldest first."""
        query = f"SELECT tenant, key_digest, body FROM batches WHERE status IN ({_UNFINISHED}) ORDER BY id"  # noqa: S608
        rows, _ = await self._database.run(query)
        return [OwnedBatch(tenant, digest, msgspec.json.decode(body, type=Batch)) for tenant, digest, body in rows]

    async def change(self, tenant: str, old: Batch, new: Batch) -> bool:
        """Replace `old`; False when its status is no longer that of `old`."""
        query = "UPDATE batches SET status = ?, body = ? WHERE tenant = ? AND id = ? AND status = ?"
        values = (new.status, msgspec.json.encode(new), tenant, old.id, old.status)
        _, changed = await self._database.run(query, values)
        return changed > 0

    async def record(self, batch_id: str, number: int, result: bytes, *, failed: int) -> bool:
        """Keep the result of a line; False when it has one, which stays."""
        query = "INSERT OR IGNORE INTO lines VALUES (?, ?, ?, ?)"
        _, changed = await self._database.run(query, (batch_id, number, failed, result))
        return changed > 0

    async def recorded(self, batch_id: str) -> set[int]:
        """Numbers of the lines that have a result."""
        rows, _ = await self._database.run("SELECT number FROM lines WHERE batch = ?", (batch_id,))
        return {number for (number,) in rows}

    async def counts(self, batch_id: str) -> tuple[int, int]:
        """Lines with an answer and lines with an error."""
        query = "SELECT count(*), coalesce(sum(failed), 0) FROM lines WHERE batch = ?"
        ((count, failed),), _ = await self._database.run(query, (batch_id,))
        return count - failed, failed

    async def results(self, batch_id: str, *, failed: int) -> AsyncIterator[list[bytes]]:
        """Pages of results in the order of the lines: those with an error (1) or the others (0)."""
        query = "SELECT number, result FROM lines WHERE batch = ? AND failed = ? AND number > ? ORDER BY number LIMIT ?"
        last = 0
        while True:
            rows, _ = await self._database.run(query, (batch_id, failed, last, _PAGE))
            if not rows:
                return
            last = rows[-1][0]
            yield [result for _, result in rows]

    async def forget_lines(self, batch_id: str) -> None:
        """Drop the results, once the files hold them."""
        await self._database.run("DELETE FROM lines WHERE batch = ?", (batch_id,))

    async def _counted(self, body: bytes) -> Batch:
        batch = msgspec.json.decode(body, type=Batch)
        if batch.status not in UNFINISHED:
            return batch
        completed, failed = await self.counts(batch.id)
        counts = RequestCounts(batch.request_counts.total, completed, failed)
        return msgspec.structs.replace(batch, request_counts=counts)


def _checked_lines(source: BinaryIO, limits: Limits) -> Iterator[bytes]:
    count = 0
    while line := source.readline(limits.batch_line_bytes + 1):
        count += 1
        if len(line.removesuffix(b"\n")) > limits.batch_line_bytes:
            message = f"Line {count} is longer than {limits.batch_line_bytes} bytes."
            raise PayloadTooLarge(message, param="file")
        if count > limits.batch_lines:
            raise PayloadTooLarge(f"The file has more than {limits.batch_lines} lines.", param="file")
        yield line
    if count == 0:
        raise InvalidRequest("The file is empty.", param="file")


def _append(path: Path, mode: str, lines: Iterable[bytes]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    size = 0
    with path.open(mode) as target:
        for line in lines:
            size += target.write(line)
        target.flush()
        os.fsync(target.fileno())
    return size


async def _in_thread(work: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise StoreUnavailable("The store of files is not available.", retry_after_s=1.0) from error
