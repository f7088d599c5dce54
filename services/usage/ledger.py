"""The exactly-once token ledger: one row per request id, balances moved with it, dead letters beside it.

A batch is one transaction. `ledger_head` is locked first, so writers of several usage services take turns, row ids
have no gaps and balances move only for rows that are really new. Functions take a connection and block; the consumer
and the gRPC service run them through `Store.write` and `Store.read`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import date, datetime

import sqlalchemy as sa
from millrace.usage.v1 import usage_event_pb2

from services.usage import schema
from services.usage.attempts import MAX_REPORT_BYTES
from services.usage.bulk import add_sums, insert_rows, known_values
from services.usage.events import LedgerEntry, Tokens
from services.usage.rows import ROW_COLUMNS, row_values, storable
from services.usage.selection import Selection
from services.usage.spending import move_key_balances
from services.usage.store import insert_into

SUM_PAGE = 1_000
# A letter is up to a mebibyte.
LETTER_PAGE = 50
# Reason of a dead letter.
CONFLICT = "another event of this request is in the ledger, and says something else"


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that can never become a row, with the place in the stream that it came from."""

    stream: str
    entry_id: str
    reason: str
    payload: bytes

    @property
    def place(self) -> tuple[str, str]:
        """Stream and entry: the key."""
        return self.stream, self.entry_id


@dataclasses.dataclass(frozen=True, slots=True)
class StoredRow:
    """One ledger row: its place, the producer's event as it was sent, and when it was inserted (UTC)."""

    row_id: int
    event: bytes
    insert_time: datetime


@dataclasses.dataclass(frozen=True, slots=True)
class Balance:
    """Sums of one tenant and UTC day."""

    tenant: str
    day: date
    request_count: int
    delivered: Tokens
    billed: Tokens


@dataclasses.dataclass(frozen=True, slots=True)
class RowFilter:
    """Which rows: of a selection, with ids in (after_row_id, last_row_id]; None for the newest."""

    chosen: Selection = dataclasses.field(default_factory=Selection)
    after_row_id: int = 0
    last_row_id: int | None = None


def insert_entries(connection: sa.Connection, entries: Sequence[LedgerEntry], now: datetime) -> list[LedgerEntry]:
    """Insert the entries that are new and move their balances. Returns the new ones, in their order.

    Duplicates, inside the batch or of earlier rows, change nothing: the first one stands.
    """
    if not entries:
        return []
    first_row_id = _lock_head(connection) + 1
    first_seen: dict[str, LedgerEntry] = {}
    for entry in entries:
        first_seen.setdefault(entry.request_id, entry)
    unique = list(first_seen.values())
    known = known_values(connection, schema.ledger.c.request_id, [entry.request_id for entry in unique])
    fresh = [entry for entry in unique if entry.request_id not in known]
    if not fresh:
        return []
    # Whoever inserts holds the head, so what is unknown here stays so until this transaction ends.
    rows = [row_values(entry, first_row_id + index, now) for index, entry in enumerate(fresh)]
    insert_rows(connection, schema.ledger, ROW_COLUMNS, rows)
    _move_balances(connection, fresh)
    move_key_balances(connection, fresh)
    connection.execute(sa.update(schema.ledger_head).values(last_row_id=first_row_id + len(fresh) - 1))
    return fresh


