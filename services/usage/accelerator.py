"""What requests took of the accelerators and what that costs, and how workers' time was spent.

Costs are made when asked for, from the price of an accelerator-hour at the end of each attempt or span; integers
throughout. Functions block; run through `Store.read`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from services.usage import schema
from services.usage.prices import ACCELERATOR_HOUR, Price
from services.usage.rating import read_prices
from services.usage.selection import Selection

HOUR_NANOS = 3_600 * 10**9
COUNTS = (
    "prefill_nanos", "decode_nanos", "prefill_tokens", "decode_tokens", "accepted_draft_tokens",
    "rejected_draft_tokens", "block_milliseconds",
)  # fmt: skip


@dataclasses.dataclass(slots=True)
class Use:
    """Sums of attempts by the names of COUNTS, and micro-units by currency."""

    sums: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    costs: dict[str, int] = dataclasses.field(default_factory=lambda: defaultdict(int))


@dataclasses.dataclass(slots=True)
class WorkerUse:
    """Time of one version's workers; costs are (busy, idle) micro-units by currency."""

    worker_count: int
    busy_nanos: int = 0
    idle_nanos: int = 0
    costs: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


def query_use(
    connection: sa.Connection, chosen: Selection, keys: Sequence[sa.Label[Any]]
) -> Mapping[tuple[str, ...], Use]:
    """What all attempts of the chosen requests took, by the same keys as their rows."""
    attempts, ledger = schema.attempts, schema.ledger
    rate = _hour_rate(connection, attempts)
    query = (
        sa.select(*keys, *rate, *(sa.func.sum(attempts.c[name]) for name in COUNTS))
        .join_from(attempts, ledger, attempts.c.request_id == ledger.c.request_id)
        .where(*chosen.conditions())
        .group_by(*(sa.text(key.name) for key in (*keys, *rate)))
    )
    found: dict[tuple[str, ...], Use] = defaultdict(Use)
    width = len(keys)
    for row in map(tuple, connection.execute(query)):
        use, (currency, micros) = found[row[:width]], row[width : width + 2]
        for name, value in zip(COUNTS, row[width + 2 :], strict=True):
            use.sums[name] += int(value)
        if currency:
            use.costs[currency] += cost_of(int(row[width + 2]) + int(row[width + 3]), micros)
    return found


def query_worker_time(
    connection: sa.Connection, model: str, version: str, start: datetime | None, end: datetime | None
) -> Mapping[tuple[str, str], WorkerUse]:
    """Spans that ended in [start, end), by model and version; empty names mean any."""
    table = schema.worker_times
    chosen = [table.c.model == model] if model else []
    chosen += [table.c.version == version] if version else []
    chosen += [table.c.end_time >= start] if start is not None else []
    chosen += [table.c.end_time < end] if end is not None else []
    groups = (table.c.model, table.c.version)
    workers = sa.select(*groups, sa.func.count(table.c.worker_instance.distinct())).where(*chosen).group_by(*groups)
    found = {(name, number): WorkerUse(count) for name, number, count in connection.execute(workers)}
    rate = _hour_rate(connection, table)
    query = (
        sa.select(*groups, *rate, sa.func.sum(table.c.busy_nanos), sa.func.sum(table.c.idle_nanos))
        .where(*chosen)
        .group_by(*groups, *(sa.text(key.name) for key in rate))
    )
    for name, number, currency, micros, busy, idle in connection.execute(query):
        use = found[name, number]
        use.busy_nanos += int(busy)
        use.idle_nanos += int(idle)
        if currency:
            before = use.costs.get(currency, (0, 0))
            use.costs[currency] = (before[0] + cost_of(int(busy), micros), before[1] + cost_of(int(idle), micros))
    return dict(sorted(found.items()))


def cost_of(nanos: int, micros_per_hour: int) -> int:
    """Micro-units of that much time, to the nearest (halves up)."""
    return share_of(nanos * micros_per_hour, HOUR_NANOS)


def share_of(amount: int, parts: int) -> int:
    """`amount / parts` to the nearest whole number, halves up."""
    return (2 * amount + parts) // (2 * parts)


def _hour_rate(connection: sa.Connection, table: sa.Table) -> tuple[sa.Label[Any], sa.Label[Any]]:
    """Currency and micro-units an hour of a row: of its version before any version, the latest start first."""
    prices = [price for price in read_prices(connection) if price.token_kind == ACCELERATOR_HOUR]
    prices.sort(key=lambda price: (price.version != "", price.start, price.price_id), reverse=True)
    if not prices:
        return sa.literal_column("''").label("rate_currency"), sa.literal_column("0").label("rate_micros")
    conditions = [_holds(price, table) for price in prices]
    currency = sa.case(*((holds, price.currency) for holds, price in zip(conditions, prices, strict=True)), else_="")
    micros = sa.case(
        *((holds, price.micros_per_million) for holds, price in zip(conditions, prices, strict=True)), else_=0
    )
    return currency.label("rate_currency"), micros.label("rate_micros")


def _holds(price: Price, table: sa.Table) -> sa.ColumnElement[bool]:
    chosen = [table.c.model == price.model, table.c.end_time >= price.start]
    chosen += [table.c.version == price.version] if price.version else []
    chosen += [table.c.end_time < price.end] if price.end is not None else []
    return sa.and_(*chosen)
