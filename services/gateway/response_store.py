"""Stored responses by tenant, with an end of life, behind a port; the local one is an SQLite file.

Gateways that share the folder share the responses. Owns the table; knows no meaning of what it keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import Protocol

from services.common.clock import Clock
from services.common.errors import StoreUnavailable

RESPONSE_TTL_S = 30 * 86_400
_TABLE = (
    "CREATE TABLE IF NOT EXISTS responses (tenant TEXT NOT NULL, id TEXT NOT NULL, expires_at REAL NOT NULL, "
    "body BLOB NOT NULL, PRIMARY KEY (tenant, id)) WITHOUT ROWID"
)
_INDEX = "CREATE INDEX IF NOT EXISTS responses_expires_at ON responses (expires_at)"
# Expired rows that one write removes.
_SWEEP = 100


class ResponseStore(Protocol):
    """Bytes by tenant and id. Every method raises StoreUnavailable."""

    async def put(self, tenant: str, response_id: str, body: bytes) -> None:
        """Keep for 30 days."""
        ...

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """What is kept, or None."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """False when there was none."""
        ...


class SqliteResponseStore:
    """One file; each call runs in a thread."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    async def put(self, tenant: str, response_id: str, body: bytes) -> None:
        """Keep for 30 days."""
        now = self._clock.wall()
        row = (tenant, response_id, now + RESPONSE_TTL_S, body)
        expired = "SELECT tenant, id FROM responses WHERE expires_at <= ? LIMIT ?"
        await self._run(f"DELETE FROM responses WHERE (tenant, id) IN ({expired})", (now, _SWEEP))  # noqa: S608
        await self._run("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)", row)

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """What is kept, or None."""
        query = "SELECT body FROM responses WHERE tenant = ? AND id = ? AND expires_at > ?"
        rows, _ = await self._run(query, (tenant, response_id, self._clock.wall()))
        return rows[0][0] if rows else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        """False when there was none."""
        query = "DELETE FROM responses WHERE tenant = ? AND id = ? AND expires_at > ?"
        _, changed = await self._run(query, (tenant, response_id, self._clock.wall()))
        return changed > 0

    async def close(self) -> None:
        """Close the file."""
        await asyncio.to_thread(self._close)

    async def _run(self, query: str, values: tuple[str | float | bytes, ...]) -> tuple[list[tuple[bytes]], int]:
        try:
            return await asyncio.to_thread(self._query, query, values)
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable("The store of responses is not available.", retry_after_s=1.0) from error

    def _query(self, query: str, values: tuple[str | float | bytes, ...]) -> tuple[list[tuple[bytes]], int]:
        with self._lock, self._opened() as connection, contextlib.closing(connection.execute(query, values)) as cursor:
            return cursor.fetchall(), cursor.rowcount

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            connection = sqlite3.connect(self._folder / "responses.sqlite3", check_same_thread=False, timeout=5.0)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(_TABLE)
            connection.execute(_INDEX)
            self._connection = connection
        return self._connection

    def _close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
