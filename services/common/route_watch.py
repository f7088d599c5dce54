"""The route table as a gateway or router knows it: read again and again, and the last one stays while Redis has none.

Owns the copy on disk. A table that cannot be read changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from services.common.clock import Clock
from services.common.errors import InvalidRequest, StoreUnavailable
from services.common.route_store import RouteStore
from services.common.route_wire import from_json, to_json
from services.common.routes import RouteTable

PERIOD_S = 0.5
# A table older than the one in force is taken once it stood for so many readings: Redis lost the later ones, which the
# usage service puts back.
OLDER_READINGS = 20


class RouteWatch:
    """`table` is the one in force. With a `path` it is there from the start of the process on."""

    def __init__(self, store: RouteStore, path: Path | None = None) -> None:
        self.table = RouteTable()
        self._store = store
        self._path = path
        self._document: bytes | None = None
        self._older = 0

    def load(self) -> None:
        """Take what was in force when the process ended. Blocks; a copy that cannot be read is as none."""
        if self._path is None or not self._path.exists():
            return
        try:
            self.table = from_json(self._path.read_bytes())
        except (OSError, InvalidRequest) as error:
            structlog.get_logger().warning("route_copy_unreadable", error=str(error))

    async def refresh(self) -> bool:
        """Take what Redis has; true when another table is in force now. Raises StoreUnavailable."""
        document = await self._store.document()
        if document is None or document == self._document:
            self._older = 0
            return False
        try:
            table = from_json(document)
        except InvalidRequest as error:
            self._document = document
            structlog.get_logger().error("route_table_refused", error=error.message)
            return False
        self._older = self._older + 1 if table.revision < self.table.revision else 0
        if 0 < self._older < OLDER_READINGS:
            return False
        self._document = document
        if table == self.table:
            return False
        self.table = table
        structlog.get_logger().info("routes_changed", revision=table.revision)
        if self._path is not None:
            await asyncio.to_thread(_keep, self._path, to_json(table))
        return True

    async def run(self, clock: Clock, on_change: Callable[[], None]) -> None:
        """Refresh each half second until cancelled."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                if await self.refresh():
                    on_change()
            await clock.sleep(PERIOD_S)


def _keep(path: Path, text: str) -> None:
    # Two gateways may share the folder while one takes over from the other.
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        structlog.get_logger().warning("route_copy_unwritten", error=str(error))
