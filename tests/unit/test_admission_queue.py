"""The pool's scripts on a real Redis: admission, fair claims, leases, ownership, terminals."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Claimed, Ownership, PoolCaps, Queued, Refusal, RequestPhase
from tests.helpers.admission import CAPS, POOL, StoreTime, make_entry, make_store, make_terminal
from tests.helpers.redis import usage_events


@pytest.fixture
def time() -> StoreTime:
    return StoreTime()


@pytest.fixture
def store(redis_client: aioredis.Redis, time: StoreTime) -> AdmissionStore:
    return make_store(redis_client, time)


async def enqueue(store: AdmissionStore, *request_ids: str, tenant: str = "acme", batch: bool = False) -> None:
    for request_id in request_ids:
        got = await store.enqueue(POOL, make_entry(request_id, tenant, batch=batch), CAPS, remaining_ms=600_000)
        assert isinstance(got, Queued)


async def events(client: aioredis.Redis) -> list[usage_event_pb2.UsageEvent]:
    return await usage_events(client, POOL)


async def assert_queue_empty(client: aioredis.Redis) -> None:
    """Nothing is left of a queue but its counters of order, its tombstones and its usage."""
    left = {key.decode().removeprefix(f"mr:{{{POOL.tag}}}:") for key in await client.keys("*")}
    assert {key for key in left if not key.startswith(("req:", "vt:"))} <= {"q", "usage", "unsettled", "bell"}
    assert not {b"n", b"bytes", b"tok|interactive", b"tok|batch"} & set(await client.hkeys(f"mr:{{{POOL.tag}}}:q"))


def ids(claims: list[Claimed]) -> list[str]:
    return [claim.entry.request_id for claim in claims]


async def test_an_entry_comes_out_as_it_went_in(store: AdmissionStore, time: StoreTime) -> None:
    entry = make_entry("r1", prompt=3)

    queued = await store.enqueue(POOL, entry, CAPS, remaining_ms=5_000)
    time.advance(1_000)
    [claim] = await store.claim(POOL, "router-1", 32)

    assert queued == Queued("1-1", 0)
    assert claim.entry == entry
    assert (claim.claim_number, claim.remaining_ms, claim.waited_ms) == (1, 4_000, 1_000)


async def test_positions_count_what_is_ahead_of_the_class(store: AdmissionStore) -> None:
    await enqueue(store, "i1", "i2")

    batch = await store.enqueue(POOL, make_entry("b1", batch=True), CAPS)
    interactive = await store.enqueue(POOL, make_entry("i3"), CAPS)

    assert isinstance(batch, Queued)
    assert isinstance(interactive, Queued)
    assert (batch.position, interactive.position) == (2, 2)


async def test_enqueue_called_twice_admits_once(store: AdmissionStore) -> None:
    first = await store.enqueue(POOL, make_entry("r1"), CAPS)
    again = await store.enqueue(POOL, make_entry("r1"), CAPS)

    assert first == again
    assert ids(await store.claim(POOL, "router-1", 32)) == ["r1"]
    assert await store.count_queued(POOL) == 1


@pytest.mark.parametrize(
    ("caps", "reason"),
    [
        (PoolCaps(requests=2), "QUEUE_FULL"),
        (PoolCaps(tokens=59), "QUEUE_FULL"),
        (PoolCaps(bytes=250), "QUEUE_FULL"),
        (PoolCaps(tenant_requests=2), "QUEUE_SHARE"),
    ],
)
async def test_each_cap_refuses_and_stores_nothing(
    store: AdmissionStore, redis_client: aioredis.Redis, caps: PoolCaps, reason: str
) -> None:
    await enqueue(store, "r1", "r2")
    before = sorted(await redis_client.keys("*"))

    refusal = await store.enqueue(POOL, make_entry("r3"), caps)

    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason
    assert refusal.retry_after_ms >= 1_000
    assert sorted(await redis_client.keys("*")) == before


async def test_a_cap_at_its_value_admits(store: AdmissionStore) -> None:
    await enqueue(store, "r1", "r2")

    assert isinstance(await store.enqueue(POOL, make_entry("r3"), PoolCaps(requests=3, tokens=60)), Queued)


async def test_the_measured_drain_refuses_a_wait_that_is_too_long(store: AdmissionStore, time: StoreTime) -> None:
    await enqueue(store, *(f"r{i}" for i in range(20)))
    for _ in range(10):  # one request of 20 tokens a second
        time.advance(1_000)
        [claim] = await store.claim(POOL, "router-1", 1)
        await store.own(POOL, [Ownership(claim.entry.request_id, 256, "worker-1")])

    refusal = await store.enqueue(POOL, make_entry("late"), PoolCaps(predicted_wait_ms=5_000))
    admitted = await store.enqueue(POOL, make_entry("late"), PoolCaps(predicted_wait_ms=20_000))

    # 200 tokens (x 9/8, the class' share) at 20 tokens/s, or this tenant's own 220 tokens: 11 s.
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "QUEUE_FULL"
    assert 5_000 <= refusal.retry_after_ms <= 7_000
    assert isinstance(admitted, Queued)


async def test_another_tenants_flood_does_not_refuse_a_first_request(store: AdmissionStore, time: StoreTime) -> None:
    await enqueue(store, *(f"r{i}" for i in range(50)), tenant="flood")
    for _ in range(5):
        time.advance(1_000)
        [claim] = await store.claim(POOL, "router-1", 1)
        await store.own(POOL, [Ownership(claim.entry.request_id, 256, "worker-1")])

    got = await store.enqueue(POOL, make_entry("first", "quiet"), PoolCaps(predicted_wait_ms=5_000))

    assert isinstance(got, Queued)


async def test_tenants_share_claims_by_weight(store: AdmissionStore) -> None:
    for i in range(40):
        await store.enqueue(POOL, make_entry(f"a{i}", "heavy", weight=3.0), CAPS)
        await store.enqueue(POOL, make_entry(f"b{i}", "light", weight=1.0), CAPS)

    claims = await store.claim(POOL, "router-1", 32)

    shares = Counter(claim.entry.tenant for claim in claims)
    assert shares["heavy"] == 24
    assert shares["light"] == 8


async def test_a_newcomer_is_not_owed_the_time_it_was_away(store: AdmissionStore) -> None:
    await enqueue(store, *(f"a{i}" for i in range(40)), tenant="old")
    await store.claim(POOL, "router-1", 20)
    await enqueue(store, *(f"b{i}" for i in range(40)), tenant="new")

    shares = Counter(claim.entry.tenant for claim in await store.claim(POOL, "router-1", 20))

    assert abs(shares["old"] - shares["new"]) <= 2


async def test_classes_share_claims_eight_to_one(store: AdmissionStore) -> None:
    await enqueue(store, *(f"i{i}" for i in range(40)))
    await enqueue(store, *(f"b{i}" for i in range(40)), batch=True)

    claims = await store.claim(POOL, "router-1", 27)

    assert sum(claim.entry.request_id.startswith("b") for claim in claims) == 3


async def test_batch_work_that_aged_has_an_equal_share(store: AdmissionStore, time: StoreTime) -> None:
    await enqueue(store, *(f"b{i}" for i in range(40)), batch=True)
    time.advance(60_000)
    await enqueue(store, *(f"i{i}" for i in range(40)))

    claims = await store.claim(POOL, "router-1", 30)

    assert sum(claim.entry.request_id.startswith("b") for claim in claims) == 15


async def test_an_expired_claim_is_served_first_with_a_higher_number(store: AdmissionStore, time: StoreTime) -> None:
    await enqueue(store, "r1", "r2")
    [first] = await store.claim(POOL, "dead-router", 1)
    time.advance(9_999)
    assert ids(await store.claim(POOL, "router-1", 1)) == ["r2"]
    time.advance(1)

    [again] = await store.claim(POOL, "router-1", 32)

    assert again.entry == first.entry
    assert again.claim_number == 2


async def test_renewed_claims_stay_and_lost_ones_do_not_come_back(store: AdmissionStore, time: StoreTime) -> None:
    await enqueue(store, "r1")
    [claim] = await store.claim(POOL, "router-1", 1)
    time.advance(9_000)
    await store.renew_claims(POOL, [claim.claim_id])
    await store.renew_claims(POOL, [claim.claim_id])
    time.advance(9_000)
    assert await store.claim(POOL, "router-2", 1) == []
    time.advance(1_000)
    [taken] = await store.claim(POOL, "router-2", 1)

    await store.renew_claims(POOL, [claim.claim_id])
    await store.return_claims(POOL, [claim.claim_id])

    assert await store.claim(POOL, "router-3", 1) == []
    time.advance(10_000)
    [last] = await store.claim(POOL, "router-3", 1)
    assert (taken.claim_number, last.claim_number) == (2, 3)


async def test_returned_claims_are_claimable_at_once_and_ring(store: AdmissionStore) -> None:
    await enqueue(store, "r1")
    bells = await store.wait_bell([POOL], {}, 10)
    [claim] = await store.claim(POOL, "router-1", 1)

    await store.return_claims(POOL, [claim.claim_id])
    await store.return_claims(POOL, [claim.claim_id])

    assert (await store.wait_bell([POOL], bells, 10)) != bells
    assert ids(await store.claim(POOL, "router-2", 32)) == ["r1"]


async def test_own_records_and_empties_the_queue_once(store: AdmissionStore, redis_client: aioredis.Redis) -> None:
    await enqueue(store, "r1")
    await store.claim(POOL, "router-1", 1)

    await store.own(POOL, [Ownership("r1", 256, "worker-1")])
    await store.own(POOL, [Ownership("r1", 256, "worker-1"), Ownership("r1", 255, "worker-0"), Ownership("?", 1, "w")])

    [record, missing] = await store.read_requests(POOL, ["r1", "?"])
    assert record is not None
    assert missing is None
    assert (record.phase, record.epoch, record.worker_instance) == (RequestPhase.OWNED, 256, "worker-1")
    assert (record.gateway_instance, record.tenant, record.terminal_state) == ("gateway-1", "acme", None)
    assert await store.count_queued(POOL) == 0
    assert await store.list_live(POOL) == {"r1": "gateway-1"}
    await redis_client.delete(f"mr:{{{POOL.tag}}}:live")
    await assert_queue_empty(redis_client)


async def test_owning_a_request_that_was_never_claimed_takes_it_out(
    store: AdmissionStore, redis_client: aioredis.Redis
) -> None:
    await enqueue(store, "r1")

    await store.own(POOL, [Ownership("r1", 256, "worker-1")])

    assert await store.claim(POOL, "router-1", 1) == []


async def test_finish_is_won_once_and_answers_the_winners_counts(
    store: AdmissionStore, redis_client: aioredis.Redis
) -> None:
    await enqueue(store, "r1")
    await store.claim(POOL, "router-1", 1)
    await store.own(POOL, [Ownership("r1", 256, "worker-1")])

    [won] = await store.finish(POOL, [make_terminal("r1")])
    [lost] = await store.finish(POOL, [make_terminal("r1", state=common_pb2.TERMINAL_STATE_FAILED, computed=1)])

    assert (won.won, won.computed_tokens, won.billed_tokens, won.tenant) == (True, 15, 15, "acme")
    assert lost == type(lost)(False, common_pb2.TERMINAL_STATE_COMPLETED, "acme", 15, 15)
    assert len(await events(redis_client)) == 1
    [unsettled] = await store.list_unsettled(POOL, 0)
    assert (unsettled.request_id, unsettled.tenant, unsettled.billed_tokens) == ("r1", "acme", 15)
    await store.clear_unsettled(POOL, ["r1"])
    assert await store.list_unsettled(POOL, 0) == []
    await assert_queue_empty(redis_client)


@pytest.mark.parametrize("claimed", [False, True])
async def test_finishing_a_queued_or_claimed_request_takes_it_out(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime, claimed: bool
) -> None:
    await enqueue(store, "r1")
    if claimed:
        await store.claim(POOL, "router-1", 1)

    [result] = await store.finish(POOL, [make_terminal("r1", state=common_pb2.TERMINAL_STATE_CANCELLED, computed=0)])

    time.advance(20_000)
    assert result.won
    assert await store.claim(POOL, "router-1", 1) == []
    await assert_queue_empty(redis_client)


async def test_finish_of_an_unknown_request_leaves_tombstone_and_event(
    store: AdmissionStore, redis_client: aioredis.Redis
) -> None:
    [first] = await store.finish(POOL, [make_terminal("gone")])
    [second] = await store.finish(POOL, [make_terminal("gone")])

    assert (first.won, second.won) == (True, False)
    assert len(await events(redis_client)) == 1


async def test_a_superseded_worker_cannot_finish(store: AdmissionStore, redis_client: aioredis.Redis) -> None:
    await enqueue(store, "r1")
    await store.claim(POOL, "router-1", 1)
    await store.own(POOL, [Ownership("r1", 256, "worker-1")])
    await store.enqueue(POOL, make_entry("r1", attempt=2), CAPS, readmit=True)

    [stale] = await store.finish(POOL, [make_terminal("r1", epoch=256)])
    await store.own(POOL, [Ownership("r1", 257, "worker-1")])

    assert (stale.won, stale.state) == (False, common_pb2.TERMINAL_STATE_UNSPECIFIED)
    assert await events(redis_client) == []
    [claim] = await store.claim(POOL, "router-1", 1)
    assert claim.claim_number << 8 > 257
    [owner] = await store.finish(POOL, [make_terminal("r1", epoch=0)])
    assert owner.won


async def test_a_readmitted_request_goes_first_past_the_caps_and_only_once(store: AdmissionStore) -> None:
    await enqueue(store, "r1", "r2", "r3")
    await store.claim(POOL, "router-1", 1)
    await store.own(POOL, [Ownership("r1", 256, "worker-1")])
    full = PoolCaps(requests=0)

    again = make_entry("r1", attempt=2)
    first = await store.enqueue(POOL, again, full, readmit=True)
    repeat = await store.enqueue(POOL, again, full, readmit=True)

    assert first == repeat
    assert isinstance(first, Queued)
    assert first.position == 0
    claims = await store.claim(POOL, "router-1", 32)
    assert ids(claims) == ["r1", "r2", "r3"]
    assert claims[0].entry.attempt == 2


async def test_a_readmission_of_an_ended_request_is_superseded(store: AdmissionStore) -> None:
    await enqueue(store, "r1")
    await store.finish(POOL, [make_terminal("r1")])

    got = await store.enqueue(POOL, make_entry("r1", attempt=2), CAPS, readmit=True)

    assert got == Refusal("SUPERSEDED", 0)


async def test_epochs_of_a_later_attempt_are_higher_even_when_redis_forgot(
    store: AdmissionStore, redis_client: aioredis.Redis
) -> None:
    await redis_client.flushall()

    await store.enqueue(POOL, make_entry("r1", attempt=2), CAPS, readmit=True)
    [claim] = await store.claim(POOL, "router-1", 1)

    assert claim.claim_number > 60_000


async def test_expired_heads_end_as_expired_at_most_sixteen_a_call(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    for i in range(20):
        await store.enqueue(POOL, make_entry(f"r{i}"), CAPS, remaining_ms=1_000)
    await enqueue(store, "alive")
    time.advance(1_000)

    assert await store.claim(POOL, "router-1", 32) == []
    assert len(await events(redis_client)) == 16
    assert ids(await store.claim(POOL, "router-1", 32)) == ["alive"]

    found = await events(redis_client)
    assert len(found) == 20
    assert {e.terminal_state for e in found} == {common_pb2.TERMINAL_STATE_EXPIRED}
    assert {(e.billed.prompt_token_count, e.billed.completion_token_count) for e in found} == {(0, 0)}
    [late] = await store.finish(POOL, [make_terminal("r0", state=common_pb2.TERMINAL_STATE_EXPIRED)])
    assert (late.won, late.state, late.billed_tokens) == (False, common_pb2.TERMINAL_STATE_EXPIRED, 0)


async def test_an_expired_claim_past_its_deadline_ends_as_expired(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    await store.enqueue(POOL, make_entry("r1"), CAPS, remaining_ms=5_000)
    await store.claim(POOL, "router-1", 1)
    time.advance(10_000)

    assert await store.claim(POOL, "router-1", 1) == []

    assert [e.request_id for e in await events(redis_client)] == ["r1"]
    await store.clear_unsettled(POOL, ["r1"])
    await assert_queue_empty(redis_client)


async def test_an_expired_second_attempt_leaves_the_queue_but_not_its_gateway(
    store: AdmissionStore, redis_client: aioredis.Redis, time: StoreTime
) -> None:
    await store.enqueue(POOL, make_entry("r1", attempt=2), CAPS, readmit=True, remaining_ms=1_000)
    time.advance(2_000)

    assert await store.claim(POOL, "router-1", 1) == []

    assert await events(redis_client) == []
    assert await store.list_live(POOL) == {"r1": "gateway-1"}
    [won] = await store.finish(POOL, [make_terminal("r1", state=common_pb2.TERMINAL_STATE_EXPIRED)])
    assert won.won


async def test_finish_trues_up_the_tenants_virtual_time(store: AdmissionStore) -> None:
    await enqueue(store, *(f"a{i}" for i in range(40)), tenant="one")
    await enqueue(store, *(f"b{i}" for i in range(40)), tenant="two")
    claims = await store.claim(POOL, "router-1", 20)
    for claim in claims:
        r = claim.entry
        computed = 10 * 20 if r.tenant == "one" else 20
        await store.own(POOL, [Ownership(r.request_id, 256, "worker-1")])
        await store.finish(POOL, [make_terminal(r.request_id, r.tenant, computed=computed)])

    # The others' 2,000 tokens less its own 200, at the 110 that a request is expected to take by then.
    shares = Counter(claim.entry.tenant for claim in await store.claim(POOL, "router-1", 16))

    assert shares == {"two": 16}


async def test_the_bell_rings_when_an_empty_pool_gets_work(store: AdmissionStore) -> None:
    quiet = await store.wait_bell([POOL], {}, 10)
    await enqueue(store, "r1")
    rung = await store.wait_bell([POOL], quiet, 1_000)
    await enqueue(store, "r2")

    assert quiet == {}
    assert list(rung) == [POOL.tag]
    assert await store.wait_bell([POOL], rung, 10) == rung


async def test_a_claim_takes_no_more_than_thirty_two(store: AdmissionStore) -> None:
    await enqueue(store, *(f"r{i}" for i in range(40)))

    assert len(await store.claim(POOL, "router-1", 1_000)) == 32


async def own_all(store: AdmissionStore, worker: str, *request_ids: str) -> None:
    """Claim what waits and let `worker` run it."""
    claims = await store.claim(POOL, "router-1", 32)
    assert sorted(ids(claims)) == sorted(request_ids)
    await store.own(POOL, [Ownership(c.entry.request_id, c.claim_number << 8, worker) for c in claims])


async def lose(store: AdmissionStore, request_id: str, *workers: str) -> Queued | Refusal:
    entry = make_entry(request_id, attempt=len(workers) + 1)
    entry.lost_workers.extend(workers)
    return await store.enqueue(POOL, entry, CAPS, readmit=True, remaining_ms=600_000)


async def test_the_only_request_that_two_dead_workers_ran_is_poison_and_is_parked(
    store: AdmissionStore, redis_client: aioredis.Redis
) -> None:
    await enqueue(store, "r1", "r2")
    await own_all(store, "a", "r1", "r2")
    assert isinstance(await lose(store, "r1", "a"), Queued)
    await own_all(store, "b", "r1")
    assert isinstance(await lose(store, "r2", "a"), Queued)

    verdict = await lose(store, "r1", "a", "b")

    assert verdict == Refusal("POISONED", 0)
    terminal = make_terminal("r1", state=common_pb2.TERMINAL_STATE_FAILED)
    terminal.event.error_reason = "POISONED"
    await store.finish(POOL, [terminal])
    [(_, parked)] = await redis_client.xrange(f"mr:{{{POOL.tag}}}:parked")
    assert parked == {b"r": b"r1", b"w": b"a b", b"e": terminal.event.SerializeToString()}


@pytest.mark.parametrize("order", [("r1", "r2"), ("r2", "r1")])
async def test_of_several_that_two_dead_workers_ran_each_gets_a_third_try_and_none_a_fourth(
    store: AdmissionStore, order: tuple[str, str]
) -> None:
    await enqueue(store, "r1", "r2", "r3")
    await own_all(store, "a", "r1", "r2", "r3")
    for request_id in ("r1", "r2", "r3"):
        await lose(store, request_id, "a")
    await own_all(store, "b", "r1", "r2", "r3")
    await store.finish(POOL, [make_terminal("r3")])

    again = [await lose(store, request_id, "a", "b") for request_id in order]
    await own_all(store, "c", "r1", "r2")

    assert all(isinstance(answer, Queued) for answer in again)
    assert await lose(store, "r1", "a", "b", "c") == Refusal("POISONED", 0)


async def test_a_request_that_ended_well_under_the_second_worker_is_no_suspect(store: AdmissionStore) -> None:
    await enqueue(store, "r1", "r2")
    await own_all(store, "a", "r1", "r2")
    for request_id in ("r1", "r2"):
        await lose(store, request_id, "a")
    await own_all(store, "b", "r1", "r2")

    await store.finish(POOL, [make_terminal("r2")])

    assert await lose(store, "r1", "a", "b") == Refusal("POISONED", 0)


async def enqueue_capped(
    store: AdmissionStore, *request_ids: str, slots: int | None = None, tokens: int | None = None, choices: int = 1
) -> None:
    caps = dataclasses.replace(CAPS, worker_slots=slots, worker_tokens=tokens)
    for request_id in request_ids:
        entry = make_entry(request_id, "capped")
        entry.sampling.choice_count = choices
        await store.enqueue(POOL, entry, caps, remaining_ms=600_000)


@pytest.mark.parametrize("caps", [{"slots": 2}, {"tokens": 40}, {"slots": 4, "choices": 2}])
async def test_a_tenant_at_its_caps_waits_in_the_queue_and_lets_others_pass(
    store: AdmissionStore, redis_client: aioredis.Redis, caps: dict[str, int]
) -> None:
    names = [f"c{i}" for i in range(6)]
    await enqueue_capped(store, *names, **caps)
    await enqueue(store, "other-1", "other-2", tenant="other")

    first = await store.claim(POOL, "router-1", 32)
    again = await store.claim(POOL, "router-1", 32)
    twice = await store.claim(POOL, "router-1", 32, workers=2)
    await store.own(POOL, [Ownership("c0", 256, "worker-1")])
    await store.finish(POOL, [make_terminal("c0", "capped"), make_terminal("c1", "capped")])
    rest = await store.claim(POOL, "router-1", 32, workers=2)

    assert sorted(ids(first)) == ["c0", "c1", "other-1", "other-2"]
    assert again == []
    assert ids(twice) == ["c2", "c3"]
    assert ids(rest) == ["c4", "c5"]
    for request_id in (*names, "other-1", "other-2"):
        await store.finish(POOL, [make_terminal(request_id, "capped" if request_id in names else "other")])
    assert await redis_client.hgetall(f"mr:{{{POOL.tag}}}:tq") == {
        b"caps|capped": f"{caps.get('slots', '')}|{caps.get('tokens', '')}".encode()
    }


async def test_a_tenant_freed_of_its_caps_is_claimed_at_once(store: AdmissionStore) -> None:
    await enqueue_capped(store, "c0", "c1", "c2", slots=1)
    assert ids(await store.claim(POOL, "router-1", 32)) == ["c0"]

    await enqueue_capped(store, "c3")

    assert ids(await store.claim(POOL, "router-1", 32)) == ["c1", "c2", "c3"]


async def test_what_is_admitted_again_is_held_once(store: AdmissionStore) -> None:
    await enqueue_capped(store, "c0", "c1", slots=1)
    await own_all(store, "a", "c0")
    entry = make_entry("c0", "capped", attempt=2)
    await store.enqueue(POOL, entry, CAPS, readmit=True, remaining_ms=600_000)

    assert ids(await store.claim(POOL, "router-1", 32)) == ["c0"]
    assert await store.claim(POOL, "router-1", 32) == []
    await store.finish(POOL, [make_terminal("c0", "capped")])
    assert ids(await store.claim(POOL, "router-1", 32)) == ["c1"]


async def test_what_leaves_the_queue_for_another_version_is_held_by_no_worker(
    store: AdmissionStore, redis_client: aioredis.Redis
) -> None:
    await enqueue_capped(store, "c0", "c1", slots=1)
    claims = await store.claim(POOL, "router-1", 32)

    await store.close_claims(POOL, claims)
    await store.forget_closed(POOL, "c0")

    assert ids(claims) == ["c0"]
    assert await store.read_requests(POOL, ["c0"]) == [None]
    assert ids(await store.claim(POOL, "router-1", 32)) == ["c1"]
    await store.finish(POOL, [make_terminal("c1", "capped")])
    assert await redis_client.hgetall(f"mr:{{{POOL.tag}}}:tq") == {b"caps|capped": b"1|"}


async def test_a_tenant_that_comes_while_another_waits_at_its_caps_rings_the_bell(store: AdmissionStore) -> None:
    await enqueue_capped(store, "c0", "c1", slots=1)
    await store.claim(POOL, "router-1", 32)
    quiet = await store.wait_bell([POOL], {}, 10)

    await enqueue(store, "r1")

    assert await store.wait_bell([POOL], quiet, 1_000) != quiet


async def test_the_bell_rings_when_a_tenant_at_its_caps_gets_room(store: AdmissionStore) -> None:
    await enqueue_capped(store, "c0", "c1", slots=1)
    await store.claim(POOL, "router-1", 32)
    full = await store.wait_bell([POOL], {}, 10)

    await store.finish(POOL, [make_terminal("c0", "capped")])
    freed = await store.wait_bell([POOL], full, 1_000)
    await enqueue_capped(store, "c2", slots=3)
    raised = await store.wait_bell([POOL], freed, 1_000)

    assert len({str(bell) for bell in (full, freed, raised)}) == 3
