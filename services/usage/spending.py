"""What tenants and keys have spent, as the ledger says it: sums by key, and what budgets start from.

Functions take a connection and block; the ledger moves the sums in its transaction, the hot copy reads them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import sqlalchemy as sa

from services.common.admission_types import Spent
from services.usage.bulk import add_sums
from services.usage.events import LedgerEntry
from services.usage.rows import storable
from services.usage.schema import MICRO_COLUMNS, balances, key_balances, ledger, ratings

NANOS_PER_MICRO = 1_000


def move_key_balances(connection: sa.Connection, entries: Sequence[LedgerEntry]) -> None:
    """Add new ledger rows to the sums of their keys."""
    sums: dict[tuple[str, str, date], int] = defaultdict(int)
    for entry in entries:
        sums[entry.tenant, storable(entry.event.key_id), entry.day] += entry.billed.prompt + entry.billed.completion
    rows = [(*key, tokens) for key, tokens in sorted(sums.items())]
    add_sums(connection, key_balances, ("tenant", "key_id", "day"), ("billed_tokens",), rows)


def tenant_spent(connection: sa.Connection, tenant: str, today: date) -> Spent:
    """What the ledger has billed a tenant, as of a UTC day."""
    tokens = balances.c.billed_prompt_tokens + balances.c.billed_completion_tokens
    return _spent(connection, sa.select(balances.c.day, tokens).where(balances.c.tenant == tenant), today)


def key_spent(connection: sa.Connection, tenant: str, key_id: str, today: date) -> Spent:
    """What the ledger has billed a key, as of a UTC day."""
    table = key_balances
    query = sa.select(table.c.day, table.c.billed_tokens)
    return _spent(connection, query.where(table.c.tenant == tenant, table.c.key_id == key_id), today)


def with_money(connection: sa.Connection, spent: Spent, tenant: str, key_id: str) -> Spent:
    """The same with what ratings say that a key (empty: the tenant) has cost in the month and on the day."""
    micros = sum((ratings.c[name] for name in MICRO_COLUMNS), sa.literal(0))
    day = datetime.combine(spent.day, time(), UTC)
    month = day.replace(day=1)
    next_month = (month + timedelta(days=31)).replace(day=1)
    on_day = sa.and_(ledger.c.end_time >= day, ledger.c.end_time < day + timedelta(days=1))
    of_day = sa.case((on_day, micros), else_=0)
    query = sa.select(sa.func.sum(micros), sa.func.sum(of_day)).join_from(
        ledger, ratings, ledger.c.row_id == ratings.c.row_id
    )
    query = query.where(ledger.c.tenant == tenant, ledger.c.end_time >= month, ledger.c.end_time < next_month)
    if key_id:
        query = query.where(ledger.c.key_id == key_id)
    of_month, today = connection.execute(query).one()
    return dataclasses.replace(
        spent, day_nanos=int(today or 0) * NANOS_PER_MICRO, month_nanos=int(of_month or 0) * NANOS_PER_MICRO
    )


def _spent(connection: sa.Connection, query: sa.Select[Any], today: date) -> Spent:
    rows: list[tuple[date, int]] = [(row[0], int(row[1])) for row in connection.execute(query)]
    return Spent(
        day=today,
        total_tokens=sum(tokens for _, tokens in rows),
        day_tokens=sum(tokens for day, tokens in rows if day == today),
        month_tokens=sum(tokens for day, tokens in rows if (day.year, day.month) == (today.year, today.month)),
    )
