"""Stored responses by tenant, with an end of life, behind a port; the local one is an SQLite file.

Gateways that share the folder share the responses. Owns the table; knows no meaning of what it keeps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from services.common.clock import Clock
from services.gateway.sqlite_file import SqliteFile

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
    """One file in the folder."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._clock = clock
        self._file = SqliteFile(folder / "responses.sqlite3", (_TABLE, _INDEX), what="responses")

    async def put(self, tenant: str, response_id: str, body: bytes) -> None:
        """Keep for 30 days."""
        now = self._clock.wall()
        row = (tenant, response_id, now + RESPONSE_TTL_S, body)
        expired = "SELECT tenant, id FROM responses WHERE expires_at <= ? LIMIT ?"
        await self._file.run(f"DELETE FROM responses WHERE (tenant, id) IN ({expired})", (now, _SWEEP))  # noqa: S608
        await self._file.run("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)", row)

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """What is kept, or None."""
        query = "SELECT body FROM responses WHERE tenant = ? AND id = ? AND expires_at > ?"
        rows, _ = await self._file.run(query, (tenant, response_id, self._clock.wall()))
        return rows[0][0] if rows else None

    async def delete(self, tenant: str, response_id: str) -> bool:
        """False when there was none."""
        query = "DELETE FROM responses WHERE tenant = ? AND id = ? AND expires_at > ?"
        _, changed = await self._file.run(query, (tenant, response_id, self._clock.wall()))
        return changed > 0

    async def close(self) -> None:
        """Close the file."""
        await self._file.close()
