"""Opens the usage database (SQLite by default, PostgreSQL by URL), brings its schema up to date, lends connections.

Owns engine, pragmas, migration lock and threads; knows no table's meaning. SQLAlchemy runs synchronously: writes one
at a time on one thread, reads on a few others, and `Store.write`/`Store.read` await them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config as AlembicConfig
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from services.common.errors import StoreUnavailable
from services.common.lifecycle import StartupError
from services.usage.config import parse_database_url

ResultT = TypeVar("ResultT")
Insert = sqlite.Insert | postgresql.Insert

BUSY_TIMEOUT_S = 10
CONNECT_TIMEOUT_S = 5
READ_THREADS = 4
MIGRATION_LOCK = 0x6D696C6C72616365
_WRITE = "millrace_write"


class Store:
    """One open database. `write` and `read` run a function of a connection in one transaction, off the event loop."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="usage-write")
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="usage-read")

    @property
    def dialect(self) -> str:
        """`sqlite` or `postgresql`."""
        return self._engine.dialect.name

    async def write(self, work: Callable[[sa.Connection], ResultT]) -> ResultT:
        """Run `work` in one transaction that is committed on return and rolled back on any exception.

        Raises StoreUnavailable when the database is away, and what `work` raises.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writer, self.write_sync, work)

    async def read(self, work: Callable[[sa.Connection], ResultT]) -> ResultT:
        """Run `work` in one read transaction. Raises StoreUnavailable when the database is away."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.read_sync, work)

    def write_sync(self, work: Callable[[sa.Connection], ResultT]) -> ResultT:
        """`write` on the calling thread; blocks."""
        with _translated(), self._connect_for_writing() as connection, connection.begin():
            return work(connection)

    def read_sync(self, work: Callable[[sa.Connection], ResultT]) -> ResultT:
        """`read` on the calling thread; blocks."""
        with _translated(), self._engine.connect() as connection, connection.begin():
            return work(connection)

    def _connect_for_writing(self) -> sa.Connection:
        return self._engine.connect().execution_options(**{_WRITE: True})

    def close(self) -> None:
        """Let running work end, then drop all connections. Blocks."""
        self._writer.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        self._engine.dispose()


def insert_into(connection: sa.Connection, table: sa.Table) -> Insert:
    """An INSERT that knows ON CONFLICT on either database."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def open_store(database_url: str) -> Store:
    """Connect and migrate. Blocks. Raises StartupError with one sentence that holds no password."""
    url = _parse(database_url)
    shown = url.render_as_string(hide_password=True)
    engine = _sqlite_engine(url) if url.get_backend_name() == "sqlite" else _postgresql_engine(url)
    try:
        _migrate(engine, url)
    except (OperationalError, InterfaceError, sqlite3.Error, OSError) as error:
        engine.dispose()
        raise StartupError(f"The usage database {shown} cannot be opened: {_first_line(error)}") from error
    except (SQLAlchemyError, DBAPIError) as error:
        engine.dispose()
        raise StartupError(f"The usage database {shown} cannot be migrated: {_first_line(error)}") from error
    return Store(engine)


def _parse(database_url: str) -> URL:
    try:
        parse_database_url(database_url)
    except ValueError as error:
        raise StartupError(str(error)) from None
    try:
        url = make_url(database_url)
    except (ArgumentError, ValueError):
        raise StartupError("expected sqlite:///path or postgresql://user:password@host:port/database") from None
    return url if url.drivername == "sqlite" else url.set(drivername="postgresql+psycopg")


def _sqlite_engine(url: URL) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False})

    @sa.event.listens_for(engine, "connect")
    def _on_connect(connection: sqlite3.Connection, _record: object) -> None:
        # The driver must not begin transactions by itself: reads would become writers or lose their snapshot.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "temp_store=MEMORY"):
            connection.execute(f"PRAGMA {pragma}").close()

    @sa.event.listens_for(engine, "begin")
    def _on_begin(connection: sa.Connection) -> None:
        writes = connection.get_execution_options().get(_WRITE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql_engine(url: URL) -> sa.Engine:
    return sa.create_engine(
        url,
        pool_pre_ping=True,
        connect_args={"connect_timeout": CONNECT_TIMEOUT_S, "options": "-c timezone=UTC -c synchronous_commit=on"},
    )


def _migrate(engine: sa.Engine, url: URL) -> None:
    config = AlembicConfig()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with (
        _migration_lock(engine, url),
        engine.connect().execution_options(**{_WRITE: True}) as connection,
        connection.begin(),
    ):
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


@contextlib.contextmanager
def _migration_lock(engine: sa.Engine, url: URL) -> Iterator[None]:
    if url.get_backend_name() == "sqlite":
        path = Path(str(url.database)).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        return
    with engine.connect() as connection:
        connection.execute(sa.select(sa.func.pg_advisory_lock(MIGRATION_LOCK)))
        connection.commit()
        try:
            yield
        finally:
            connection.execute(sa.select(sa.func.pg_advisory_unlock(MIGRATION_LOCK)))
            connection.commit()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        raise StoreUnavailable("The usage database is not available.", retry_after_s=1.0) from error


def _first_line(error: Exception) -> str:
    cause: Any = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(cause).strip().splitlines()
    return (lines[0] if lines else type(cause).__name__).rstrip(".") + "."
