"""What tenants and keys have spent, as the ledger says it: sums by key, and what budgets start from.

Functions take a connection and block; the ledger and the rater move the sums in their transactions, the hot copy reads
them: however many rows there are, it reads a row a key and day.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from typing import Any

import sqlalchemy as sa

from services.common.admission_types import Spent
from services.usage.bulk import add_sums
from services.usage.events import LedgerEntry
from services.usage.rows import storable
from services.usage.schema import balances, cost_balances, key_balances

NANOS_PER_MICRO = 1_000

# Tenant, key and UTC day.
Spender = tuple[str, str, date]


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


def move_cost_balances(connection: sa.Connection, costs: Iterable[tuple[Spender, int]]) -> None:
    """Add micro-units of new ratings to what their payers spent."""
    sums: dict[Spender, int] = defaultdict(int)
    for spender, micros in costs:
        sums[spender] += micros
    rows = [(*spender, micros) for spender, micros in sorted(sums.items()) if micros]
    add_sums(connection, cost_balances, ("tenant", "key_id", "day"), ("micros",), rows)


def with_money(connection: sa.Connection, spent: Spent, tenant: str, key_id: str) -> Spent:
    """The same with what ratings say that a key (empty: the tenant) has cost in the month and on the day."""
    table = cost_balances
    month = spent.day.replace(day=1)
    next_month = (month + timedelta(days=31)).replace(day=1)
    of_day = sa.case((table.c.day == spent.day, table.c.micros), else_=0)
    query = sa.select(sa.func.sum(table.c.micros), sa.func.sum(of_day))
    query = query.where(table.c.tenant == tenant, table.c.day >= month, table.c.day < next_month)
    if key_id:
        query = query.where(table.c.key_id == key_id)
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
