"""Rates the ledger: prices and plans in the database, and a loop that follows the ledger with ratings.

A rating is written once. Rating again adds a row with the difference, so that the cost of a row, a day or a tenant is
always a plain sum and history stays. `rating_head` is locked first: two services never rate the same rows twice.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import IntegrityError

from services.common.clock import Clock
from services.common.errors import InvalidRequest, StoreUnavailable
from services.usage import schema
from services.usage.bulk import insert_rows
from services.usage.events import Tokens
from services.usage.ledger import last_row_id
from services.usage.prices import ACCELERATOR_HOUR, TOKEN_KINDS, Amounts, Price, PriceList, Work
from services.usage.spending import Spender, move_cost_balances
from services.usage.store import Store

RATE_ROWS = 1_000
RATE_EVERY_S = 1.0
# Rows and prices that nobody told of are another usage service's, which looks for itself.
LOOK_EVERY_S = 10.0
MAX_MICROS_PER_MILLION = 10**15
CURRENCY = re.compile(r"[A-Z]{3}")
CLASSES = ("", "interactive", "batch")
RATING_COLUMNS = ("row_id", "number", "currency", *schema.MICRO_COLUMNS, "rate_time")


class Plans:
    """Which plan a tenant had when."""

    def __init__(self, rows: Sequence[tuple[str, datetime, str]]) -> None:
        self._by_tenant: dict[str, list[tuple[datetime, str]]] = defaultdict(list)
        for tenant, start, plan in rows:
            bisect.insort(self._by_tenant[tenant], (start, plan))

    def plan_of(self, tenant: str, moment: datetime) -> str:
        """The plan that started last at or before `moment`; empty before the first."""
        current = ""
        for start, plan in self._by_tenant.get(tenant, ()):
            if start > moment:
                break
            current = plan
        return current


class Rater:
    """Owns prices, plans and ratings."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._told = asyncio.Event()

    def tell(self) -> None:
        """There are new rows or prices."""
        self._told.set()

    async def run(self) -> None:
        """For ever: rate what is new in the ledger, at most each second."""
        while True:
            self._told.clear()
            try:
                while await self.rate_next() == RATE_ROWS:
                    pass
            except StoreUnavailable as error:
                structlog.get_logger().warning("rating_waits", error=error.message)
                self._told.set()
            await self._clock.sleep(RATE_EVERY_S)
            await self._clock.wait(self._told, LOOK_EVERY_S - RATE_EVERY_S)

    async def rate_next(self) -> int:
        """Rate the next rows that were never looked at, at most RATE_ROWS; returns their number."""
        return await self._store.write(functools.partial(_rate_next, now=self._now()))

    async def rate_again(self, start: datetime | None, end: datetime | None) -> int:
        """Rate the rows that ended in [start, end) by today's prices; returns how many now cost something else.

        Short transactions: rows that arrive meanwhile are the loop's.
        """
        changed = after = 0
        until = await self._store.read(last_row_id)
        while after < until:
            some = functools.partial(_rate_again, span=(after, until), start=start, end=end, now=self._now())
            last, count = await self._store.write(some)
            after, changed = (until if last is None else last), changed + count
        return changed

    async def set_prices(self, prices: Sequence[Price]) -> list[Price]:
        """Add prices; `price_id` is handed out here. Raises InvalidRequest."""
        for price in prices:
            _check(price)
        now = self._now()

        def work(connection: sa.Connection) -> list[Price]:
            added = []
            for price in prices:
                values = _price_values(price) | {"create_time": now}
                done = connection.execute(sa.insert(schema.prices).values(values).returning(schema.prices.c.price_id))
                added.append(dataclasses.replace(price, price_id=done.scalar_one()))
            return added

        set_now = await self._store.write(work)
        self.tell()
        return set_now

    async def list_prices(self) -> list[Price]:
        """Every price ever set, by model and start."""
        listed = await self._store.read(read_prices)
        return sorted(listed, key=lambda price: (price.model, price.start, price.price_id))

    async def set_plan(self, tenant: str, plan: str, start: datetime) -> None:
        """The tenant has `plan` from `start` on. Raises InvalidRequest for an unknown tenant or a taken start."""
        row = {"tenant": tenant, "plan": plan, "start_time": start, "create_time": self._now()}

        def work(connection: sa.Connection) -> None:
            known = sa.select(schema.tenants.c.tenant).where(schema.tenants.c.tenant == tenant)
            if connection.execute(known).first() is None:
                raise InvalidRequest(f"There is no tenant {tenant}.", param="tenant")
            connection.execute(sa.insert(schema.tenant_plans), row)

        try:
            await self._store.write(work)
        except IntegrityError:
            raise InvalidRequest(
                "The tenant has a plan that starts at this moment already.", param="start_time"
            ) from None

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.wall(), UTC)


