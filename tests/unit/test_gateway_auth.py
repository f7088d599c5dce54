"""Who may call: cache, revocation, expiry, and a store that is away."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib

import pytest

from services.common.admission_types import KeyRecord, QuotaLimits
from services.common.errors import PermissionDenied, StoreUnavailable, Unauthenticated
from services.gateway.auth import CachedKeyRing
from tests.helpers.fake_clock import FakeClock

KEY = KeyRecord("key-1", "acme", "", (), 1.0, QuotaLimits())


class FakeKeys:
    def __init__(self) -> None:
        self.keys: dict[bytes, KeyRecord] = {hashlib.sha256(b"mr_secret").digest(): KEY}
        self.away = False
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def lookup_key(self, digest: bytes) -> KeyRecord | None:
        self.asked += 1
        await self.gate.wait()
        if self.away:
            raise StoreUnavailable("away")
        return self.keys.get(digest)

    def change(self, **fields: object) -> None:
        self.keys = {d: dataclasses.replace(k, **fields) for d, k in self.keys.items()}  # type: ignore[arg-type]


@pytest.fixture
def keys() -> FakeKeys:
    return FakeKeys()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ring(keys: FakeKeys, clock: FakeClock) -> CachedKeyRing:
    return CachedKeyRing(keys, clock)


async def test_a_known_key_is_found_by_its_digest(ring: CachedKeyRing) -> None:
    assert await ring.authenticate("Bearer mr_secret") == KEY
    assert await ring.authenticate("bearer  mr_secret ") == KEY


@pytest.mark.parametrize(
    "header", [None, "", "mr_secret", "Basic mr_secret", "Bearer", "Bearer ", "Bearer other", "Bearer é", "Bearer a\nb"]
)
async def test_everything_else_is_refused(ring: CachedKeyRing, header: str | None) -> None:
    with pytest.raises(Unauthenticated):
        await ring.authenticate(header)


async def test_an_oversized_secret_is_refused_without_a_question(ring: CachedKeyRing, keys: FakeKeys) -> None:
    with pytest.raises(Unauthenticated):
        await ring.authenticate("Bearer " + "a" * 257)
    assert keys.asked == 0


async def test_the_store_is_asked_once_in_two_seconds(ring: CachedKeyRing, keys: FakeKeys, clock: FakeClock) -> None:
    for _ in range(3):
        await ring.authenticate("Bearer mr_secret")
    assert keys.asked == 1

    clock.jump(2.0)
    await ring.authenticate("Bearer mr_secret")

    assert keys.asked == 2


async def test_callers_at_the_same_time_share_one_question(ring: CachedKeyRing, keys: FakeKeys) -> None:
    keys.gate.clear()
    callers = [asyncio.create_task(ring.authenticate("Bearer mr_secret")) for _ in range(5)]
    await asyncio.sleep(0)
    keys.gate.set()

    assert await asyncio.gather(*callers) == [KEY] * 5
    assert keys.asked == 1


async def test_a_caller_that_leaves_does_not_spoil_the_answer_of_others(ring: CachedKeyRing, keys: FakeKeys) -> None:
    keys.gate.clear()
    first = asyncio.create_task(ring.authenticate("Bearer mr_secret"))
    second = asyncio.create_task(ring.authenticate("Bearer mr_secret"))
    await asyncio.sleep(0)
    first.cancel()
    keys.gate.set()

    assert await second == KEY


async def test_a_revoked_key_ends_within_the_cache(ring: CachedKeyRing, keys: FakeKeys, clock: FakeClock) -> None:
    await ring.authenticate("Bearer mr_secret")
    keys.change(revoked=True)
    clock.jump(2.0)

    with pytest.raises(Unauthenticated, match="revoked"):
        await ring.authenticate("Bearer mr_secret")


async def test_a_key_ends_at_its_expiry_even_while_cached(
    ring: CachedKeyRing, keys: FakeKeys, clock: FakeClock
) -> None:
    keys.change(expires_at=clock.wall() + 1.0)
    await ring.authenticate("Bearer mr_secret")
    clock.jump(1.0)

    with pytest.raises(Unauthenticated, match="expired"):
        await ring.authenticate("Bearer mr_secret")


async def test_an_absent_store_is_no_refusal(ring: CachedKeyRing, keys: FakeKeys) -> None:
    keys.away = True

    with pytest.raises(StoreUnavailable):
        await ring.authenticate("Bearer mr_secret")


async def test_a_key_known_a_moment_ago_holds_while_the_store_is_away(
    ring: CachedKeyRing, keys: FakeKeys, clock: FakeClock
) -> None:
    await ring.authenticate("Bearer mr_secret")
    keys.away = True
    clock.jump(30.0)
    assert await ring.authenticate("Bearer mr_secret") == KEY

    clock.jump(31.0)

    with pytest.raises(StoreUnavailable):
        await ring.authenticate("Bearer mr_secret")


@pytest.mark.parametrize("scopes", [(), ("usage:read",)])
async def test_a_key_without_the_scope_of_inference_is_known_and_refused(
    keys: FakeKeys, ring: CachedKeyRing, scopes: tuple[str, ...]
) -> None:
    keys.change(scopes=scopes)

    with pytest.raises(PermissionDenied):
        await ring.authenticate("Bearer mr_secret")
