"""The requests that hold a slot of the batch, best first, and the slots each tenant has left.

Owns the order and the counts; never touches blocks or the queue. Called by the scheduler only.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter

from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.request import PriorityClass, Request, RequestState
from services.worker.engine.tenant_shares import Room, TenantShares

_by_rank = attrgetter("rank")
# A tenant's name and the weight of its requests against those of other tenants.
Share = tuple[str, float]


class RunningBatch:
    """Running requests sorted by rank; the last one is the first to be preempted."""

    def __init__(self, config: EngineConfig) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._shares = TenantShares(
            config.max_num_seqs,
            reserved={tenant: limits.reserved_slots for tenant, limits in config.tenant_limits.items()},
            cap_of=lambda tenant: config.limits_of(tenant).max_slots,
        )
        self._members: list[Request] = []
        self._by_tenant: dict[str, int] = {}
        self._by_share: dict[Share, int] = {}
        self._count = 0
        self._batch_class_count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """Best first. Those removed since the last `compact` are still met: look at their state."""
        return iter(self._members)

    def worst_first(self) -> Iterator[Request]:
        """Running requests from the one to preempt first."""
        return (request for request in reversed(self._members) if request.state is RequestState.RUNNING)

    @property
    def is_full(self) -> bool:
        return self._count >= self._max_num_seqs

    def limit(self, tenant: str) -> int:
        """The most slots `tenant` can ever hold."""
        return self._shares.limit(tenant)

    def room(self, tenant: str) -> Room:
        """Slots that `tenant` may take now."""
        return self._shares.room(tenant, available=self._max_num_seqs - self._count, held_by=self._held_by)

    def frees_for_others(self, request: Request) -> bool:
        """True when preempting `request` gives a slot to other tenants."""
        return not self._shares.within_reservation(request.tenant, held=self._held_by(request.tenant))

    def has_batch_class(self) -> bool:
        """True when a BATCH request runs."""
        return self._batch_class_count > 0

    def add(self, request: Request) -> None:
        """Give `request` a slot."""
        request.state = RequestState.RUNNING
        insort(self._members, request, key=_by_rank)
        self._by_tenant[request.tenant] = self._held_by(request.tenant) + 1
        share = (request.tenant, request.weight)
        self._by_share[share] = self._by_share.get(share, 0) + 1
        self._count += 1
        self._batch_class_count += request.priority_class is PriorityClass.BATCH

    def remove(self, request: Request, *, state: RequestState) -> None:
        """Take the slot back; the request goes on as `state`. It leaves the order at the next `compact`."""
        request.state = state
        request.decodes_until = 0
        self._by_tenant[request.tenant] -= 1
        if not self._by_tenant[request.tenant]:
            del self._by_tenant[request.tenant]
        share = (request.tenant, request.weight)
        self._by_share[share] -= 1
        if not self._by_share[share]:
            del self._by_share[share]
        self._count -= 1
        self._batch_class_count -= request.priority_class is PriorityClass.BATCH

    def count_by_share(self, *, without: Iterable[Request]) -> dict[Share, int]:
        """How many run of each tenant and weight, those of `without`, all running, left out."""
        counts = self._by_share.copy()
        for request in without:
            counts[request.tenant, request.weight] -= 1
        return counts

    def compact(self) -> None:
        """Drop removed requests from the order. Call before a removed one may be added again."""
        if len(self._members) != self._count:
            self._members = [request for request in self._members if request.state is RequestState.RUNNING]

    def promote(self, request: Request) -> None:
        """Lift a running request to INTERACTIVE."""
        self._batch_class_count -= request.priority_class is PriorityClass.BATCH
        request.priority_class = PriorityClass.INTERACTIVE
        self._members.sort(key=_by_rank)

    def check_invariants(self) -> None:
        """Raise AssertionError when slots are miscounted or the order is off."""
        running = [request for request in self._members if request.state is RequestState.RUNNING]
        assert len(running) == self._count <= self._max_num_seqs, f"{len(running)} run, counted {self._count}"
        assert running == sorted(running, key=_by_rank), "running requests are out of order"
        by_tenant = Counter(request.tenant for request in running)
        by_share = Counter((request.tenant, request.weight) for request in running)
        batch_class = sum(request.priority_class is PriorityClass.BATCH for request in running)
        assert batch_class == self._batch_class_count, "BATCH requests are miscounted"
        assert by_tenant == self._by_tenant, f"tenants run {by_tenant}, counted {self._by_tenant}"
        assert by_share == self._by_share, f"shares run {by_share}, counted {self._by_share}"

    def _held_by(self, tenant: str) -> int:
        return self._by_tenant.get(tenant, 0)
