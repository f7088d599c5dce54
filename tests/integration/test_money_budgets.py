"""Money: what a token costs reaches the gateways, and a stream stops where its budget does."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import redis.asyncio as aioredis
import sqlalchemy as sa

from services.common.admission_types import QuotaLimits, Spent
from services.common.clock import SystemClock
from services.usage.accounts import KeySpec, TenantSpec
from services.usage.policies import Policy
from services.usage.prices import Price, token_nanos
from services.usage.rating import Rater
from services.usage.spending import key_spent, tenant_spent, with_money
from services.usage.store import Store
from tests.helpers.four_services import FourServices, running_services
from tests.helpers.redis import RedisProcess
from tests.helpers.transcripts import stream_completion
from tests.helpers.usage import START, insert, make_entry
from tests.helpers.waiting import until

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def price(kind: str, micros: int, **fields: object) -> Price:
    chosen = {
        "plan": "",
        "version": "",
        "priority_class": "",
        "start": NOW - timedelta(days=1),
    } | fields
    return Price(0, model="echo", token_kind=kind, currency="USD", micros_per_million=micros, **chosen)  # type: ignore[arg-type]


def test_what_a_token_costs_is_rounded_up_and_the_most_specific_price_counts() -> None:
    prices = [
        price("prompt", 1_001),
        price("completion", 5_000),
        price("completion", 2_000, priority_class="batch"),
        price("prompt", 9_000, version="2"),
        price("prompt", 100_000, plan="gold"),
        price("prompt", 7, start=NOW + timedelta(days=1)),
    ]

    any_version = {"echo": (2, 5), "echo batch": (2, 2)}
    assert token_nanos(prices, "", NOW) == any_version | {"echo@2": (9, 5), "echo@2 batch": (9, 2)}
    assert token_nanos(prices, "gold", NOW)["echo"] == (100, 5)
    assert token_nanos([], "", NOW) == {}


async def test_spent_money_is_what_the_ratings_of_the_day_and_month_say(store: Store) -> None:
    times = [START, START.replace(day=31, hour=23), START.replace(month=4), START - timedelta(days=1)]
    insert(store, [make_entry(f"r{n}", prompt=1_000_000, completion=0, end_time=time) for n, time in enumerate(times)])
    insert(store, [make_entry("other", "globex", prompt=1_000_000)])
    rater = Rater(store, SystemClock())
    await rater.set_prices([price("prompt", 3, start=START - timedelta(days=2))])
    while await rater.rate_next():
        pass

    def read(connection: sa.Connection) -> tuple[Spent, Spent, Spent]:
        day = START.date()
        return (
            with_money(connection, tenant_spent(connection, "acme", day), "acme", ""),
            with_money(connection, key_spent(connection, "acme", "k1", day), "acme", "k1"),
            with_money(connection, key_spent(connection, "acme", "k2", day), "acme", "k2"),
        )

    tenant, key, nothing = store.read_sync(read)

    assert (tenant.day_nanos, tenant.month_nanos) == (3_000, 6_000)
    assert tenant == key
    assert (nothing.day_nanos, nothing.month_nanos) == (0, 0)


async def spender(services: FourServices, limits: QuotaLimits) -> dict[str, str]:
    """Headers of a new tenant's key; a token of output costs 1,000 nanos, one of input 10."""
    usage = services.usage
    start = datetime.fromtimestamp(SystemClock().wall(), UTC) - timedelta(hours=1)
    prices = [price("prompt", 10_000, start=start), price("completion", 1_000_000, start=start)]
    await usage.rater.set_prices(prices)
    await usage.accounts.create_tenant(TenantSpec("payer", policy=Policy(limits)))
    _, secret = await usage.accounts.create_key(KeySpec("payer"))
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.parametrize("period", ["daily_budget_nanos", "monthly_budget_nanos"])
async def test_a_stream_stops_at_the_token_at_which_its_money_ends(
    redis_server: RedisProcess, redis_client: aioredis.Redis, tmp_path: Path, period: str
) -> None:
    # Three prompt tokens and a hundred others, and not enough for one more.
    limits = dataclasses.replace(QuotaLimits(), **{period: 3 * 10 + 100 * 1_000 + 999})
    body: dict[str, object] = {"model": "echo", "prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True}
    async with running_services(redis_server.url, tmp_path) as services:
        headers = await spender(services, limits)
        async with httpx.AsyncClient(base_url=services.client.base_url, headers=headers, timeout=30) as client:
            seen = await stream_completion(client, body)
            await services.gateway.back.parts.publisher.wait_published()
            refused = await client.post("/v1/completions", json=body)

        async def given_back() -> dict[bytes, bytes] | None:
            book = await redis_client.hgetall("mr:{payer}:budget")
            return None if b"reserved" in book or b"nanos" in book else book

        await until(given_back)
        book = await given_back()
        assert (len(seen.token_ids), seen.finish_reason, seen.done) == (100, "length", True)
        assert refused.status_code == httpx.codes.TOO_MANY_REQUESTS
        assert refused.json()["error"]["code"] == "BUDGET_EXHAUSTED"
        assert book is not None
        assert (int(book[b"day_nanos"]), int(book[b"month_nanos"])) == (100_030, 100_030)
