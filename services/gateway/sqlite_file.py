"""One SQLite file that gateways share: each call is a transaction in a thread. Knows no table's meaning."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from services.common.errors import StoreUnavailable

Value = str | float | bytes | None
T = TypeVar("T")


class SqliteFile:
    """`schema` is run when the file is first opened. Every call raises StoreUnavailable, which names `what`."""

    def __init__(self, path: Path, schema: Sequence[str], *, what: str) -> None:
        self._path = path
        self._schema = schema
        self._what = what
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    async def run(self, query: str, values: Sequence[Value] = ()) -> tuple[list[tuple[Any, ...]], int]:
        """Rows, and how many were changed."""

        def work(connection: sqlite3.Connection) -> tuple[list[tuple[Any, ...]], int]:
            with contextlib.closing(connection.execute(query, values)) as cursor:
                return cursor.fetchall(), cursor.rowcount

        return await self._in_thread(work)

    async def run_many(self, query: str, rows: Iterable[Sequence[Value]]) -> None:
        """One query for each row, all or nothing."""

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(query, rows).close()

        await self._in_thread(work)

    async def close(self) -> None:
        """Close the file; a later call opens it again."""
        await asyncio.to_thread(self._close)

    async def _in_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await asyncio.to_thread(self._locked, work)
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(f"The store of {self._what} is not available.", retry_after_s=1.0) from error

    def _locked(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock, self._opened() as connection:
            return work(connection)

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            connection = sqlite3.connect(self._path, check_same_thread=False, timeout=5.0)
            connection.execute("PRAGMA journal_mode = WAL")
            for statement in self._schema:
                connection.execute(statement)
            self._connection = connection
        return self._connection

    def _close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
