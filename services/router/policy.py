"""Where a request goes: filters, then the best score, ties broken at random. Pure but for the handed-in randomness."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from services.router.endpoint import Endpoint, Needs
from services.router.filters import eligible
from services.router.scorers import score


class RoutingPolicy:
    """Chooses among the endpoints of one pool."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(
        self, needs: Needs, endpoints: Sequence[Endpoint], now: float, *, excluded: Collection[str] = ()
    ) -> Endpoint | None:
        """The best endpoint that has room now, or None."""
        return self._best(needs, [e for e in endpoints if e.instance not in excluded and e.fits(needs, now)], now)

    def reserve(
        self, needs: Needs, endpoints: Sequence[Endpoint], now: float, *, excluded: Collection[str] = ()
    ) -> Endpoint | None:
        """The best endpoint whose next room this request may wait for, or None."""
        unreserved = [e for e in endpoints if e.instance not in excluded and e.reserved_for is None]
        return self._best(needs, unreserved, now)

    def _best(self, needs: Needs, endpoints: Sequence[Endpoint], now: float) -> Endpoint | None:
        scored = [(score(needs, e, now), self._rng.random(), e) for e in endpoints if eligible(needs, e, now)]
        return max(scored, key=lambda item: item[:2])[2] if scored else None