def _rate_next(connection: sa.Connection, now: datetime) -> int:
    head = schema.rating_head
    after = connection.execute(sa.select(head.c.last_row_id).where(head.c.id == 1).with_for_update()).scalar_one()
    prices = PriceList(_token_prices(connection))
    if not prices:
        return 0
    rows = _read_work(connection, sa.and_(schema.ledger.c.row_id > after))
    if not rows:
        return 0
    ratings: list[tuple[object, ...]] = []
    spent: list[tuple[Spender, int]] = []
    for row_id, spender, work in rows:
        for number, (currency, amounts) in enumerate(prices.rate(work).items(), 1):
            ratings.append((row_id, number, currency, *amounts.parts, now))
            spent.append((spender, amounts.total))
    insert_rows(connection, schema.ratings, RATING_COLUMNS, ratings)
    move_cost_balances(connection, spent)
    connection.execute(sa.update(head).values(last_row_id=rows[-1][0]))
    return len(rows)


def _rate_again(
    connection: sa.Connection,
    span: tuple[int, int],
    start: datetime | None,
    end: datetime | None,
    now: datetime,
) -> tuple[int | None, int]:
    """The next RATE_ROWS rows of (after, until]: the last one's id, None once there are none, and the changes."""
    head = schema.rating_head
    rated = connection.execute(sa.select(head.c.last_row_id).where(head.c.id == 1).with_for_update()).scalar_one()
    table = schema.ledger
    chosen = [table.c.row_id > span[0], table.c.row_id <= min(span[1], rated)]
    chosen += [table.c.end_time >= start] if start is not None else []
    chosen += [table.c.end_time < end] if end is not None else []
    rows = _read_work(connection, sa.and_(*chosen))
    if not rows:
        return None, 0
    prices = PriceList(_token_prices(connection))
    have, numbers = _read_ratings(connection, rows[0][0], rows[-1][0])
    changes: list[tuple[object, ...]] = []
    spent: list[tuple[Spender, int]] = []
    changed = 0
    for row_id, spender, work in rows:
        differences = _differences(have.get(row_id, {}), prices.rate(work))
        changed += bool(differences)
        for number, (currency, amounts) in enumerate(differences, numbers.get(row_id, 0) + 1):
            changes.append((row_id, number, currency, *amounts.parts, now))
            spent.append((spender, amounts.total))
    insert_rows(connection, schema.ratings, RATING_COLUMNS, changes)
    move_cost_balances(connection, spent)
    return rows[-1][0], changed


def _differences(have: Mapping[str, Amounts], wanted: Mapping[str, Amounts]) -> list[tuple[str, Amounts]]:
    nothing = Amounts()
    currencies = dict.fromkeys((*have, *wanted))
    moved = [(name, wanted.get(name, nothing) - have.get(name, nothing)) for name in currencies]
    return [(name, amounts) for name, amounts in moved if amounts != nothing]


