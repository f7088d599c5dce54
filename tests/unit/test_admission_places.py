"""Callers that are refused come back one after the other: the virtual queue of the real scripts, on a drain by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
import redis.asyncio as aioredis

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Ownership, PoolCaps, Queued, Refusal
from tests.helpers.admission import POOL, StoreTime, make_entry, make_store

CAPS = PoolCaps(requests=20)
SEED = 7


@pytest.fixture
def time() -> StoreTime:
    return StoreTime()


@pytest.fixture
def store(redis_client: aioredis.Redis, time: StoreTime) -> AdmissionStore:
    return make_store(redis_client, time)


async def drain(store: AdmissionStore, count: int = 1) -> list[str]:
    """What a router and its workers take."""
    claims = await store.claim(POOL, "router-1", count)
    await store.own(POOL, [Ownership(claim.entry.request_id, 1 << 20, "worker-1") for claim in claims])
    return [claim.entry.request_id for claim in claims]


async def ask(store: AdmissionStore, name: str, *, prompt: int, tenant: str = "acme") -> Queued | Refusal:
    entry = make_entry(name, tenant, prompt=10)
    entry.token_ids[0] = prompt
    return await store.enqueue(POOL, entry, CAPS, remaining_ms=600_000)


async def fill(store: AdmissionStore, time: StoreTime) -> None:
    """A full queue that drains one request a second."""
    for number in range(30):
        await ask(store, f"first-{number}", prompt=number)
        if number >= 10:
            time.advance(1_000)
            await drain(store)
    for number in range(10):
        await ask(store, f"more-{number}", prompt=number)


def wait_ms(answer: Queued | Refusal) -> int:
    assert isinstance(answer, Refusal)
    return answer.retry_after_ms


@dataclasses.dataclass
class Crowd:
    """Clients that ask again as soon as they are served and obey Retry-After, as whole seconds. As many as fit begin,
    the rest rushes in after `counted_ms`; `callers` and `second_refusals` count those refused once and those of them
    refused again, of requests begun from then on."""

    store: AdmissionStore
    time: StoreTime
    clients: int
    tenants: int
    fitting: int = 30
    counted_ms: int = 10_000
    callers: int = 0
    second_refusals: int = 0
    served: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(SEED)
        self._start = self.time.ms
        # Client → when it asks next; its refusals so far; when it began.
        self._next = {c: self.time.ms + self.counted_ms * (c >= self.fitting) for c in range(self.clients)}
        self._refused = dict.fromkeys(range(self.clients), 0)
        self._began = dict(self._next)
        self._asks = 0

    async def run(self, for_ms: int, *, service_ms: int = 1_000, together: int = 1) -> None:
        """One request leaves the queue every 100 ms; or as many `together` as would have left since the last."""
        while self.time.ms < self._start + for_ms:
            for client in [c for c, at in self._next.items() if at <= self.time.ms]:
                await self._ask(client)
            self.time.advance(100)
            if (self.time.ms - self._start) % (100 * together):
                continue
            for name in await drain(self.store, together):
                client = int(name.split("-")[0])
                self.served += 1
                self._began[client] = self._next[client] = self.time.ms + service_ms
                self._refused[client] = 0

    async def _ask(self, client: int) -> None:
        self._asks += 1
        tenant = f"tenant-{client % self.tenants}"
        answer = await ask(self.store, f"{client}-{self._asks}", prompt=client, tenant=tenant)
        if isinstance(answer, Queued):
            del self._next[client]
            return
        self._refused[client] += 1
        if self._began[client] >= self._start + self.counted_ms:
            self.callers += self._refused[client] == 1
            self.second_refusals += self._refused[client] == 2
        wait = math.ceil(answer.retry_after_ms / 1000) * 1000 + self._random.randrange(200)
        self._next[client] = self.time.ms + wait


# Slots that were filled together end together.
@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("tenants", [1, 3])
async def test_of_callers_that_obey_under_one_in_twenty_is_refused_again_at_five_times_the_load(
    store: AdmissionStore, time: StoreTime, tenants: int, together: int
) -> None:
    # 20 in the queue and 10 in service: 30 clients are the load that fits.
    crowd = Crowd(store, time, clients=150, tenants=tenants)

    await crowd.run(60_000, together=together)

    print(f"refused once {crowd.callers}, twice {crowd.second_refusals}, served {crowd.served}")
    assert crowd.callers > 100
    assert crowd.second_refusals < 0.05 * crowd.callers
    assert crowd.served >= 590


async def test_each_refused_caller_is_sent_to_a_place_behind_the_one_before(
    store: AdmissionStore, time: StoreTime
) -> None:
    await fill(store, time)

    waits = [wait_ms(await ask(store, f"late-{number}", prompt=100 + number)) for number in range(5)]

    # One request of 20 tokens a second, and a quarter more.
    gaps = [after - before for before, after in itertools.pairwise(waits)]
    assert all(1_150 <= gap <= 1_350 for gap in gaps)


async def test_another_tenants_refused_callers_lengthen_no_ones_wait(store: AdmissionStore, time: StoreTime) -> None:
    await fill(store, time)
    for number in range(20):
        await ask(store, f"late-{number}", prompt=100 + number)

    # Two tenants share the drain.
    assert wait_ms(await ask(store, "quiet", prompt=1, tenant="quiet")) <= 2_700


async def test_room_is_held_for_who_comes_back_in_time_and_for_nobody_after(
    store: AdmissionStore, time: StoreTime
) -> None:
    await fill(store, time)
    wait = wait_ms(await ask(store, "late", prompt=100))
    time.advance(wait)
    await drain(store)

    newcomer = await ask(store, "newcomer", prompt=200)
    back = await ask(store, "late-again", prompt=100)
    await drain(store)
    time.advance(10_000)
    after = await ask(store, "later", prompt=300)

    assert isinstance(newcomer, Refusal)
    assert isinstance(back, Queued)
    assert isinstance(after, Queued)


async def test_room_is_held_for_who_comes_back_within_a_second(store: AdmissionStore, time: StoreTime) -> None:
    # Slots that end together make room at once for what comes back one after the other.
    await fill(store, time)
    wait = wait_ms(await ask(store, "late", prompt=100))
    time.advance(wait - 500)
    await drain(store)

    newcomer = await ask(store, "newcomer", prompt=200)
    time.advance(500)
    back = await ask(store, "late-again", prompt=100)

    assert isinstance(newcomer, Refusal)
    assert isinstance(back, Queued)


async def test_callers_that_stay_away_hold_no_more_than_half_of_the_queue(
    store: AdmissionStore, time: StoreTime
) -> None:
    await fill(store, time)
    for number in range(15):
        await ask(store, f"late-{number}", prompt=100 + number)
    time.advance(2_000)
    await drain(store, 20)

    answers = [await ask(store, f"new-{number}", prompt=200 + number) for number in range(10)]

    assert all(isinstance(answer, Queued) for answer in answers)


async def test_no_wait_is_above_a_minute_and_places_vanish_with_their_time(
    store: AdmissionStore, time: StoreTime, redis_client: aioredis.Redis
) -> None:
    await fill(store, time)

    waits = [wait_ms(await ask(store, f"late-{number}", prompt=100 + number)) for number in range(80)]
    time.advance(120_000)
    await drain(store, 20)
    await ask(store, "alone", prompt=1)

    left = await redis_client.keys("*places*")
    assert max(waits) == 60_000
    assert not await redis_client.exists(f"mr:{{{POOL.tag}}}:places")
    assert all([0 < await redis_client.pttl(key) <= 63_000 for key in left])
