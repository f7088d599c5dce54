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
from millrace.common.v1 import common_pb2

from services.usage import schema
from services.usage.events import MAX_EVENT_BYTES, TIME_FIELDS, LedgerEntry, Tokens, enum_label, time_of
from services.usage.store import insert_into

SUM_PAGE = 1_000
LOOKUP_IDS = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that can never become a row, with the place in the stream that it came from."""

    stream: str
    entry_id: str
    reason: str
    payload: bytes


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
    """Which rows: of a tenant (empty = every one), after a row id, ended in [start, end), up to a row id."""

    tenant: str = ""
    after_row_id: int = 0
    start: datetime | None = None
    end: datetime | None = None
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
    known = _known_ids(connection, [entry.request_id for entry in unique])
    unknown = [entry for entry in unique if entry.request_id not in known]
    inserted = _insert_rows(connection, unknown, first_row_id, now)
    fresh = [entry for entry in unknown if entry.request_id in inserted]
    _move_balances(connection, fresh)
    if unknown:
        newest = first_row_id + len(unknown) - 1
        connection.execute(sa.update(schema.ledger_head).values(last_row_id=newest))
    return fresh


def insert_dead_letters(connection: sa.Connection, letters: Sequence[DeadLetter], now: datetime) -> None:
    """Keep the letters; one that is kept already stays as it is. A payload is cut at the size limit of an event."""
    if not letters:
        return
    statement = insert_into(connection, schema.dead_letters).on_conflict_do_nothing()
    rows = [
        {
            "stream": letter.stream,
            "entry_id": letter.entry_id,
            "reason": _text(letter.reason),
            "payload": letter.payload[:MAX_EVENT_BYTES],
            "insert_time": now,
        }
        for letter in letters
    ]
    connection.execute(statement, rows)


def read_rows(connection: sa.Connection, wanted: RowFilter, limit: int) -> list[StoredRow]:
    """The next rows in the order of their row ids, at most `limit`."""
    table = schema.ledger
    query = _row_query().where(table.c.row_id > wanted.after_row_id)
    if wanted.tenant:
        query = query.where(table.c.tenant == wanted.tenant)
    if wanted.start is not None:
        query = query.where(table.c.end_time >= wanted.start)
    if wanted.end is not None:
        query = query.where(table.c.end_time < wanted.end)
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
        _add(sums, row[0], row[1].date(), Tokens(*row[2:6]), Tokens(*row[6:10]))
    return [sums[key] for key in sorted(sums)]


def read_dead_letters(connection: sa.Connection) -> list[DeadLetter]:
    """Every dead letter, oldest first."""
    table = schema.dead_letters
    query = sa.select(table.c.stream, table.c.entry_id, table.c.reason, table.c.payload)
    return [DeadLetter(*row) for row in connection.execute(query.order_by(table.c.insert_time, table.c.entry_id))]


def _row_query() -> sa.Select[tuple[int, bytes, datetime]]:
    table = schema.ledger
    return sa.select(table.c.row_id, table.c.event, table.c.insert_time)


def _stored(row: sa.Row[tuple[int, bytes, datetime]]) -> StoredRow:
    return StoredRow(row.row_id, bytes(row.event), row.insert_time)


def _lock_head(connection: sa.Connection) -> int:
    head = schema.ledger_head
    query = sa.select(head.c.last_row_id).where(head.c.id == 1).with_for_update()
    return int(connection.execute(query).scalar_one())


def _known_ids(connection: sa.Connection, request_ids: Sequence[str]) -> set[str]:
    if not request_ids:
        return set()
    column = schema.ledger.c.request_id
    known: set[str] = set()
    for start in range(0, len(request_ids), LOOKUP_IDS):
        some = request_ids[start : start + LOOKUP_IDS]
        known.update(connection.execute(sa.select(column).where(column.in_(some))).scalars())
    return known


def _insert_rows(
    connection: sa.Connection, entries: Sequence[LedgerEntry], first_row_id: int, now: datetime
) -> frozenset[str]:
    if not entries:
        return frozenset()
    rows = [_row_of(entry, first_row_id + index, now) for index, entry in enumerate(entries)]
    table = schema.ledger
    # One short statement for many rows: with RETURNING it would be one long one, which psycopg parses anew each time.
    connection.execute(insert_into(connection, table).on_conflict_do_nothing(index_elements=[table.c.request_id]), rows)
    written = table.c.row_id.between(first_row_id, first_row_id + len(rows) - 1)
    return frozenset(connection.execute(sa.select(table.c.request_id).where(written)).scalars())


def _row_of(entry: LedgerEntry, row_id: int, now: datetime) -> dict[str, object]:
    event = entry.event
    times: dict[str, object] = {name: time_of(event.times, name) for name in TIME_FIELDS}
    times["end_time"] = entry.end_time
    texts = {name: _text(getattr(event, name)) for name in _TEXT_COLUMNS}
    return {
        "row_id": row_id,
        **texts,
        "model": _text(event.model.model),
        "version": _text(event.model.version),
        "manifest_digest": event.model.manifest_digest,
        "pool_model": _text(event.pool.model),
        "pool": _text(event.pool.pool),
        "shard": event.pool.shard,
        "priority_class": enum_label(_PRIORITY, "PRIORITY_CLASS_", event.priority_class),
        "length_class": enum_label(_LENGTH, "LENGTH_CLASS_", event.length_class),
        "terminal_state": enum_label(_TERMINAL, "TERMINAL_STATE_", event.terminal_state),
        "finish_reason": enum_label(_FINISH, "FINISH_REASON_", event.finish_reason),
        **_token_values("delivered", entry.delivered),
        **_token_values("billed", entry.billed),
        "choice_token_counts": list(event.choice_token_counts),
        **times,
        "attempt": event.attempt,
        "epoch": event.epoch,
        "user_label": _text(event.user),
        "metadata": {_text(key): _text(value) for key, value in sorted(event.metadata.items())},
        "event": entry.raw,
        "insert_time": now,
    }


_TEXT_COLUMNS = (
    "request_id",
    "tenant",
    "project",
    "key_id",
    "error_reason",
    "worker_instance",
    "gateway_instance",
    "traceparent",
)


def _names(enum: type) -> dict[int, str]:
    return {number: name for name, number in enum.items()}  # type: ignore[attr-defined]


_PRIORITY = _names(common_pb2.PriorityClass)
_LENGTH = _names(common_pb2.LengthClass)
_TERMINAL = _names(common_pb2.TerminalState)
_FINISH = _names(common_pb2.FinishReason)


def _text(text: str) -> str:
    """PostgreSQL stores no NUL in text; the event keeps what was sent."""
    return text.replace("\x00", "�")


def _token_columns() -> list[str]:
    return [f"{part}_{name}" for part in ("delivered", "billed") for name in schema.TOKEN_COLUMNS]


def _token_values(part: str, tokens: Tokens) -> dict[str, int]:
    return {f"{part}_{name}": value for name, value in zip(schema.TOKEN_COLUMNS, tokens.counts, strict=True)}


def _add(sums: dict[tuple[str, date], Balance], tenant: str, day: date, delivered: Tokens, billed: Tokens) -> None:
    old = sums.get((tenant, day), Balance(tenant, day, 0, Tokens(), Tokens()))
    sums[tenant, day] = Balance(tenant, day, old.request_count + 1, old.delivered + delivered, old.billed + billed)


def _move_balances(connection: sa.Connection, entries: Sequence[LedgerEntry]) -> None:
    sums: dict[tuple[str, date], Balance] = {}
    for entry in entries:
        _add(sums, entry.tenant, entry.day, entry.delivered, entry.billed)
    if not sums:
        return
    table = schema.balances
    statement = insert_into(connection, table)
    moved = {name: table.c[name] + statement.excluded[name] for name in ("request_count", *_token_columns())}
    rows = [
        {
            "tenant": moving.tenant,
            "day": moving.day,
            "request_count": moving.request_count,
            **_token_values("delivered", moving.delivered),
            **_token_values("billed", moving.billed),
        }
        for moving in (sums[key] for key in sorted(sums))
    ]
    connection.execute(statement.on_conflict_do_update(index_elements=[table.c.tenant, table.c.day], set_=moved), rows)
