"""Ratings on both databases: once each, never edited, adjusted by rows of their own; prices over the wire."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import timedelta

import pytest
import sqlalchemy as sa

from services.common.clock import SystemClock
from services.common.errors import InvalidRequest
from services.usage import schema
from services.usage.prices import Amounts, Price
from services.usage.queries import Selection, query_usage
from services.usage.rating import RATE_ROWS, Rater
from services.usage.store import Store
from tests.helpers.fake_clock import FakeClock
from tests.helpers.usage import START, insert, make_entry, migrate
from tests.helpers.waiting import until


@pytest.fixture
def rater(store: Store) -> Rater:
    return Rater(store, SystemClock())


def price(kind: str, rate: int, **fields: object) -> Price:
    chosen = {"plan": "", "version": "", "priority_class": "", "currency": "USD"} | fields
    start = START - timedelta(days=1)
    return Price(0, model="echo", token_kind=kind, micros_per_million=rate, start=start, **chosen)  # type: ignore[arg-type]


def costs(store: Store, tenant: str = "") -> dict[str, Amounts]:
    (group,) = store.read_sync(lambda c: query_usage(c, Selection(tenant), ()))
    return dict(group.costs)


def rating_rows(store: Store) -> list[tuple[int, int, int]]:
    table = schema.ratings
    query = sa.select(table.c.row_id, table.c.number, table.c.prompt_micros).order_by(table.c.row_id, table.c.number)
    return [tuple(row) for row in store.read_sync(lambda c: c.execute(query).all())]


async def drain(rater: Rater) -> None:
    while await rater.rate_next():
        pass


async def test_each_row_is_rated_once_however_often_the_rater_runs(store: Store, rater: Rater) -> None:
    insert(store, [make_entry(f"r{n}", prompt=1_000_000, completion=0) for n in range(RATE_ROWS + 2)])
    await rater.set_prices([price("prompt", 5)])

    await drain(rater)
    await drain(Rater(store, SystemClock()))

    assert len(rating_rows(store)) == RATE_ROWS + 2
    assert costs(store) == {"USD": Amounts((RATE_ROWS + 2) * 5, 0, 0, 0)}


async def test_rows_that_are_told_of_are_rated_within_a_second(store: Store) -> None:
    clock = FakeClock()
    rater = Rater(store, clock)
    await rater.set_prices([price("prompt", 5)])
    running = asyncio.create_task(rater.run())
    await until(lambda: clock.sleeper_count == 1)

    insert(store, [make_entry("r1", prompt=1_000_000)])
    rater.tell()
    await clock.advance(1.0)
    await until(lambda: len(rating_rows(store)) == 1)

    running.cancel()


async def test_without_prices_nothing_is_rated_and_the_rows_wait(store: Store, rater: Rater) -> None:
    insert(store, [make_entry("r1", prompt=1_000_000)])
    await drain(rater)
    assert rating_rows(store) == []

    await rater.set_prices([price("prompt", 7)])
    await drain(rater)

    assert rating_rows(store) == [(1, 1, 7)]


async def test_rating_again_adds_the_difference_and_a_second_time_nothing(store: Store, rater: Rater) -> None:
    day = timedelta(days=1)
    insert(store, [make_entry(f"r{n}", prompt=1_000_000, completion=0, end_time=START + n * day) for n in range(3)])
    await rater.set_prices([price("prompt", 5)])
    await drain(rater)
    await rater.set_prices([price("prompt", 3)])

    changed = await rater.rate_again(START + day, START + 2 * day)
    nothing = await rater.rate_again(START + day, START + 2 * day)

    assert (changed, nothing) == (1, 0)
    assert rating_rows(store) == [(1, 1, 5), (2, 1, 5), (2, 2, -2), (3, 1, 5)]
    assert costs(store) == {"USD": Amounts(13, 0, 0, 0)}


def spent(store: Store) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """What is kept beside the ratings, and the same summed from them."""
    kept, ratings, ledger = schema.cost_balances.c, schema.ratings.c, schema.ledger.c
    micros = sum((ratings[name] for name in schema.MICRO_COLUMNS), sa.literal(0))

    def read(connection: sa.Connection) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
        query = sa.select(kept.tenant, kept.key_id, kept.day, kept.micros).order_by(kept.tenant, kept.key_id, kept.day)
        rows = sa.select(ledger.tenant, ledger.key_id, ledger.end_time, micros).join_from(
            schema.ledger, schema.ratings, ledger.row_id == ratings.row_id
        )
        sums: dict[tuple[object, ...], int] = defaultdict(int)
        for tenant, key_id, end_time, amount in connection.execute(rows):
            sums[tenant, key_id, end_time.date()] += amount
        return [tuple(row) for row in connection.execute(query)], sorted((*key, sums[key]) for key in sums)

    return store.read_sync(read)


async def test_what_keys_spent_is_the_sum_of_their_ratings_also_after_a_migration_with_rows(
    store: Store, rater: Rater
) -> None:
    ends = [START, START + timedelta(days=1)]
    insert(store, [make_entry(f"r{n}", f"t{n % 2}", prompt=1_000_000, end_time=ends[n % 3 > 0]) for n in range(9)])
    await rater.set_prices([price("prompt", 5)])
    await drain(rater)
    await rater.set_prices([price("prompt", 7), price("prompt", 1, currency="EUR")])
    await rater.rate_again(None, None)

    kept, summed = spent(store)
    assert kept == summed
    assert len(kept) == 4

    migrate(store, "0005")
    migrate(store, "head")
    assert spent(store) == (kept, summed)


async def test_a_plan_of_a_tenant_counts_from_its_start(store: Store, rater: Rater) -> None:
    store.write_sync(
        lambda c: c.execute(
            sa.insert(schema.tenants).values(tenant="acme", display_name="", create_time=START, policy={})
        )
    )
    hour = timedelta(hours=1)
    insert(store, [make_entry(f"r{n}", prompt=1_000_000, completion=0, end_time=START + n * hour) for n in range(3)])
    await rater.set_prices([price("prompt", 10), price("prompt", 1, plan="gold")])
    await rater.set_plan("acme", "gold", START + hour)
    await drain(rater)

    assert [micros for _, _, micros in rating_rows(store)] == [10, 1, 1]
    with pytest.raises(InvalidRequest):
        await rater.set_plan("acme", "silver", START + hour)
    with pytest.raises(InvalidRequest):
        await rater.set_plan("nobody", "gold", START)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kind": "image"}, "token_kind"),
        ({"rate": -1}, "micros_per_million"),
        ({"rate": 10**15 + 1}, "micros_per_million"),
        ({"currency": "usd"}, "currency"),
        ({"priority_class": "urgent"}, "priority_class"),
        ({"end": START - timedelta(days=1)}, "end_time"),
    ],
)
async def test_a_bad_price_is_refused_with_its_field_and_none_of_its_batch_is_set(
    store: Store, rater: Rater, fields: dict[str, object], param: str
) -> None:
    chosen = {"kind": "prompt", "rate": 5} | fields
    bad = price(chosen.pop("kind"), chosen.pop("rate"), **chosen)  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest) as caught:
        await rater.set_prices([price("prompt", 5), bad])

    assert caught.value.param == param
    assert await rater.list_prices() == []
