"""Limits of tenants and keys together, over many gateways, at the edges of windows and periods, on a real Redis."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime

import pytest
import redis.asyncio as aioredis

from services.common.admission_store import AdmissionStore
from services.common.admission_types import QuotaLimits, Refusal, Reserve, Spent
from services.common.redis_client import connect
from tests.helpers.admission import StoreTime, make_store, open_budget
from tests.helpers.redis import RedisProcess

MINUTE_MS, DAY_MS = 60_000, 86_400_000


@pytest.fixture
def time() -> StoreTime:
    return StoreTime()


@pytest.fixture
def store(redis_client: aioredis.Redis, time: StoreTime) -> AdmissionStore:
    return make_store(redis_client, time)


@pytest.fixture
async def gateways(redis_server: RedisProcess, time: StoreTime) -> AsyncIterator[list[AdmissionStore]]:
    clients = [connect(redis_server.url) for _ in range(3)]
    yield [make_store(client, time) for client in clients]
    for client in clients:
        await client.aclose()


def ask(request_id: str, **fields: object) -> Reserve:
    asked = Reserve("acme", request_id, 10, 20, 14, QuotaLimits())
    return dataclasses.replace(asked, **fields)  # type: ignore[arg-type]


def at(year: int, month: int, day: int, *clock: int) -> int:
    return int(datetime(year, month, day, *clock, tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize("of_key", [False, True])
async def test_of_200_parallel_requests_over_three_gateways_50_pass_wherever_the_window_starts(
    gateways: list[AdmissionStore], time: StoreTime, redis_server: RedisProcess, of_key: bool
) -> None:
    limits = QuotaLimits(requests_per_minute=50)
    asked = {"key_id": "k", "key_limits": limits} if of_key else {"limits": limits}
    for placement in (0, 1, 500, 999, 29_999, 59_999, 60_000):
        redis_server.flush()
        time.ms = 1_700_000_000_000 + placement
        first = [gateways[i % 3].reserve(ask(f"a{i}", **asked)) for i in range(25)]
        assert await asyncio.gather(*first) == [None] * 25

        time.advance(placement)
        got = await asyncio.gather(*(gateways[i % 3].reserve(ask(f"b{i}", **asked)) for i in range(200)))

        still = 25 if placement < MINUTE_MS else 0
        assert sum(refusal is None for refusal in got) == 50 - still
        wait = MINUTE_MS - (placement if still else 0)
        refused = {refusal for refusal in got if refusal is not None}
        assert refused == {Refusal("REQUESTS_PER_MINUTE", wait, "requests_per_minute", of_key)}


@pytest.mark.parametrize(
    ("limit", "fits"), [("tokens_per_minute", 3), ("input_tokens_per_minute", 9), ("output_tokens_per_minute", 4)]
)
async def test_tokens_a_minute_are_counted_by_direction(store: AdmissionStore, limit: str, fits: int) -> None:
    limits = QuotaLimits(**{limit: 90})

    got = [await store.reserve(ask(f"r{i}", limits=limits)) for i in range(fits + 1)]

    assert got[:fits] == [None] * fits
    assert got[fits] == Refusal("TOKENS_PER_MINUTE", 61_000, limit)


async def test_what_was_not_used_goes_back_to_its_direction(store: AdmissionStore) -> None:
    limits = QuotaLimits(input_tokens_per_minute=10, output_tokens_per_minute=20)
    assert await store.reserve(ask("r1", limits=limits)) is None
    await store.settle("acme", "r1", 13, 13)

    assert await store.reserve(ask("r2", prompt_tokens=0, output_tokens=18, limits=limits)) is not None
    assert await store.reserve(ask("r2", prompt_tokens=0, output_tokens=17, limits=limits)) is None
    assert await store.reserve(ask("r3", prompt_tokens=1, output_tokens=0, limits=limits)) is not None


async def test_tenant_and_key_are_reserved_together_or_not_at_all(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    tenant = QuotaLimits(tokens_per_minute=1_000, concurrent_requests=10, budget_tokens=1_000)
    key = QuotaLimits(tokens_per_minute=30, concurrent_requests=10, budget_tokens=1_000)
    await open_budget(store, time.day, "acme", "k")
    assert await store.reserve(ask("r1", limits=tenant, key_id="k", key_limits=key)) is None
    before = {name: await redis_client.dump(name) for name in await redis_client.keys("*")}

    refusal = await store.reserve(ask("r2", limits=tenant, key_id="k", key_limits=key))

    assert refusal == Refusal("TOKENS_PER_MINUTE", 61_000, "tokens_per_minute", of_key=True)
    assert {name: await redis_client.dump(name) for name in await redis_client.keys("*")} == before
    other = ask("r3", limits=tenant, key_id="other", key_limits=dataclasses.replace(key, budget_tokens=None))
    assert await store.reserve(other) is None


async def test_a_keys_concurrency_is_freed_by_settling_and_by_expiry(store: AdmissionStore, time: StoreTime) -> None:
    asked = {"key_id": "k", "key_limits": QuotaLimits(concurrent_requests=2)}
    for request_id in ("r1", "r2"):
        assert await store.reserve(ask(request_id, **asked)) is None
    assert await store.reserve(ask("r3", **asked)) == Refusal("CONCURRENT_REQUESTS", 1_000, "concurrent_requests", True)
    assert await store.reserve(ask("other")) is None

    await store.settle("acme", "r1", 5, 5)
    assert await store.reserve(ask("r3", **asked)) is None
    time.advance(30_000)
    for request_id in ("r4", "r5"):
        assert await store.reserve(ask(request_id, **asked)) is None
    assert await store.reserve(ask("r6", **asked)) is not None


@pytest.mark.parametrize(
    ("limit", "last", "first"),
    [
        ("daily_budget_tokens", (2026, 2, 28, 23, 59, 59, 999_000), (2026, 3, 1)),
        ("daily_budget_tokens", (2028, 2, 28, 23, 59, 59, 999_000), (2028, 2, 29)),
        ("monthly_budget_tokens", (2026, 2, 28, 23, 59, 59, 999_000), (2026, 3, 1)),
        ("monthly_budget_tokens", (2028, 2, 29, 23, 59, 59, 999_000), (2028, 3, 1)),
        ("monthly_budget_tokens", (2026, 12, 31, 23, 59, 59, 999_000), (2027, 1, 1)),
    ],
)
async def test_a_budget_starts_anew_at_the_first_millisecond_of_its_period(
    store: AdmissionStore, time: StoreTime, limit: str, last: tuple[int, ...], first: tuple[int, ...]
) -> None:
    time.ms = at(*last)
    limits = QuotaLimits(**{limit: 100})
    await open_budget(store, time.day)
    assert await store.reserve(ask("r1", lease_tokens=100, limits=limits)) is None
    await store.settle("acme", "r1", 100, 100)
    assert await store.reserve(ask("r2", lease_tokens=1, limits=limits)) == Refusal("BUDGET_EXHAUSTED", 1, limit)

    time.advance(1)

    assert time.ms == at(*first)
    assert await store.reserve(ask("r2", lease_tokens=100, limits=limits)) is None


async def test_the_wait_for_a_budget_is_the_rest_of_its_period(store: AdmissionStore, time: StoreTime) -> None:
    time.ms = at(2026, 4, 30, 12)
    await open_budget(store, time.day)
    both = QuotaLimits(daily_budget_tokens=10, monthly_budget_tokens=10)

    by_day = await store.reserve(ask("r1", lease_tokens=11, limits=QuotaLimits(daily_budget_tokens=10)))
    time.advance(-10 * DAY_MS)
    by_month = await store.reserve(ask("r1", lease_tokens=11, limits=both))

    assert by_day == Refusal("BUDGET_EXHAUSTED", DAY_MS // 2, "daily_budget_tokens")
    assert by_month == Refusal("BUDGET_EXHAUSTED", 10 * DAY_MS + DAY_MS // 2, "monthly_budget_tokens")


async def test_what_is_held_over_midnight_counts_against_the_new_day_too(
    store: AdmissionStore, time: StoreTime
) -> None:
    time.ms = at(2026, 3, 1) - 1_000
    limits = QuotaLimits(daily_budget_tokens=100)
    await open_budget(store, time.day)
    assert await store.reserve(ask("r1", lease_tokens=80, limits=limits)) is None

    time.advance(2_000)

    assert await store.reserve(ask("r2", lease_tokens=21, limits=limits)) is not None
    assert await store.renew_budget(ask("r1", lease_tokens=80, limits=limits), 64) == 20
    await store.settle("acme", "r1", 100, 100)
    assert await store.reserve(ask("r2", lease_tokens=1, limits=limits)) is not None


async def test_money_is_held_leased_and_spent_at_the_price_of_each_direction(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    limits = QuotaLimits(daily_budget_nanos=1_000)
    await open_budget(store, time.day)
    asked = {"prompt_tokens": 10, "lease_tokens": 20, "prices": (10, 30), "limits": limits}
    assert await store.reserve(ask("r1", **asked)) is None
    assert await store.reserve(ask("r2", **asked | {"prompt_tokens": 61, "lease_tokens": 61})) == Refusal(
        "BUDGET_EXHAUSTED", DAY_MS - time.ms % DAY_MS, "daily_budget_nanos"
    )

    assert await store.renew_budget(ask("r1", **asked), 64) == 20
    assert await store.renew_budget(ask("r1", **asked), 64) == 0
    await store.settle("acme", "r1", 25, 25)

    nanos, spent = await redis_client.hmget("mr:{acme}:budget", "nanos", "day_nanos")
    assert (nanos, spent) == (None, b"550")


async def test_a_budget_of_which_nothing_is_known_admits_nothing(store: AdmissionStore, time: StoreTime) -> None:
    limits = QuotaLimits(monthly_budget_tokens=1_000)

    assert await store.reserve(ask("r1", limits=limits)) == Refusal("STORE_UNAVAILABLE", 1_000, "monthly_budget_tokens")
    assert await store.reserve(ask("r1", limits=QuotaLimits(requests_per_minute=5))) is None
    await store.raise_spent("acme", "", Spent(time.day, 900, 900, 0, 973, 0), Spent(time.day))

    assert await store.reserve(ask("r2", lease_tokens=14, limits=limits)) is not None
    assert await store.reserve(ask("r2", lease_tokens=13, limits=limits)) is None


async def test_the_ledger_raises_what_is_known_to_what_is_settled_and_never_lowers_it(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    async def spent() -> list[int]:
        values = await redis_client.hmget("mr:{acme}:budget", "spent", "day_tokens", "month_tokens")
        return [int(value or 0) for value in values]

    await open_budget(store, time.day)
    await store.reserve(ask("r1", lease_tokens=50))
    in_ledger = Spent(time.day, 50, 50, 0, 50, 0)
    await store.raise_spent("acme", "", in_ledger, Spent(time.day))
    await store.settle("acme", "r1", 50, 50)
    assert await spent() == [50, 50, 50], "a row that is in the ledger before its settling counts once"

    await store.raise_spent("acme", "", Spent(time.day, 20), Spent(time.day, 10, 10, 0, 10, 0))
    assert await spent() == [50, 50, 50]
    await store.raise_spent("acme", "", in_ledger, Spent(time.day, 70, 60, 0, 65, 0))
    assert await spent() == [70, 60, 65]
    await store.raise_spent("acme", "", in_ledger, Spent(date(2020, 1, 1), 80, 99, 0, 99, 0))
    assert await spent() == [80, 60, 65]


async def test_a_stream_whose_reservation_was_lost_holds_again_what_it_had_leased(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    limits = QuotaLimits(budget_tokens=100)
    await open_budget(store, time.day)
    held = ask("r1", lease_tokens=60, limits=limits)
    assert await store.reserve(held) is None
    time.advance(31_000)
    assert await store.reserve(ask("r2", lease_tokens=30, limits=limits)) is None

    assert await store.renew_budget(held, 64) == 10

    assert await redis_client.hget("mr:{acme}:budget", "reserved") == b"100"
