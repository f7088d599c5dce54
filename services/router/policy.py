"""Where a request goes: filters, then the best score; of those as good, the less loaded of two drawn at random.

Pure but for the handed-in randomness. Only holders of the prompt's prefix are scored, a sample of them where there are
many; of the rest the freest has the best score, so that a choice costs the same for 32 workers and for 1,000. Called by
the claim loop.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import operator
import random
from collections.abc import Callable, Collection, Sequence

from services.router.disaggregation import Placing
from services.router.endpoint import Endpoint, Needs
from services.router.filters import eligible
from services.router.prefix_index import PrefixIndex
from services.router.roster import Rank, Roster
from services.router.scorers import PoolLoad, PrefixAffinity, load_score, with_affinity

# Scores this close are a tie: views are milliseconds old, and other routers choose by them too.
TIE = 0.02
SAMPLE = 32
# Draws of a tie before the best is taken where some of those drawn do not fit.
_DRAWS = 4
_Scored = tuple[float, Endpoint]


class RoutingPolicy:
    """Chooses among the endpoints of one pool."""

    def __init__(self, rng: random.Random, index: PrefixIndex | None = None) -> None:
        """`index` says who holds which prefix; without one the policy keeps its own of what it sent."""
        self._rng = rng
        self._index = index if index is not None else PrefixIndex()

    def choose(
        self,
        needs: Needs,
        roster: Roster,
        now: float,
        *,
        excluded: Collection[str] = (),
        company: Endpoint | None = None,
    ) -> Endpoint | None:
        """The best endpoint that has room now, or None. `company` is one that is about to get a message anyway: of
        those that are as good as the best it is the one to take."""
        roster.refresh(now)

        looked_at: dict[Endpoint, bool] = {}

        def able(endpoint: Endpoint) -> bool:
            known = looked_at.get(endpoint)
            if known is None:
                known = (
                    endpoint.instance not in excluded and eligible(needs, endpoint, now) and endpoint.fits(needs, now)
                )
                looked_at[endpoint] = known
            return known

        order = roster.order(needs)
        if needs.suspect:
            # Where its death harms the fewest.
            return min((e for _, _, e in order if able(e)), key=_load, default=None)
        holders = self._holders(needs, roster, now)
        held = next(((value, e) for value, e in holders if able(e)), None)
        free = next(((-minus, e) for minus, _, e in order if able(e)), None)
        best = max((each for each in (held, free) if each is not None), key=operator.itemgetter(0), default=None)
        if best is None:
            return None
        if company is not None and _score(company, holders, roster) >= best[0] - TIE and able(company):
            return company
        return self._draw(best, holders, order, able)

    def reserve(self, needs: Needs, roster: Roster, now: float, *, excluded: Collection[str] = ()) -> Endpoint | None:
        """The best endpoint whose next room this request may wait for, or None."""
        roster.refresh(now)
        serving = [e for e in roster.open() if e.instance not in excluded and eligible(needs, e, now)]
        unreserved = [e for e in serving if e.reserved_for is None]
        if needs.suspect:
            return min(unreserved, key=_load, default=None)
        affinity = PrefixAffinity(self._index, PoolLoad.of(serving))
        scored = [(with_affinity(load_score(e, e.free(now)[0]), affinity(needs, e, now)), e) for e in unreserved]
        return max(scored, key=operator.itemgetter(0))[1] if scored else None

    def placed(self, needs: Needs, endpoint: Endpoint, now: float, placing: Placing | None = None) -> None:
        """The request is on its way there: it takes room, and the next of its prefix may follow. A peer that
        computes the prompt is as busy with it as the endpoint would be."""
        peer = placing.peer if placing is not None else None
        if placing is not None and peer is not None:
            peer.debit(dataclasses.replace(needs, slot_count=1), placing.peer_token_count)
            self._index.sent(peer.instance, needs.block_hashes, now)
        endpoint.debit(needs, 0 if peer is not None else None)
        self._index.sent(endpoint.instance, needs.block_hashes, now)

    def _holders(self, needs: Needs, roster: Roster, now: float) -> list[_Scored]:
        """Workers with room that have the start of the prompt, the best first."""
        if not needs.block_hashes:
            return []
        holders = self._index.holders(needs.block_hashes[0], now)
        ranks = [rank for rank in map(roster.rank, holders) if rank is not None]
        if len(ranks) > SAMPLE:
            ranks = self._rng.sample(ranks, SAMPLE)
        affinity = PrefixAffinity(self._index, roster.load(needs))
        scored = [(with_affinity(-minus, affinity(needs, e, now)), e) for minus, _, e in ranks]
        return sorted(scored, key=operator.itemgetter(0), reverse=True)

    def _draw(
        self, best: _Scored, holders: Sequence[_Scored], order: list[Rank], able: Callable[[Endpoint], bool]
    ) -> Endpoint:
        """The less loaded of two that are as good as the best."""
        least = best[0] - TIE
        near = [e for value, e in holders if value >= least]
        count = len(near) + bisect.bisect_right(order, -least, key=operator.itemgetter(0))
        if count == 1:
            return best[1]
        drawn: list[Endpoint] = []
        for index in self._rng.sample(range(count), min(count, _DRAWS)):
            endpoint = near[index] if index < len(near) else order[index - len(near)][2]
            if endpoint not in drawn and able(endpoint):
                drawn.append(endpoint)
            if len(drawn) == 2:
                break
        return min(drawn or [best[1]], key=_load)


def _score(endpoint: Endpoint, holders: Sequence[_Scored], roster: Roster) -> float:
    rank = roster.rank(endpoint.instance)
    if rank is None:
        return -math.inf
    return next((value for value, holder in holders if holder is endpoint), -rank[0])


def _load(endpoint: Endpoint) -> tuple[int, int]:
    return endpoint.load, endpoint.token_load
