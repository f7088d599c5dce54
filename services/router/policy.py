"""Where a request goes: filters, then the best score; of those as good, the less loaded of two drawn at random.

Pure but for the handed-in randomness. In a large pool a sample stands for all, the likely holders of the prefix always
among it, so that a choice costs the same for 32 workers and for 1,000. Called by the claim loop.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Iterator, Sequence

from services.router.disaggregation import Placing
from services.router.endpoint import Endpoint, Needs
from services.router.filters import ejected, eligible
from services.router.prefix_index import PrefixIndex
from services.router.scorers import PrefixAffinity, score

# Scores this close are a tie: views are milliseconds old, and other routers choose by them too.
TIE = 0.02
SAMPLE = 32


class RoutingPolicy:
    """Chooses among the endpoints of one pool."""

    def __init__(self, rng: random.Random, index: PrefixIndex | None = None) -> None:
        """`index` says who holds which prefix; without one the policy keeps its own of what it sent."""
        self._rng = rng
        self._index = index if index is not None else PrefixIndex()

    def choose(
        self, needs: Needs, endpoints: Sequence[Endpoint], now: float, *, excluded: Collection[str] = ()
    ) -> Endpoint | None:
        """The best endpoint that has room now, or None."""
        out = {*excluded, *ejected(endpoints, now)}
        for drawn, holders in self._rounds(needs, endpoints, now):
            serving = [e for e in drawn if e.instance not in out and eligible(needs, e, now)]
            likely = [e for e in holders if e.instance not in out and eligible(needs, e, now)]
            best = self._best(needs, serving, [e for e in (*serving, *likely) if e.fits(needs, now)], now)
            if best is not None:
                return best
        return None

    def reserve(
        self, needs: Needs, endpoints: Sequence[Endpoint], now: float, *, excluded: Collection[str] = ()
    ) -> Endpoint | None:
        """The best endpoint whose next room this request may wait for, or None."""
        out = {*excluded, *ejected(endpoints, now)}
        serving = [e for e in endpoints if e.instance not in out and eligible(needs, e, now)]
        return self._best(needs, serving, [e for e in serving if e.reserved_for is None], now)

    def placed(self, needs: Needs, endpoint: Endpoint, now: float, placing: Placing | None = None) -> None:
        """The request is on its way there: it takes room, and the next of its prefix may follow. A peer that
        computes the prompt is as busy with it as the endpoint would be."""
        peer = placing.peer if placing is not None else None
        if placing is not None and peer is not None:
            peer.debit(dataclasses.replace(needs, slot_count=1), placing.peer_token_count)
            self._index.sent(peer.instance, needs.block_hashes, now)
        endpoint.debit(needs, 0 if peer is not None else None)
        self._index.sent(endpoint.instance, needs.block_hashes, now)

    def _rounds(
        self, needs: Needs, endpoints: Sequence[Endpoint], now: float
    ) -> Iterator[tuple[Sequence[Endpoint], Sequence[Endpoint]]]:
        """A sample and the likely holders outside it, then all: a full sample says nothing about the rest."""
        if len(endpoints) > SAMPLE:
            drawn = self._rng.sample(endpoints, SAMPLE)
            holders = [e for e in endpoints if self._index.leading(e.instance, needs.block_hashes[:1], now)]
            if len(holders) > SAMPLE:
                holders = self._rng.sample(holders, SAMPLE)
            yield drawn, [e for e in holders if e not in drawn]
        yield endpoints, ()

    def _best(
        self, needs: Needs, serving: Sequence[Endpoint], candidates: Sequence[Endpoint], now: float
    ) -> Endpoint | None:
        if not candidates:
            return None
        if needs.suspect:
            # Where its death harms the fewest.
            return min(candidates, key=lambda e: (e.load, e.token_load))
        affinity = PrefixAffinity(self._index, serving)
        scored = [(score(needs, e, now, affinity), e) for e in candidates]
        best = max(value for value, _ in scored)
        near = [e for value, e in scored if value >= best - TIE]
        drawn = near if len(near) == 1 else self._rng.sample(near, 2)
        return min(drawn, key=lambda e: (e.load, e.token_load))
