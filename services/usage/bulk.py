"""Many rows at once, by the fastest way of each database: binary COPY on PostgreSQL, `executemany` on SQLite.

Speaks to the drivers underneath SQLAlchemy, whose per-row costs are most of an insert's; their errors leave as
SQLAlchemy's. Knows tables and columns, no meaning. Functions block; called inside a transaction of `Store`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

LOOKUP_VALUES = 1_000


def insert_rows(
    connection: sa.Connection, table: sa.Table, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Insert `rows`, whose values stand in the order of `columns`; JSON columns take text, times must be aware UTC.

    Raises IntegrityError when one is there already, DataError for a value that does not fit.
    """
    if not rows:
        return
    names = ", ".join(f'"{name}"' for name in columns)
    if connection.dialect.name == "postgresql":
        _copy(connection, table, columns, rows, f"COPY {table.name} ({names}) FROM STDIN (FORMAT BINARY)")
        return
    marks = ", ".join("?" * len(columns))
    statement = f"INSERT INTO {table.name} ({names}) VALUES ({marks})"  # noqa: S608 - names of our own schema
    connection.exec_driver_sql(statement, [tuple(map(_sqlite_value, row)) for row in rows])


def _copy(
    connection: sa.Connection, table: sa.Table, columns: Sequence[str], rows: Sequence[Sequence[object]], statement: str
) -> None:
    kinds = [_kind(connection, table, name) for name in columns]
    documents = [place for place, kind in enumerate(kinds) if kind == "jsonb"]
    with _raw_cursor(connection) as cursor, cursor.copy(statement) as copy:
        # A document goes as text behind the version of its binary form: the driver would parse what it is given.
        copy.set_types(["text" if kind == "jsonb" else kind for kind in kinds])
        for row in rows:
            values = list(row)
            for place in documents:
                values[place] = f"\x01{values[place]}"
            copy.write_row(values)


def _kind(connection: sa.Connection, table: sa.Table, name: str) -> str:
    return table.c[name].type.compile(connection.dialect).partition(" COLLATE")[0].lower()


def known_values(connection: sa.Connection, column: sa.Column[str], values: Sequence[str]) -> set[str]:
    """Those of `values` that `column` holds."""
    if connection.dialect.name == "postgresql":
        # One parameter, so that the statement is prepared once, however many values there are.
        query = sa.select(column).where(column == sa.any_(sa.bindparam("values", list(values), sa.ARRAY(sa.Text))))
        return set(connection.execute(query).scalars())
    known: set[str] = set()
    for start in range(0, len(values), LOOKUP_VALUES):
        some = values[start : start + LOOKUP_VALUES]
        known.update(connection.execute(sa.select(column).where(column.in_(some))).scalars())
    return known


def add_sums(
    connection: sa.Connection,
    table: sa.Table,
    keys: Sequence[str],
    sums: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> None:
    """Add each row's `sums` to the row of `table` with its `keys`, or make it; a row is the keys, then the sums."""
    if not rows:
        return
    names = (*keys, *sums)
    moved = ", ".join(f"{name} = {table.name}.{name} + excluded.{name}" for name in sums)
    tail = f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {moved}"
    _insert_or(connection, table, names, rows, tail)


def insert_missing(
    connection: sa.Connection, table: sa.Table, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """As `insert_rows`, but a row whose key is there already, or comes twice, changes nothing."""
    if not rows:
        return
    if connection.dialect.name != "postgresql":
        _insert_or(connection, table, columns, rows, "ON CONFLICT DO NOTHING")
        return
    # COPY knows no ON CONFLICT. The table in between is emptied by the move (a transaction may come here again) and by
    # each commit.
    names, waiting = ", ".join(columns), f"{table.name}_waiting"
    create = f"CREATE TEMPORARY TABLE IF NOT EXISTS {waiting} (LIKE {table.name}) ON COMMIT DELETE ROWS"
    connection.exec_driver_sql(create)
    _copy(connection, table, columns, rows, f"COPY {waiting} ({names}) FROM STDIN (FORMAT BINARY)")
    moved = f"WITH moved AS (DELETE FROM {waiting} RETURNING {names})"  # noqa: S608 - names of our own schema
    move = f"{moved} INSERT INTO {table.name} ({names}) SELECT * FROM moved ON CONFLICT DO NOTHING"  # noqa: S608
    connection.exec_driver_sql(move)


def _insert_or(
    connection: sa.Connection, table: sa.Table, names: Sequence[str], rows: Sequence[Sequence[object]], tail: str
) -> None:
    if connection.dialect.name == "postgresql":
        arrays = ", ".join(f"%s::{_kind(connection, table, name)}[]" for name in names)
        values = f"SELECT * FROM unnest({arrays})"  # noqa: S608 - names of our own schema
        parameters: Any = tuple(list(column) for column in zip(*rows, strict=True))
    else:
        values = f"VALUES ({', '.join('?' * len(names))})"
        parameters = [tuple(map(_sqlite_value, row)) for row in rows]
    connection.exec_driver_sql(f"INSERT INTO {table.name} ({', '.join(names)}) {values} {tail}", parameters)


def _sqlite_value(value: object) -> object:
    # As SQLAlchemy's types of SQLite write them.
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(" ", "microseconds")
    return value.isoformat() if isinstance(value, date) else value


@contextlib.contextmanager
def _raw_cursor(connection: sa.Connection) -> Iterator[psycopg.Cursor[Any]]:
    driver: Any = connection.connection.driver_connection
    try:
        with driver.cursor() as cursor:
            yield cursor
    except psycopg.Error as error:
        raise DBAPIError.instance("COPY", None, error, psycopg.Error, dialect=connection.dialect) from error
