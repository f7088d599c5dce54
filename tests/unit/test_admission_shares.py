"""Tenants that always have work share slots by weight: closed loops on the real scripts, a token a slot a tick."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest
import redis.asyncio as aioredis

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Ownership, Queued
from tests.helpers.admission import CAPS, POOL, StoreTime, make_entry, make_store, make_terminal

SLOTS = 8
EPOCH = 1 << 20


@dataclasses.dataclass(frozen=True)
class Tenant:
    """So many clients that ask again a tick after their answer, which has `output` tokens of `max_tokens`."""

    name: str
    weight: float = 1.0
    clients: int = 20
    max_tokens: int = 8
    output: int = 8


@dataclasses.dataclass(eq=False)
class _Running:
    request_id: str
    tenant: Tenant
    left: int


class Slots:
    """Slots of one worker, full as long as anybody waits. `tokens` are those of each tenant so far."""

    def __init__(self, store: AdmissionStore, time: StoreTime) -> None:
        self.tokens: Counter[str] = Counter()
        self._store, self._time = store, time
        self._tenants: dict[str, Tenant] = {}
        self._running: list[_Running] = []
        self._asks: list[Tenant] = []
        self._asked = 0

    def come(self, *tenants: Tenant) -> None:
        """Their clients ask from the next tick on."""
        for tenant in tenants:
            self._tenants[tenant.name] = tenant
            self._asks += [tenant] * tenant.clients

    async def turn_over(self, times: int, output: int = 8) -> Counter[str]:
        """Tokens of each tenant in so many turnovers of answers of that length."""
        before = self.tokens.copy()
        for _ in range(times * (output + 1)):
            await self._tick()
        return self.tokens - before

    async def _tick(self) -> None:
        self._time.advance(100)
        asks, self._asks = self._asks, []
        for tenant in asks:
            self._asked += 1
            entry = make_entry(
                f"{tenant.name}-{self._asked}", tenant.name, max_tokens=tenant.max_tokens, weight=tenant.weight
            )
            assert isinstance(await self._store.enqueue(POOL, entry, CAPS, remaining_ms=10_000_000), Queued)
        if free := SLOTS - len(self._running):
            await self._start(free)
        for running in self._running:
            running.left -= 1
            self.tokens[running.tenant.name] += 1
        await self._end([each for each in self._running if not each.left])

    async def _start(self, free: int) -> None:
        claims = [claim.entry for claim in await self._store.claim(POOL, "router-1", free)]
        await self._store.own(POOL, [Ownership(entry.request_id, EPOCH, "worker-1") for entry in claims])
        for entry in claims:
            tenant = self._tenants[entry.tenant]
            self._running.append(_Running(entry.request_id, tenant, tenant.output))

    async def _end(self, ended: Sequence[_Running]) -> None:
        for each in ended:
            self._running.remove(each)
            self._asks.append(each.tenant)
            computed = 10 + each.tenant.output
            terminal = make_terminal(each.request_id, each.tenant.name, epoch=EPOCH, computed=computed)
            await self._store.finish(POOL, [terminal])


@pytest.fixture
def slots(redis_client: aioredis.Redis) -> Slots:
    time = StoreTime()
    return Slots(make_store(redis_client, time), time)


def jain(counts: Sequence[int]) -> float:
    """Jain's index of fairness: 1 for equal counts, 1 / n when one has all."""
    return sum(counts) ** 2 / (len(counts) * sum(count * count for count in counts))


@pytest.mark.parametrize("max_tokens", [8, 200])
async def test_tokens_come_out_by_weight_whatever_outputs_were_expected(slots: Slots, max_tokens: int) -> None:
    slots.come(Tenant("heavy", weight=3.0, max_tokens=max_tokens), Tenant("light", max_tokens=max_tokens))
    await slots.turn_over(4)

    seen = await slots.turn_over(16)

    assert seen["heavy"] / seen["light"] == pytest.approx(3.0, rel=0.1)


async def test_tokens_come_out_evenly_however_many_clients_a_tenant_has(slots: Slots) -> None:
    slots.come(*(Tenant(f"of {clients}", clients=clients) for clients in (8, 16, 32)))
    await slots.turn_over(4)

    seen = await slots.turn_over(12)

    assert jain(list(seen.values())) >= 0.99


@pytest.mark.parametrize("max_tokens", [8, 200])
async def test_a_new_tenant_gets_its_share_from_the_first_turn_of_the_slots_on(slots: Slots, max_tokens: int) -> None:
    slots.come(Tenant("old", max_tokens=max_tokens))
    await slots.turn_over(24)
    slots.come(Tenant("new", max_tokens=max_tokens))
    await slots.turn_over(2)

    seen = await slots.turn_over(8)

    assert seen["new"] / seen.total() == pytest.approx(0.5, abs=0.05)
