"""Changes of the route table, and their records: each revision in Redis' history becomes one audit record.

The change is atomic in Redis first; a crash before its record only delays it, since what has none yet is copied again.
From the last record a table is put back that Redis lost.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
import structlog

from services.common.clock import Clock
from services.common.errors import RevisionConflict, StoreUnavailable
from services.common.route_store import Revision, RouteStore
from services.common.route_wire import from_json, to_json
from services.common.routes import RouteTable
from services.usage.audit import Act, record
from services.usage.schema import audit
from services.usage.store import Store

ACTION = "routes.change"
CHECK_EVERY_S = 1.0
TRIES = 5
Change = Callable[[RouteTable], RouteTable]


class RouteLog:
    """Writes changes and keeps the records complete."""

    def __init__(self, store: Store, routes: RouteStore, clock: Clock) -> None:
        self._store = store
        self.routes = routes
        self._clock = clock
        # The newest revision that is known to be recorded.
        self._recorded: int | None = None

    async def table(self) -> RouteTable:
        """The table that stands, an empty one where nobody wrote any; while Redis is away, the last that was recorded.
        Raises StoreUnavailable when Redis is away and none was."""
        try:
            return await self.routes.read() or RouteTable()
        except StoreUnavailable:
            last = await self._store.read(_last_revision)
            if last is None:
                raise
            return last.table

    async def change(self, change: Change, *, who: str, why: str) -> RouteTable:
        """Apply `change` to the table that stands, again where another came between. Raises what `change` raises,
        StoreUnavailable, RevisionConflict."""
        # A change of what Redis lost is made from what was lost.
        await self._put_back()
        tries = 0
        while True:
            table = await self.routes.read() or RouteTable()
            try:
                changed = await self.routes.replace(change(table), who=who, why=why)
            except RevisionConflict:
                tries += 1
                if tries == TRIES:
                    raise
                continue
            await self.copy()
            return changed

    async def keep(self) -> None:
        """For ever: each second, record what is not yet and put a lost revision back."""
        while True:
            try:
                await self.copy()
                await self._put_back()
            except StoreUnavailable as error:
                structlog.get_logger().warning("route_log_waits", error=error.message)
            await self._clock.sleep(CHECK_EVERY_S)

    async def copy(self) -> None:
        """Record revisions that have no record yet. Raises StoreUnavailable."""
        if self._recorded is None:
            last = await self._store.read(_last)
            self._recorded = 0 if last is None else int(last.subject)
        revisions = await self.routes.history(after=self._recorded)
        if revisions:
            await self._store.write(functools.partial(_record, revisions=revisions))
            self._recorded = revisions[-1].table.revision

    async def _put_back(self) -> None:
        """Write the last recorded revision where Redis lost it: all of it, or only what was last written."""
        last = await self._store.read(_last_revision)
        if last is None or await self.routes.at(last.table.revision) is not None:
            return
        if await self.routes.put_back(last):
            structlog.get_logger().warning("routes_put_back", revision=last.table.revision)


def _last(connection: sa.Connection) -> sa.Row[Any] | None:
    query = sa.select(audit).where(audit.c.action == ACTION).order_by(audit.c.audit_id.desc()).limit(1)
    return connection.execute(query).one_or_none()


def _record(connection: sa.Connection, revisions: Sequence[Revision]) -> None:
    if connection.dialect.name == "postgresql":
        # Another usage service may copy the same ones.
        connection.execute(sa.text("LOCK TABLE audit IN SHARE ROW EXCLUSIVE MODE"))
    last = _last(connection)
    before, after = (None, 0) if last is None else (last.after, int(last.subject))
    for revision in revisions:
        if revision.table.revision <= after:
            continue
        fields = {"why": revision.why, "routes": json.loads(to_json(revision.table))}
        act = Act(revision.who, ACTION, "", str(revision.table.revision), before, fields)
        record(connection, act, datetime.fromtimestamp(revision.time_s, UTC))
        before = fields


def _last_revision(connection: sa.Connection) -> Revision | None:
    last = _last(connection)
    if last is None:
        return None
    return Revision(last.time.timestamp(), last.actor, last.after["why"], from_json(json.dumps(last.after["routes"])))
