"""Databases of the ledger's benchmarks: thrown away at the end, or kept in a folder and found there by the next run.

Durable as in production: fsync on. Names are those of files (SQLite) or of databases of one server (PostgreSQL).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg

from tests.helpers.postgres import PostgresProcess

SETTINGS = {"fsync": "on", "shared_buffers": "256MB", "max_wal_size": "4GB"}


@contextlib.contextmanager
def databases(kind: str, keep: Path | None = None) -> Iterator[Callable[[str], str]]:
    """Gives the URL of the database of a name, which is empty unless `keep` holds it already."""
    if kind == "sqlite":
        with contextlib.nullcontext(keep) if keep is not None else tempfile.TemporaryDirectory() as folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            yield lambda name: f"sqlite:///{folder}/{name}.sqlite3"
        return
    server = PostgresProcess(SETTINGS, folder=None if keep is None else keep / "postgresql").start()
    try:
        yield server.database
        if keep is not None:
            with psycopg.connect(server.admin_url, autocommit=True) as connection:
                # Nothing is left to be done again at the next start.
                connection.execute("CHECKPOINT")
    finally:
        (server.stop if keep is None else server.kill)()


def settle(url: str) -> None:
    """What the load left for later is done before anything is measured."""
    if url.startswith("postgresql"):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")
