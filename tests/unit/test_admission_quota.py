"""The tenant's scripts on a real Redis: rates, concurrency, budget, expiry of reservations."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import redis.asyncio as aioredis

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Pool, QuotaLimits, Refusal, Reserve
from services.common.errors import InvalidRequest
from tests.helpers.admission import POOL, StoreTime, make_store, open_budget

RPM, TPM = "requests_per_minute", "tokens_per_minute"


@pytest.fixture
def time() -> StoreTime:
    return StoreTime()


@pytest.fixture
def store(redis_client: aioredis.Redis, time: StoreTime) -> AdmissionStore:
    return make_store(redis_client, time)


def ask(
    request_id: str, *, tokens: int = 10, budget: int = 10, tenant: str = "acme", limits: QuotaLimits | None = None
) -> Reserve:
    return Reserve(tenant, request_id, 0, tokens, budget, limits if limits is not None else QuotaLimits())


async def budget_of(client: aioredis.Redis) -> tuple[int, int]:
    reserved, spent = await client.hmget("mr:{acme}:budget", "reserved", "spent")
    return int(reserved or 0), int(spent or 0)


async def test_requests_a_minute_are_exact_at_the_edge(store: AdmissionStore, time: StoreTime) -> None:
    limits = QuotaLimits(requests_per_minute=2)
    assert await store.reserve(ask("r1", limits=limits)) is None
    time.advance(30_000)
    assert await store.reserve(ask("r2", limits=limits)) is None

    assert await store.reserve(ask("r3", limits=limits)) == Refusal(
        "REQUESTS_PER_MINUTE", 30_000, "requests_per_minute"
    )
    time.advance(29_999)
    assert await store.reserve(ask("r3", limits=limits)) == Refusal("REQUESTS_PER_MINUTE", 1, RPM)
    time.advance(1)
    assert await store.reserve(ask("r3", limits=limits)) is None
    assert await store.reserve(ask("r4", limits=limits)) == Refusal(
        "REQUESTS_PER_MINUTE", 30_000, "requests_per_minute"
    )


async def test_tokens_a_minute_are_rounded_against_the_tenant(store: AdmissionStore, time: StoreTime) -> None:
    limits = QuotaLimits(tokens_per_minute=100)
    time.advance(999)
    assert await store.reserve(ask("r1", tokens=60, limits=limits)) is None
    assert await store.reserve(ask("r2", tokens=40, limits=limits)) is None

    refused = await store.reserve(ask("r3", tokens=1, limits=limits))
    assert refused == Refusal("TOKENS_PER_MINUTE", 60_001, TPM)
    time.advance(60_000)
    assert await store.reserve(ask("r3", tokens=1, limits=limits)) == Refusal(
        "TOKENS_PER_MINUTE", 1, "tokens_per_minute"
    )
    time.advance(1)
    assert await store.reserve(ask("r3", tokens=100, limits=limits)) is None


async def test_settling_gives_unused_tokens_back_to_the_minute(store: AdmissionStore) -> None:
    limits = QuotaLimits(tokens_per_minute=100)
    await store.reserve(ask("r1", tokens=100, limits=limits))
    await store.settle("acme", "r1", 30, 30)
    await store.settle("acme", "r1", 30, 30)

    assert isinstance(await store.reserve(ask("r2", tokens=71, limits=limits)), Refusal)
    assert await store.reserve(ask("r2", tokens=70, limits=limits)) is None


async def test_concurrency_counts_running_requests_only(store: AdmissionStore) -> None:
    limits = QuotaLimits(concurrent_requests=1)
    assert await store.reserve(ask("r1", limits=limits)) is None
    assert await store.reserve(ask("r1", limits=limits)) is None
    assert await store.reserve(ask("r2", limits=limits)) == Refusal("CONCURRENT_REQUESTS", 1_000, "concurrent_requests")

    await store.settle("acme", "r1", 5, 5)

    assert await store.reserve(ask("r2", limits=limits)) is None


async def test_a_parallel_burst_never_passes_a_limit(store: AdmissionStore) -> None:
    limits = QuotaLimits(requests_per_minute=50)

    got = await asyncio.gather(*(store.reserve(ask(f"r{i}", limits=limits)) for i in range(200)))

    assert sum(refusal is None for refusal in got) == 50


async def test_budget_is_leased_piece_by_piece_up_to_its_last_token(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    limits = QuotaLimits(budget_tokens=100)
    await open_budget(store, time.day)
    assert await store.reserve(ask("r1", budget=74, limits=limits)) is None
    assert await store.reserve(ask("r2", budget=27, limits=limits)) == Refusal("BUDGET_EXHAUSTED", 0, "budget_tokens")

    assert await store.renew_budget(ask("r1", limits=limits), 20) == 20
    assert await store.renew_budget(ask("r1", limits=limits), 20) == 6
    assert await store.renew_budget(ask("r1", limits=limits), 20) == 0

    await store.settle("acme", "r1", 90, 90)
    assert await budget_of(redis_client) == (0, 90)
    assert isinstance(await store.reserve(ask("r2", budget=11, limits=limits)), Refusal)
    assert await store.reserve(ask("r2", budget=10, limits=limits)) is None


async def test_release_undoes_all_of_a_reservation(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    limits = QuotaLimits(requests_per_minute=1, tokens_per_minute=10, concurrent_requests=1, budget_tokens=10)
    await open_budget(store, time.day)
    before = await redis_client.hgetall("mr:{acme}:budget")
    assert await store.reserve(ask("r1", limits=limits)) is None

    await store.release("acme", "r1")
    await store.release("acme", "r1")

    assert await redis_client.keys("*") == [b"mr:{acme}:budget"]
    assert await redis_client.hgetall("mr:{acme}:budget") == before
    assert await store.reserve(ask("r2", limits=limits)) is None


async def test_expired_reservations_are_freed_by_the_next_one_and_renewed_ones_are_not(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    limits = QuotaLimits(concurrent_requests=2, budget_tokens=20)
    await open_budget(store, time.day)
    await store.reserve(ask("dead", limits=limits))
    await store.reserve(ask("alive", limits=limits))
    time.advance(29_000)
    await store.renew_reservations("acme", ["alive", "unknown"])
    time.advance(1_000)

    assert await store.reserve(ask("next", limits=limits)) is None

    assert await budget_of(redis_client) == (20, 0)
    assert isinstance(await store.reserve(ask("one more", limits=limits)), Refusal)
    await store.settle("acme", "dead", 10, 10)
    assert await budget_of(redis_client) == (20, 0)


async def test_a_stalled_stream_gets_its_reservation_back(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    await store.reserve(ask("r1", budget=10))
    time.advance(40_000)

    assert await store.renew_budget(ask("r1", limits=QuotaLimits(budget_tokens=100)), 5) == 5
    await store.settle("acme", "r1", 12, 12)

    assert await budget_of(redis_client) == (0, 12)


async def test_a_place_is_known_to_its_tenant_until_it_is_settled(store: AdmissionStore) -> None:
    pool = Pool("org/model-7b", "long", 2)
    await store.reserve(dataclasses.replace(ask("r1"), where=(pool, "gateway-1")))

    assert await store.get_where("acme", "r1") == (pool, "gateway-1")
    assert await store.get_where("other", "r1") is None
    await store.settle("acme", "r1", 0, 0)
    assert await store.get_where("acme", "r1") is None


@pytest.mark.parametrize("tenant", ["", "a}b", "{a"])
async def test_a_tenant_that_would_leave_its_slot_is_refused(store: AdmissionStore, tenant: str) -> None:
    with pytest.raises(InvalidRequest):
        await store.reserve(ask("r1", tenant=tenant))


async def test_idle_tenants_keep_nothing_but_what_they_spent(
    store: AdmissionStore, redis_client: aioredis.Redis
) -> None:
    await store.reserve(dataclasses.replace(ask("r1", limits=QuotaLimits()), where=(POOL, "gateway-1")))
    await store.settle("acme", "r1", 8, 8)

    lasting = [key for key in await redis_client.keys("*") if await redis_client.ttl(key) == -1]
    assert lasting == [b"mr:{acme}:budget"]
