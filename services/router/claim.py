"""The claim loop: claims when some worker has room, places what it holds, keeps the leases of what it cannot place.

Late binding: nothing is claimed that no worker has room for. Woken by the pools' bells and by Watch changes. Owns the
held claims (at most 32, beside suspects of poison that must run apart). Never on the token path.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

import structlog
from opentelemetry import trace

from services.common.admission_store import BATCH, CLAIM_LEASE_MS, AdmissionStore
from services.common.admission_types import Claimed, Pool
from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.telemetry import context_from, tracer
from services.router.disaggregation import Disaggregation
from services.router.dispatcher import Dispatcher, HeldClaim, Outcome
from services.router.endpoint import VIEW_LAG_S, Endpoint, Needs
from services.router.filters import only_prefills
from services.router.policy import RoutingPolicy
from services.router.redirect import Redirect
from services.router.registry import EndpointRegistry

MAX_HELD = BATCH
# Submits that wait for an answer, beside those held: room for as many was seen.
MAX_SUBMITS = 4 * BATCH
RESERVE_AFTER_S = 2.0
IDLE_PERIOD_S = 1.0
# A queue that a claim has emptied is looked at again after this time, for claims that others let expire.
EMPTY_PERIOD_S = 0.5
HELD_PERIOD_S = 0.1
# With so many to place at once, messages are what a request costs: some may share one.
COMPANY_FROM = 8
RENEW_PERIOD_S = CLAIM_LEASE_MS / 1000 / 3
_BELL_TIMEOUT_MS = 1_000


class ClaimLoop:
    """Moves requests from the queues to the workers."""

    def __init__(
        self,
        store: AdmissionStore,
        registry: EndpointRegistry,
        dispatcher: Dispatcher,
        policy: RoutingPolicy,
        redirects: Redirect,
        clock: Clock,
        *,
        router_instance: str,
    ) -> None:
        self._store = store
        self._registry = registry
        self._dispatcher = dispatcher
        self._policy = policy
        self._disaggregation = Disaggregation(registry.prefixes)
        self._redirects = redirects
        self._clock = clock
        self._router_instance = router_instance
        self._waiting: list[HeldClaim] = []
        self._submits: set[HeldClaim] = set()
        self._late: list[HeldClaim] = []
        self._answered = asyncio.Event()
        self._spans: dict[str, trace.Span] = {}
        self._wake = asyncio.Event()
        # When a pool's queue was last found empty, and for how many workers: caps of tenants grow with them.
        self._emptied: dict[Pool, tuple[float, int]] = {}
        self._rings = 0
        self._away = False
        self.draining = False

    @property
    def held_count(self) -> int:
        """Claims in this router's hands."""
        return len(self._waiting) + len(self._submits)

    @property
    def store_away(self) -> bool:
        """The last claim found Redis away."""
        return self._away

    def wake(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    async def run(self) -> None:
        """Claim and place until cancelled."""
        while True:
            self._wake.clear()
            more = await self.step()
            if not more:
                await self._sleep()

    async def step(self) -> bool:
        """Place what is held, then claim for the room that is left. True when another step may find more at once."""
        await self._end_unfit()
        await self._give_back_late()
        await self._redirect()
        self._place()
        more = False
        for pool in self._registry.pools() if not self.draining else ():
            roster = self._registry.roster(pool)
            roster.refresh(self._clock.monotonic())
            held_count = len(self._waiting) - self._waiting_suspects()
            count = min(roster.room, MAX_HELD - held_count, MAX_SUBMITS - len(self._submits))
            if count <= 0 or self._is_empty(pool, roster.open_count):
                continue
            rings = self._rings
            try:
                claims = await self._store.claim(pool, self._router_instance, count, workers=roster.open_count)
            except StoreUnavailable:
                self._note_store(away=True)
                return False
            self._note_store(away=False)
            if len(claims) < count and rings == self._rings:
                self._emptied[pool] = self._clock.monotonic(), roster.open_count
            self._hold(pool, claims)
            await self._redirect()
            self._place()
            more = more or len(claims) == count
        return more and not self.draining

    async def listen(self) -> None:
        """Turn the pools' bells into wake-ups until cancelled."""
        bells: dict[str, str] = {}
        while True:
            pools = self._registry.pools()
            try:
                rung = await self._store.wait_bell(pools, bells, _BELL_TIMEOUT_MS) if pools else bells
            except StoreUnavailable:
                rung = bells
                await self._clock.sleep(HELD_PERIOD_S)
            if rung != bells:
                bells = rung
                self._rings += 1
                self._emptied.clear()
                self.wake()
                # The claim goes out before the bell is listened for again.
                await asyncio.sleep(0)
            elif not pools:
                await self._clock.sleep(HELD_PERIOD_S)

    async def keep(self) -> None:
        """Renew held claims at a third of their lease and drop what has ended elsewhere, until cancelled."""
        while True:
            await self._clock.sleep(RENEW_PERIOD_S)
            with contextlib.suppress(StoreUnavailable):
                await self.renew()

    async def renew(self) -> None:
        """One round of renewal. Raises StoreUnavailable."""
        await self._dispatcher.record_owners()
        by_pool: dict[Pool, list[HeldClaim]] = {}
        for held in (*self._waiting, *self._submits):
            by_pool.setdefault(held.pool, []).append(held)
        for pool, claims in by_pool.items():
            await self._store.renew_claims(pool, [held.claim.claim_id for held in claims])
            records = await self._store.read_requests(pool, [held.request_id for held in claims])
            for held, record in zip(claims, records, strict=True):
                if record is None or record.claim_id != held.claim.claim_id:
                    self._drop(held)

    async def drain(self, grace_s: float) -> None:
        """Claim no more, let submits under way be answered within the grace, give the rest back."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._submits:
                    self._answered.clear()
                    await self._answered.wait()
        self.stop()
        by_pool: dict[Pool, list[str]] = {}
        for held in list(self._waiting):
            by_pool.setdefault(held.pool, []).append(held.claim.claim_id)
            self._drop(held)
        with contextlib.suppress(StoreUnavailable):
            await self._dispatcher.record_owners()
            for pool, claim_ids in by_pool.items():
                await self._store.return_claims(pool, claim_ids)

    def stop(self) -> None:
        """Leave submits under way; a worker may have taken them: their lease runs out and a higher epoch decides."""
        for held in self._submits:
            self._forget(held)
        self._submits.clear()

    def _is_empty(self, pool: Pool, worker_count: int) -> bool:
        """The last claim left nothing to claim, and no bell rang since: a change of room alone is no cause."""
        since, count = self._emptied.get(pool, (-math.inf, 0))
        return worker_count <= count and self._clock.monotonic() - since < EMPTY_PERIOD_S

    def _waiting_suspects(self) -> int:
        """Held until a worker runs no other suspect: the rest must not wait for them."""
        return sum(held.needs.suspect for held in self._waiting)

    def _hold(self, pool: Pool, claims: list[Claimed]) -> None:
        now = self._clock.monotonic()
        for claim in claims:
            entry = claim.entry
            if entry.traceparent:
                span = tracer().start_span("router.claim", context=context_from(entry.traceparent))
                span.set_attribute("millrace.request_id", entry.request_id)
                span.set_attribute("millrace.tenant", entry.tenant)
                span.set_attribute("millrace.claim_number", claim.claim_number)
                self._spans[claim.claim_id] = span
            self._waiting.append(HeldClaim(pool, claim, Needs.of(entry), now))

    def _place(self) -> None:
        """Start a submit for every waiting claim that some worker has room for, the longest held first."""
        now = self._clock.monotonic()
        waiting, self._waiting = sorted(self._waiting, key=lambda held: held.since), []
        company: Endpoint | None = None
        for held in waiting:
            roster = self._registry.roster(held.pool)
            endpoint = self._policy.choose(held.needs, roster, now, excluded=held.avoided(now), company=company)
            if endpoint is not None:
                company = endpoint if len(waiting) >= COMPANY_FROM else None
                held.placing = self._disaggregation.decide(held.needs, endpoint, roster, now)
                self._policy.placed(held.needs, endpoint, now, held.placing)
                self._submits.add(held)
                self._dispatcher.send(held, endpoint, self._submitted)
                continue
            self._waiting.append(held)
            if not held.needs.suspect and now - held.since > RESERVE_AFTER_S and not held.waits_for_room():
                held.reserved = self._policy.reserve(held.needs, roster, now, excluded=held.excluded)
                if held.reserved is not None:
                    held.reserved.reserve(held.request_id)

    def _submitted(self, held: HeldClaim, outcome: Outcome) -> None:
        self._settle_peer(held, accepted=outcome is Outcome.ACCEPTED)
        if held not in self._submits:
            return
        full = len(self._submits) >= MAX_SUBMITS
        self._submits.remove(held)
        self._answered.set()
        # Judged now: a worker that leaves later may come back with room for it.
        held.unfit = outcome is Outcome.UNFIT and self._unfit_everywhere(held)
        if outcome in (Outcome.REFUSED, Outcome.UNFIT):
            self._waiting.append(held)
        else:
            self._forget(held)
        if outcome is Outcome.GIVE_BACK:
            self._late.append(held)
        if full or outcome is not Outcome.ACCEPTED:
            self.wake()

    def _settle_peer(self, held: HeldClaim, *, accepted: bool) -> None:
        """The peer is asked once the request was accepted, and not otherwise."""
        peer = held.placing.peer if held.placing is not None else None
        if peer is not None and accepted:
            peer.named(held.request_id, self._clock.monotonic())
        elif peer is not None:
            peer.unnamed(held.request_id)

    async def _end_unfit(self) -> None:
        """Claims that every worker refused for good end here."""
        for held in [held for held in self._waiting if held.unfit]:
            with contextlib.suppress(StoreUnavailable):
                if await self._dispatcher.fail(held):
                    self._drop(held)

    async def _give_back_late(self) -> None:
        """Claims whose time is over go back to the queue, which ends them."""
        now = self._clock.monotonic()
        for held in [held for held in self._waiting if (now - held.since) * 1000 > held.claim.remaining_ms]:
            self._drop(held)
            self._late.append(held)
        late, self._late = self._late, []
        for held in late:
            with contextlib.suppress(StoreUnavailable):
                await self._store.return_claims(held.pool, [held.claim.claim_id])

    async def _redirect(self) -> None:
        """Claims of versions that are no more get another one, or leave the queue for their gateways to choose."""
        now = self._clock.monotonic()
        closed: dict[Pool, list[HeldClaim]] = {}
        for held in self._waiting:
            if self._redirects.closes(held, self._registry.roster(held.pool), now):
                closed.setdefault(held.pool, []).append(held)
        for pool, claims in closed.items():
            with contextlib.suppress(StoreUnavailable):
                await self._store.close_claims(pool, [held.claim for held in claims])
                for held in claims:
                    self._drop(held)

    def _unfit_everywhere(self, held: HeldClaim) -> bool:
        """Every worker of the pool that decodes refused for good."""
        decoding = [e for e in self._registry.endpoints(held.pool) if not only_prefills(e)]
        return all(endpoint.instance in held.excluded for endpoint in decoding)

    def _drop(self, held: HeldClaim) -> None:
        if held in self._waiting:
            self._waiting.remove(held)
            self._forget(held)

    def _forget(self, held: HeldClaim) -> None:
        held.unreserve()
        span = self._spans.pop(held.claim.claim_id, None)
        if span is not None:
            span.end()

    async def _sleep(self) -> None:
        """Until a wake-up, or for as long as the state may change by time alone."""
        settling = any(self._registry.roster(pool).settling for pool in self._registry.pools())
        period = VIEW_LAG_S if settling else HELD_PERIOD_S if self._waiting else IDLE_PERIOD_S
        await self._clock.wait(self._wake, period)

    def _note_store(self, *, away: bool) -> None:
        if away != self._away:
            self._away = away
            structlog.get_logger().info("store_away" if away else "store_back")
