"""What tenants and keys have spent, as the ledger says it: sums by key, and what budgets start from.

Functions take a connection and block; the ledger moves the sums in its transaction, the hot copy reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from typing import Any

import sqlalchemy as sa

from services.common.admission_types import Spent
from services.usage.bulk import add_sums
from services.usage.events import LedgerEntry
from services.usage.rows import storable
from services.usage.schema import balances, key_balances


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


def _spent(connection: sa.Connection, query: sa.Select[Any], today: date) -> Spent:
    rows: list[tuple[date, int]] = [(row[0], int(row[1])) for row in connection.execute(query)]
    return Spent(
        day=today,
        total_tokens=sum(tokens for _, tokens in rows),
        day_tokens=sum(tokens for day, tokens in rows if day == today),
        month_tokens=sum(tokens for day, tokens in rows if (day.year, day.month) == (today.year, today.month)),
    )
