"""The waiting requests in fair order: class, then the tenant that has had least by weight, then age.

Owns the virtual token counter of each tenant (uncached prefill and decode tokens, divided by weight). Never decides
whether a request fits. Called by the scheduler only.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping
from operator import attrgetter

from services.worker.engine.request import PriorityClass, Request

# Requests of a tenant that a walk passes by before it leaves that tenant alone.
_MAX_TRIES_PER_TENANT = 8

_by_sequence = attrgetter("sequence")


class RequestQueue:
    """Lanes of requests by class and tenant, oldest first; a preempted request comes back to its old place."""

    def __init__(self) -> None:
        self._lanes: dict[PriorityClass, dict[str, list[Request]]] = {each: {} for each in PriorityClass}
        self._virtual_tokens: dict[str, float] = {}
        self._unfinished: dict[str, int] = {}
        # Virtual time of the last dispatch: a tenant that was away starts here, it saves nothing up.
        self._floor = 0.0
        self._count = 0
        self._token_count = 0
        # When age last lifted a request of the tenant out of BATCH.
        self._promoted_at: dict[str, float] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def token_count(self) -> int:
        """Known tokens of all waiting requests."""
        return self._token_count

    def waiting(self) -> list[Request]:
        """All waiting requests, in no order that matters."""
        return [request for lanes in self._lanes.values() for lane in lanes.values() for request in lane]

    def has_class(self, priority_class: PriorityClass) -> bool:
        """True when a request of the class waits."""
        return bool(self._lanes[priority_class])

    def enter(self, request: Request) -> None:
        """Take a new request; its tenant is unfinished until `leave`."""
        tenant = request.tenant
        if tenant not in self._unfinished:
            self._virtual_tokens[tenant] = max(self._virtual_tokens.get(tenant, 0.0), self._floor)
        self._unfinished[tenant] = self._unfinished.get(tenant, 0) + 1
        self.put(request)

    def leave(self, request: Request) -> None:
        """The request has ended, and is not waiting any more."""
        tenant = request.tenant
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]
            self._promoted_at.pop(tenant, None)
            self._prune()

    def put(self, request: Request) -> None:
        """Let a request wait (again)."""
        lane = self._lanes[request.priority_class].setdefault(request.tenant, [])
        insort(lane, request, key=_by_sequence)
        self._count += 1
        self._token_count += request.num_tokens

    def remove(self, request: Request) -> None:
        """Take a waiting request out: it runs now, or has ended. Raises KeyError when it does not wait."""
        lanes = self._lanes[request.priority_class]
        lane = lanes[request.tenant]
        index = bisect_left(lane, request.sequence, key=_by_sequence)
        if index == len(lane) or lane[index] is not request:
            raise KeyError(request.key)
        del lane[index]
        if not lane:
            del lanes[request.tenant]
        self._count -= 1
        self._token_count -= request.num_tokens

    def fair_order(self, request: Request) -> tuple[int, float, int]:
        """Sort key of a running request among its like: class, what its tenant has had, age."""
        return (request.priority_class, self._virtual_tokens[request.tenant], request.sequence)

    def charge(self, request: Request, tokens: int) -> None:
        """Add computed tokens to the tenant's virtual time."""
        self._virtual_tokens[request.tenant] += tokens / request.weight

    def charge_chunk(self, request: Request, size: int) -> None:
        """Charge for the prompt tokens among the next `size` to compute, each once however often it is computed."""
        end = min(request.num_computed_tokens + size, request.num_prompt_tokens)
        fresh = end - max(request.num_charged_tokens, request.num_computed_tokens)
        if fresh > 0:
            request.num_charged_tokens = end
            self.charge(request, fresh)

    def charge_one_each(self, counts: Mapping[tuple[str, float], int]) -> None:
        """Add one computed token for each request; `counts` of them are of each tenant and weight."""
        for (tenant, weight), count in counts.items():
            self._virtual_tokens[tenant] += count / weight

    def dispatched(self, request: Request) -> None:
        """The request starts to run: the floor follows its tenant's virtual time."""
        self._floor = max(self._floor, self._virtual_tokens[request.tenant])

    def promote(self, now: float, *, aging_seconds: float) -> None:
        """Lift the oldest BATCH request of each tenant to INTERACTIVE once old enough.

        One per tenant in `aging_seconds`: nothing starves, and a backlog of old work does not bury what is urgent.
        """
        for tenant, lane in list(self._lanes[PriorityClass.BATCH].items()):
            request = lane[0]
            if now - max(request.arrival, self._promoted_at.get(tenant, request.arrival)) >= aging_seconds:
                self.remove(request)
                request.priority_class = PriorityClass.INTERACTIVE
                self._promoted_at[tenant] = now
                self.put(request)

    def walk(self) -> FairWalk:
        """The waiting requests in fair order, for one round of admission."""
        return FairWalk(self._lanes, self._virtual_tokens)

    def check_invariants(self) -> None:
        """Raise AssertionError when a count is off or a finished tenant is still carried."""
        waiting = self.waiting()
        assert len(waiting) == self._count, f"queue counts {self._count}, holds {len(waiting)}"
        assert sum(request.num_tokens for request in waiting) == self._token_count, "waiting tokens are miscounted"
        assert all(count > 0 for count in self._unfinished.values()), "a tenant without requests is unfinished"
        assert all(request.tenant in self._unfinished for request in waiting), "a waiting tenant is not unfinished"
        assert all(tenant in self._unfinished for tenant in self._promoted_at), "a promotion outlived its tenant"

    def _prune(self) -> None:
        """Forget absent tenants who are owed nothing, so that memory follows the tenants in hand."""
        if len(self._virtual_tokens) > 2 * len(self._unfinished) + 1024:
            self._virtual_tokens = {
                tenant: tokens
                for tenant, tokens in self._virtual_tokens.items()
                if tenant in self._unfinished or tokens > self._floor
            }