def conflicting(connection: sa.Connection, entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Those of the entries whose request has a row that was made of other counts or another end."""
    if not entries:
        return []
    table = schema.ledger
    query = sa.select(table.c.request_id, table.c.event)
    query = query.where(table.c.request_id.in_({entry.request_id for entry in entries}))
    stored = {row[0]: usage_event_pb2.UsageEvent.FromString(bytes(row[1])) for row in connection.execute(query)}
    return [entry for entry in entries if _says(stored[entry.request_id]) != _says(entry.event)]


def _says(event: usage_event_pb2.UsageEvent) -> tuple[object, ...]:
    # Not the bytes: a map may be written in any order.
    return event.terminal_state, event.delivered, event.billed, list(event.choice_token_counts)


def insert_dead_letters(connection: sa.Connection, letters: Sequence[DeadLetter], now: datetime) -> None:
    """Keep the letters; one that is kept already stays as it is. One too long ever to be read is cut."""
    if not letters:
        return
    statement = insert_into(connection, schema.dead_letters).on_conflict_do_nothing()
    rows = [
        {
            "stream": letter.stream,
            "entry_id": letter.entry_id,
            "reason": storable(letter.reason),
            "payload": letter.payload[: MAX_REPORT_BYTES + 1],
            "insert_time": now,
        }
        for letter in letters
    ]
    connection.execute(statement, rows)


def read_rows(connection: sa.Connection, wanted: RowFilter, limit: int) -> list[StoredRow]:
    """The next rows in the order of their row ids, at most `limit`."""
    table = schema.ledger
    query = _row_query().where(table.c.row_id > wanted.after_row_id, *wanted.chosen.conditions())
    if wanted.last_row_id is not None:
        query = query.where(table.c.row_id <= wanted.last_row_id)
    return [_stored(row) for row in connection.execute(query.order_by(table.c.row_id).limit(limit))]


def find_row(connection: sa.Connection, request_id: str, tenant: str) -> StoredRow | None:
    """The row of one request (of this tenant, unless empty), None until it is in the ledger."""
    table = schema.ledger
    query = _row_query().where(table.c.request_id == request_id)
    if tenant:
        query = query.where(table.c.tenant == tenant)
    row = connection.execute(query).one_or_none()
    return None if row is None else _stored(row)


def last_row_id(connection: sa.Connection) -> int:
    """The newest row id, 0 in an empty ledger."""
    return int(connection.execute(sa.select(schema.ledger_head.c.last_row_id)).scalar_one())


def read_balances(connection: sa.Connection) -> list[Balance]:
    """Every balance, by tenant and day."""
    table = schema.balances
    query = sa.select(
        table.c.tenant, table.c.day, table.c.request_count, *(table.c[name] for name in _token_columns())
    ).order_by(table.c.tenant, table.c.day)
    return [Balance(row[0], row[1], row[2], Tokens(*row[3:7]), Tokens(*row[7:11])) for row in connection.execute(query)]


def sum_rows(connection: sa.Connection) -> list[Balance]:
    """What `read_balances` must say, summed from the rows themselves (checks; reads the whole ledger)."""
    table = schema.ledger
    query = sa.select(table.c.tenant, table.c.end_time, *(table.c[name] for name in _token_columns()))
    sums: dict[tuple[str, date], Balance] = {}
    for row in connection.execute(query.execution_options(yield_per=SUM_PAGE)):
        tenant, day, delivered, billed = row[0], row[1].date(), Tokens(*row[2:6]), Tokens(*row[6:10])
        old = sums.get((tenant, day), Balance(tenant, day, 0, Tokens(), Tokens()))
        sums[tenant, day] = Balance(tenant, day, old.request_count + 1, old.delivered + delivered, old.billed + billed)
    return [sums[key] for key in sorted(sums)]


def read_dead_letters(connection: sa.Connection, after: tuple[str, str] = ("", "")) -> list[DeadLetter]:
    """A page of dead letters by stream and entry, those after the `place` of another; empty after the last."""
    table = schema.dead_letters
    query = sa.select(table.c.stream, table.c.entry_id, table.c.reason, table.c.payload)
    stream, entry_id = after
    later = (table.c.stream > stream) | ((table.c.stream == stream) & (table.c.entry_id > entry_id))
    query = query.where(later).order_by(table.c.stream, table.c.entry_id).limit(LETTER_PAGE)
    return [DeadLetter(*row) for row in connection.execute(query)]


def _row_query() -> sa.Select[tuple[int, bytes, datetime]]:
    table = schema.ledger
    return sa.select(table.c.row_id, table.c.event, table.c.insert_time)


def _stored(row: sa.Row[tuple[int, bytes, datetime]]) -> StoredRow:
    return StoredRow(row.row_id, bytes(row.event), row.insert_time)


def _lock_head(connection: sa.Connection) -> int:
    head = schema.ledger_head
    query = sa.select(head.c.last_row_id).where(head.c.id == 1).with_for_update()
    return int(connection.execute(query).scalar_one())


def _token_columns() -> list[str]:
    return [f"{part}_{name}" for part in ("delivered", "billed") for name in schema.TOKEN_COLUMNS]


def _move_balances(connection: sa.Connection, entries: Sequence[LedgerEntry]) -> None:
    moving: dict[tuple[str, date], list[tuple[int, ...]]] = {}
    for entry in entries:
        counts = (1, *entry.delivered.counts, *entry.billed.counts)
        moving.setdefault((entry.tenant, entry.day), []).append(counts)
    rows = [(*key, *map(sum, zip(*counts, strict=True))) for key, counts in sorted(moving.items())]
    add_sums(connection, schema.balances, ("tenant", "day"), ("request_count", *_token_columns()), rows)
