"""Letters that the ledger could not take, tried again: after an upgrade, or once a database takes what it refused.

A letter becomes a row by the same steps as an entry of the stream, each in a savepoint of its own, or stays as it is.
A second event that says something else than its row never becomes one. A page of letters is one transaction.
"""

from __future__ import annotations

import dataclasses
import functools
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.exc import DataError, IntegrityError

from services.usage import schema
from services.usage.attempts import insert_worker_rows, parse_report
from services.usage.events import PoisonEvent, parse_event
from services.usage.ledger import CONFLICT, DeadLetter, conflicting, insert_entries, read_dead_letters
from services.usage.store import Store


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """Letters that are in the ledger now, and those that stay."""

    taken_count: int
    left_count: int


async def replay_dead_letters(store: Store, now: datetime) -> Replayed:
    """Try every letter again; what was taken is a letter no more. Raises StoreUnavailable, with pages done by then."""
    taken = left = 0
    after = ("", "")
    while True:
        tried, fresh, after = await store.write(functools.partial(_replay_page, now=now, after=after))
        if not tried:
            return Replayed(taken, left)
        taken, left = taken + fresh, left + tried - fresh


def _replay_page(connection: sa.Connection, now: datetime, after: tuple[str, str]) -> tuple[int, int, tuple[str, str]]:
    """Letters tried, those taken, and the place of the last."""
    letters = read_dead_letters(connection, after)
    taken = 0
    for letter in letters:
        try:
            with connection.begin_nested():
                if _take(connection, letter, now):
                    _forget(connection, letter)
                    taken += 1
        except (PoisonEvent, DataError, IntegrityError):
            continue
    return len(letters), taken, letters[-1].place if letters else after


def _take(connection: sa.Connection, letter: DeadLetter, now: datetime) -> bool:
    if letter.reason == CONFLICT:
        return False
    try:
        entry = parse_event(letter.payload, published_ms=int(letter.entry_id.partition("-")[0]))
    except PoisonEvent:
        report = parse_report(letter.payload)
        insert_worker_rows(connection, [report], now)
        # An event without ids reads as a report of nothing.
        return bool(report.attempts or report.times)
    return bool(insert_entries(connection, [entry], now)) or not conflicting(connection, [entry])


def _forget(connection: sa.Connection, letter: DeadLetter) -> None:
    table = schema.dead_letters
    mine = (table.c.stream == letter.stream, table.c.entry_id == letter.entry_id)
    connection.execute(sa.delete(table).where(*mine))
