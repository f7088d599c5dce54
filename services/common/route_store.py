"""The route table in Redis: one document, replaced by compare-and-set on its revision, each revision kept.

Raises StoreUnavailable when Redis is away. Written by the usage service, which records who changed what; read by all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import redis.asyncio as aioredis

from services.common.admission_scripts import ScriptRunner, slot_key, store_errors
from services.common.errors import RevisionConflict
from services.common.route_wire import from_json, to_json
from services.common.routes import RouteTable

_TABLE, _HISTORY = (slot_key("routes", name) for name in ("table", "history"))


@dataclasses.dataclass(frozen=True, slots=True)
class Revision:
    """One entry of the history: `time_s` is unix time by Redis' clock."""

    time_s: float
    who: str
    why: str
    table: RouteTable


class RouteStore:
    """Reads and replaces the table."""

    def __init__(self, redis: aioredis.Redis) -> None:
        self._redis: Any = redis
        self._scripts = ScriptRunner(redis)

    async def document(self) -> bytes | None:
        """The table that stands, as JSON; None when there is none, which is what a lost Redis looks like too."""
        document: bytes | None = await self._scripts.command("HGET", _TABLE, "document")
        return document

    async def read(self) -> RouteTable | None:
        """The table that stands, or None. Raises InvalidRequest for a document that no release of ours wrote."""
        document = await self.document()
        return None if document is None else from_json(document)

    async def replace(self, table: RouteTable, *, who: str, why: str) -> RouteTable:
        """Put `table` in the place of the revision it was made from; returns it with its new revision.

        Raises RevisionConflict when another change came between.
        """
        changed = dataclasses.replace(table, revision=table.revision + 1)
        stands, wrote = await self._write(table.revision, changed, who, why)
        if not wrote:
            raise RevisionConflict(
                f"The routes were changed meanwhile: revision {stands} stands, not {table.revision}.", param="revision"
            )
        return changed

    async def put_back(self, lost: Revision) -> bool:
        """Write a revision that Redis lost; False where that or a later one stands."""
        return bool((await self._write(None, lost.table, lost.who, lost.why))[1])

    async def history(self, *, after: int = 0, before: int | None = None, count: int = 100) -> list[Revision]:
        """Revisions above `after` and below `before`: the oldest `count` of them, oldest first; with `before`, the
        newest, newest first."""
        low = f"({after}-0" if after else "-"
        with store_errors():
            if before is None:
                entries = await self._redis.xrange(_HISTORY, low, "+", count=count)
            else:
                entries = await self._redis.xrevrange(_HISTORY, f"({before}-0", low, count=count)
        return [_revision(fields) for _, fields in entries]

    async def at(self, revision: int) -> Revision | None:
        """One revision, or None."""
        with store_errors():
            entries = await self._redis.xrange(_HISTORY, f"{revision}-0", f"{revision}-0")
        return _revision(entries[0][1]) if entries else None

    async def _write(self, expected: int | None, table: RouteTable, who: str, why: str) -> tuple[int, int]:
        stands, wrote = await self._scripts.run(
            "routes", [_TABLE, _HISTORY], expected, table.revision, to_json(table), who, why
        )
        return int(stands), int(wrote)


def _revision(fields: dict[bytes, bytes]) -> Revision:
    return Revision(
        time_s=int(fields[b"time"]) / 1000,
        who=fields[b"who"].decode(),
        why=fields[b"why"].decode(),
        table=from_json(fields[b"document"]),
    )