def _read_ratings(
    connection: sa.Connection, first: int, last: int
) -> tuple[dict[int, dict[str, Amounts]], dict[int, int]]:
    table = schema.ratings
    columns = (table.c.row_id, table.c.number, table.c.currency, *(table.c[name] for name in schema.MICRO_COLUMNS))
    sums: dict[int, dict[str, Amounts]] = defaultdict(dict)
    numbers: dict[int, int] = {}
    for row in connection.execute(sa.select(*columns).where(table.c.row_id.between(first, last))):
        sums[row[0]][row[2]] = sums[row[0]].get(row[2], Amounts()) + Amounts(*row[3:])
        numbers[row[0]] = max(numbers.get(row[0], 0), row[1])
    return sums, numbers


def _read_work(connection: sa.Connection, chosen: sa.ColumnElement[bool]) -> list[tuple[int, Spender, Work]]:
    """Row id, who pays for it and when, and what is priced."""
    by_tenant = read_plans(connection)
    table = schema.ledger
    billed = (table.c[f"billed_{name}"] for name in schema.TOKEN_COLUMNS)
    columns = (table.c.tenant, table.c.model, table.c.version, table.c.priority_class, table.c.end_time)
    query = (
        sa.select(table.c.row_id, table.c.key_id, *columns, *billed)
        .where(chosen)
        .order_by(table.c.row_id)
        .limit(RATE_ROWS)
    )
    return [
        (
            row_id,
            (tenant, key_id, end_time.date()),
            Work(by_tenant.plan_of(tenant, end_time), model, version, priority_class, end_time, Tokens(*billed_tokens)),
        )
        for row_id, key_id, tenant, model, version, priority_class, end_time, *billed_tokens in connection.execute(
            query
        )
    ]


def _token_prices(connection: sa.Connection) -> list[Price]:
    return [price for price in read_prices(connection) if price.token_kind in TOKEN_KINDS]


def read_plans(connection: sa.Connection) -> Plans:
    """Every tenant's plans."""
    plans = schema.tenant_plans
    rows: Any = connection.execute(sa.select(plans.c.tenant, plans.c.start_time, plans.c.plan)).all()
    return Plans(rows)


def read_prices(connection: sa.Connection) -> list[Price]:
    """Every price ever set."""
    table = schema.prices
    names = ("price_id", *_PRICE_COLUMNS)
    return [Price(*row) for row in connection.execute(sa.select(*(table.c[name] for name in names)))]


_PRICE_COLUMNS = (
    "plan", "model", "version", "priority_class", "token_kind", "currency", "micros_per_million", "start_time",
    "end_time",
)  # fmt: skip


def _price_values(price: Price) -> dict[str, object]:
    return dict(zip(_PRICE_COLUMNS, dataclasses.astuple(price)[1:], strict=True))


def _check(price: Price) -> None:
    if not price.model:
        raise InvalidRequest("A price needs a model.", param="model")
    if price.token_kind not in (*TOKEN_KINDS, ACCELERATOR_HOUR):
        known = ", ".join((*TOKEN_KINDS, ACCELERATOR_HOUR))
        raise InvalidRequest(f"token_kind is one of {known}.", param="token_kind")
    if price.token_kind == ACCELERATOR_HOUR and (price.plan or price.priority_class):
        raise InvalidRequest("An accelerator-hour costs the same for every plan and class.", param="plan")
    if price.priority_class not in CLASSES:
        raise InvalidRequest("priority_class is interactive, batch or empty for both.", param="priority_class")
    if CURRENCY.fullmatch(price.currency) is None:
        raise InvalidRequest("A currency is three capital letters, for example USD.", param="currency")
    if not 0 <= price.micros_per_million <= MAX_MICROS_PER_MILLION:
        raise InvalidRequest(
            f"A price is between 0 and {MAX_MICROS_PER_MILLION} micro-units.", param="micros_per_million"
        )
    if price.end is not None and price.end <= price.start:
        raise InvalidRequest("The end of a price lies after its start.", param="end_time")
