"""Many rows at once, by the fastest way of each database: COPY on PostgreSQL, `executemany` on SQLite.

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
        with _raw_cursor(connection) as cursor, cursor.copy(f"COPY {table.name} ({names}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        return
    marks = ", ".join("?" * len(columns))
    statement = f"INSERT INTO {table.name} ({names}) VALUES ({marks})"  # noqa: S608 - names of our own schema
    connection.exec_driver_sql(statement, [tuple(map(_sqlite_value, row)) for row in rows])


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
    if rows:
        _insert_or(connection, table, columns, rows, "ON CONFLICT DO NOTHING")


def _insert_or(
    connection: sa.Connection, table: sa.Table, names: Sequence[str], rows: Sequence[Sequence[object]], tail: str
) -> None:
    if connection.dialect.name == "postgresql":
        kinds = [table.c[name].type.compile(connection.dialect).partition(" COLLATE")[0] for name in names]
        arrays = ", ".join(f"%s::{kind}[]" for kind in kinds)
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
