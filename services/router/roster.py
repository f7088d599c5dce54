"""The workers of one pool in order of how free they are, kept by change, so that a choice need not look at them all.

Pure: time is handed in. What time alone changes (views age, breakers let a probe pass) is looked at each `RESCAN_S`;
whoever takes a worker from here checks that one by itself. Owned by the registry; read by policy and claim loop.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator

from services.router.endpoint import VIEW_LAG_S, Endpoint, Needs
from services.router.filters import ejected, is_routable, only_prefills
from services.router.scorers import PoolLoad, load_score

RESCAN_S = 0.1
_SETTLE_S = VIEW_LAG_S / 2
# (load score with its sign turned, number of the endpoint, endpoint): the first is the freest.
Rank = tuple[float, int, Endpoint]
_Version = tuple[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """What an endpoint adds to the sums of its version, and where it stands if it has room."""

    version: _Version
    load: int
    token_load: int
    room: int
    rank: Rank | None


@dataclasses.dataclass(slots=True)
class _Serving:
    """Workers of one version that may take requests: their sums, and those with room by rank."""

    count: int = 0
    load: int = 0
    token_load: int = 0
    order: list[Rank] = dataclasses.field(default_factory=list)


class Roster:
    """One pool. Every read but `endpoints` is of the last `refresh`."""

    def __init__(self, endpoints: Iterable[Endpoint] = ()) -> None:
        self._numbers: dict[Endpoint, int] = {}
        self._by_instance: dict[str, Endpoint] = {}
        self._changed: dict[Endpoint, None] = {}
        self._places: dict[Endpoint, _Place] = {}
        self._serving: dict[_Version, _Serving] = {}
        self._prefillers: dict[Endpoint, None] = {}
        self._settling: dict[Endpoint, None] = {}
        self._out: frozenset[str] = frozenset()
        self._scanned_at = self._settled_at = -math.inf
        self._next_number = 0
        # Requests of one slot that the pool's workers would take now.
        self.room = 0
        for endpoint in endpoints:
            self.add(endpoint)

    @property
    def endpoints(self) -> list[Endpoint]:
        """All workers of the pool, in whatever state."""
        return list(self._numbers)

    @property
    def open_count(self) -> int:
        """Workers that take requests, room aside."""
        return len(self._places)

    @property
    def settling(self) -> bool:
        """Room of some worker changes by time alone."""
        return bool(self._settling)

    def add(self, endpoint: Endpoint) -> None:
        """A worker was found; from here on the roster hears of its changes."""
        self._numbers[endpoint] = self._next_number
        self._next_number += 1
        self._by_instance[endpoint.instance] = endpoint
        self._changed[endpoint] = None
        endpoint.on_change = lambda: self._changed.setdefault(endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        """A worker has left: nobody waits for its room any more."""
        endpoint.on_change = lambda: None
        endpoint.reserved_for = None
        self._displace(endpoint)
        for known in (self._numbers, self._changed):
            known.pop(endpoint, None)
        self._by_instance.pop(endpoint.instance, None)

    def refresh(self, now: float) -> None:
        """Take in what has changed."""
        scan = now - self._scanned_at >= RESCAN_S
        if scan:
            self._scanned_at = now
            self._changed |= self._settling
            self._changed |= dict.fromkeys(
                [e for e in self._numbers if self._is_placed(e) != self._is_placeable(e, now)]
            )
        elif now - self._settled_at >= _SETTLE_S:
            self._settled_at = now
            self._changed |= self._settling
        if scan or any(e.failing or e.instance in self._out for e in self._changed):
            self._eject(now)
        for endpoint in self._changed:
            self._displace(endpoint)
            self._place(endpoint, now)
        self._changed.clear()

    def load(self, needs: Needs) -> PoolLoad:
        """Of all workers that serve such requests, with room or without."""
        serving = self._serving.get((needs.model, needs.version))
        return PoolLoad(serving.count, serving.load, serving.token_load) if serving else PoolLoad(0, 0, 0)

    def order(self, needs: Needs) -> list[Rank]:
        """Workers of that version with room for something, the freest first. Not to be changed."""
        serving = self._serving.get((needs.model, needs.version))
        return serving.order if serving else []

    def rank(self, instance: str) -> Rank | None:
        """Where a worker stands; None when it takes nothing now."""
        place = self._places.get(self._by_instance[instance]) if instance in self._by_instance else None
        return place.rank if place is not None else None

    def open(self) -> Iterator[Endpoint]:
        """Workers that take requests, room aside."""
        return iter(self._places)

    def prefillers(self) -> Iterator[Endpoint]:
        """Workers that compute prompts for others."""
        return iter(self._prefillers)

    def _eject(self, now: float) -> None:
        out = ejected(self._numbers, now)
        for instance in out ^ self._out:
            if instance in self._by_instance:
                self._changed.setdefault(self._by_instance[instance])
        self._out = out

    def _is_placed(self, endpoint: Endpoint) -> bool:
        return endpoint in self._places or endpoint in self._prefillers

    def _is_placeable(self, endpoint: Endpoint, now: float) -> bool:
        return endpoint.instance not in self._out and is_routable(endpoint, now)

    def _place(self, endpoint: Endpoint, now: float) -> None:
        view = endpoint.view
        if view is None or not self._is_placeable(endpoint, now):
            return
        if only_prefills(endpoint):
            self._prefillers[endpoint] = None
            return
        slots, blocks = endpoint.free(now)
        rank = (-load_score(endpoint, slots), self._numbers[endpoint], endpoint) if slots else None
        room = min(slots, blocks) if endpoint.reserved_for is None else 0
        version = (view.model.model, view.model.version)
        self._places[endpoint] = place = _Place(version, endpoint.load, endpoint.token_load, room, rank)
        serving = self._serving.setdefault(version, _Serving())
        serving.count += 1
        serving.load += place.load
        serving.token_load += place.token_load
        self.room += room
        if rank is not None:
            bisect.insort(serving.order, rank)
        if endpoint.settling():
            self._settling[endpoint] = None

    def _displace(self, endpoint: Endpoint) -> None:
        self._prefillers.pop(endpoint, None)
        self._settling.pop(endpoint, None)
        place = self._places.pop(endpoint, None)
        if place is None:
            return
        serving = self._serving[place.version]
        serving.count -= 1
        serving.load -= place.load
        serving.token_load -= place.token_load
        self.room -= place.room
        if place.rank is not None:
            del serving.order[bisect.bisect_left(serving.order, place.rank)]
        if not serving.count:
            del self._serving[place.version]