class FairWalk:
    """One pass over the waiting requests. The caller takes each out of the queue or passes it by."""

    def __init__(self, lanes: dict[PriorityClass, dict[str, list[Request]]], virtual_tokens: dict[str, float]) -> None:
        self._virtual_tokens = virtual_tokens
        self._lanes = [lanes[each] for each in PriorityClass]
        self._heap: list[tuple[float, int, str]] = []
        self._positions: dict[str, int] = {}
        self._current: dict[str, list[Request]] = {}

    def peek(self) -> Request | None:
        """The next request in order, or None at the end."""
        while True:
            while not self._heap:
                if not self._lanes:
                    return None
                self._current = self._lanes.pop(0)
                self._positions = {}
                self._heap = [self._entry(tenant, 0) for tenant in self._current]
                heapq.heapify(self._heap)
            tenant = self._heap[0][2]
            lane = self._current.get(tenant, [])
            position = self._positions.get(tenant, 0)
            if position < len(lane):
                return lane[position]
            heapq.heappop(self._heap)

    def taken(self) -> None:
        """The peeked request has been removed from the queue and charged."""
        tenant = self._heap[0][2]
        lane = self._current.get(tenant, [])
        position = self._positions.get(tenant, 0)
        if position < len(lane):
            heapq.heapreplace(self._heap, self._entry(tenant, position))
        else:
            heapq.heappop(self._heap)

    def pass_by(self) -> None:
        """Leave the peeked request waiting; the tenant's next one may be tried, unless several were in vain."""
        tenant = self._heap[0][2]
        position = self._positions.get(tenant, 0) + 1
        self._positions[tenant] = position
        if position >= _MAX_TRIES_PER_TENANT:
            heapq.heappop(self._heap)

    def pass_by_tenant(self) -> None:
        """Leave all of the peeked tenant's requests of this class waiting."""
        heapq.heappop(self._heap)

    def _entry(self, tenant: str, position: int) -> tuple[float, int, str]:
        return (self._virtual_tokens[tenant], self._current[tenant][position].sequence, tenant)
