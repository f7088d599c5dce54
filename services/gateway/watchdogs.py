"""Periodic duties of a gateway: its lease, reservations, the registry, lost or silent requests, its own stalls.

Each loop outlives an absent Redis. Decisions about a request are the core's. Owned by wiring.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable

import structlog

from services.common.admission_store import WORKER_LEASE_MS, AdmissionStore
from services.common.admission_types import Pool
from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.route_watch import RouteWatch
from services.gateway.live_requests import LiveRequest, LiveTable
from services.gateway.model_directory import WorkerDirectory
from services.gateway.tasks import Tasks
from services.gateway.worker_pool import WorkerPool

LEASE_RENEWAL_S = 3.0
RESERVATION_RENEWAL_S = 10.0
REGISTRY_S = 0.5
REQUEST_CHECK_S = 1.0
TICK_S = 0.5
# The registry is read each half second: after so long without an answer Redis hangs.
REACHABLE_S = 4.0
UNBOUND_S = 1.0
SILENT_S = 5.0


class Watchdogs:
    """The loops. They are also who knows whether Redis answers."""

    def __init__(
        self,
        store: AdmissionStore,
        table: LiveTable,
        pool: WorkerPool,
        directory: WorkerDirectory,
        routes: RouteWatch,
        *,
        gateway_instance: str,
    ) -> None:
        self._store = store
        self._table = table
        self._pool = pool
        self._directory = directory
        self._routes = routes
        self._instance = gateway_instance
        self._address = ""
        self._clock: Clock = table.clock
        self._tasks = Tasks()
        self._reached_at: float | None = None
        self._lost_at: float | None = None

    @property
    def store_reachable(self) -> bool:
        """Redis answered a moment ago, and has not failed since."""
        return self._reached_at is not None and self._clock.monotonic() - self._reached_at < REACHABLE_S

    def start(self, address: str) -> None:
        """Begin all loops; `address` is where other gateways reach this one."""
        self._address = address
        self._tasks.spawn(self._every(LEASE_RENEWAL_S, self.renew_lease), name="gateway-lease")
        self._tasks.spawn(self._every(REGISTRY_S, self.read_registry), name="registry")
        self._tasks.spawn(self._every(REQUEST_CHECK_S, self.check_requests), name="check-requests")
        self._tasks.spawn(self._every(RESERVATION_RENEWAL_S, self.renew_reservations), name="reservations")
        self._tasks.spawn(self._tick(), name="tick")

    async def close(self) -> None:
        """End all loops."""
        await self._tasks.close()

    async def renew_lease(self) -> None:
        """Say that this gateway lives."""
        await self._store.renew_gateway(self._instance, self._address)
        self._reached_at = self._clock.monotonic()

    async def read_registry(self) -> None:
        """Learn which workers and routes there are; the last known ones stay while Redis is away."""
        # Routes first: no worker is known, so nothing is admitted, before they were read once.
        await self._routes.refresh()
        records = await self._store.list_workers()
        self._reached_at = self._clock.monotonic()
        self._pool.update(records)
        # A Redis that was away may have lost the workers: each comes again within its lease.
        lost_s = math.inf if self._lost_at is None else self._reached_at - self._lost_at
        self._directory.settled = lost_s >= WORKER_LEASE_MS / 1000
        await self._directory.update(records)

    async def renew_reservations(self) -> None:
        """Extend the reservations of everything live."""
        by_tenant: dict[str, list[str]] = defaultdict(list)
        for request in self._table.requests():
            by_tenant[request.facts.key.tenant].append(request.request_id)
        for tenant, request_ids in by_tenant.items():
            await self._store.renew_reservations(tenant, request_ids)

    async def check_requests(self) -> None:
        """Compare requests without a worker, or silent ones, with what Redis says."""
        now = self._clock.monotonic()
        by_pool: dict[Pool, list[LiveRequest]] = defaultdict(list)
        for request in self._table.requests():
            core = request.core
            waits = now - core.queued_at > UNBOUND_S if core.binding is None else now - core.heard_at > SILENT_S
            if request.admitted and waits:
                by_pool[request.facts.pool].append(request)
        for pool, requests in by_pool.items():
            records = await self._store.read_requests(pool, [request.request_id for request in requests])
            for request, record in zip(requests, records, strict=True):
                alive = record is not None and self._pool.expects(record.worker_instance)
                actions = request.core.on_record(record, self._clock.monotonic(), worker_alive=alive)
                if actions:
                    structlog.get_logger().info("request_checked", request_id=request.request_id, found=len(actions))
                self._table.perform(request, actions)

    async def _every(self, seconds: float, duty: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await duty()
            except StoreUnavailable:
                if self._reached_at is not None:
                    structlog.get_logger().warning("store_away")
                self._reached_at, self._lost_at = None, self._clock.monotonic()
                self._directory.settled = False
            except Exception as error:
                structlog.get_logger().error("duty_failed", error=type(error).__name__, exc_info=error)
            await self._clock.sleep(seconds)

    async def _tick(self) -> None:
        while True:
            self._table.tick()
            await self._clock.sleep(TICK_S)
