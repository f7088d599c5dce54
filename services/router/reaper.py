"""Ends what nobody else can end: requests whose gateway is gone, and reservations that nobody settled.

A gateway is dead when its lease expired and no live worker reports it attached, twice in a row. Nothing is reaped until
Redis and this router's own connection are both older than two leases. What a live worker owns is that worker's to end,
until two leases after its deadline. Every act is idempotent; many routers may reap.
"""

from __future__ import annotations

import contextlib
import math

import structlog
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_store import BATCH, GATEWAY_LEASE_MS, AdmissionStore
from services.common.admission_types import Pool, RequestPhase, RequestRecord, Terminal
from services.common.clock import Clock
from services.common.errors import GatewayLost, StoreUnavailable
from services.router.registry import EndpointRegistry

REAP_PERIOD_S = 2.0
QUIET_S = 2 * GATEWAY_LEASE_MS / 1000
UNSETTLED_MIN_AGE_MS = GATEWAY_LEASE_MS


class Reaper:
    """Sweeps all pools."""

    def __init__(self, store: AdmissionStore, registry: EndpointRegistry, clock: Clock) -> None:
        self._store = store
        self._registry = registry
        self._clock = clock
        self._connected_at = math.inf
        self._redis = ""
        self._suspects: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Sweep each two seconds until cancelled."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self.sweep()
            await self._clock.sleep(REAP_PERIOD_S)

    async def sweep(self) -> int:
        """One round; returns how many requests it ended. Raises StoreUnavailable."""
        try:
            if not await self._quiet():
                return 0
            pools = await self._store.list_pools()
            for pool in pools:
                await self._settle(pool)
            return await self._reap(pools)
        except StoreUnavailable:
            self._connected_at = math.inf
            self._suspects = frozenset()
            raise

    async def _quiet(self) -> bool:
        """Redis and our connection to it are old enough that every live lease has been renewed."""
        uptime_s, identity = await self._store.uptime()
        now = self._clock.monotonic()
        if identity != self._redis or self._connected_at == math.inf:
            self._redis = identity
            self._connected_at = now
        return uptime_s >= QUIET_S and now - self._connected_at >= QUIET_S

    async def _settle(self, pool: Pool) -> None:
        rows = await self._store.list_unsettled(pool, UNSETTLED_MIN_AGE_MS)
        for row in rows:
            if row.tenant:
                await self._store.settle(row.tenant, row.request_id, row.computed_tokens, row.billed_tokens)
        await self._store.clear_unsettled(pool, [row.request_id for row in rows])

    async def _reap(self, pools: list[Pool]) -> int:
        live = {pool: await self._store.list_live(pool) for pool in pools}
        alive = set(await self._store.list_gateways())
        now = self._clock.monotonic()
        for endpoint in self._registry.endpoints():
            if endpoint.view is not None and endpoint.fresh(now):
                alive |= endpoint.view.attached_gateways
        missing = frozenset(gateway for requests in live.values() for gateway in requests.values()) - alive
        dead, self._suspects = missing & self._suspects, missing
        if not dead:
            return 0
        workers = {record.instance for record in await self._store.list_workers()}
        workers |= {endpoint.instance for endpoint in self._registry.endpoints() if endpoint.fresh(now)}
        count = 0
        for pool, requests in live.items():
            lost = [request_id for request_id, gateway in requests.items() if gateway in dead]
            for start in range(0, len(lost), BATCH):
                count += await self._end(pool, lost[start : start + BATCH], workers)
        return count

    async def _end(self, pool: Pool, request_ids: list[str], workers: set[str]) -> int:
        records = await self._store.read_requests(pool, request_ids)
        terminals = [
            self._terminal(record)
            for record in records
            if record is not None
            and record.phase is not RequestPhase.FINISHED
            and not (record.worker_instance in workers and self._is_workers(record))
        ]
        results = await self._store.finish(pool, terminals)
        for terminal, result in zip(terminals, results, strict=True):
            await self._store.settle(result.tenant, terminal.request_id, result.computed_tokens, result.billed_tokens)
        await self._store.clear_unsettled(pool, [terminal.request_id for terminal in terminals])
        won = sum(result.won for result in results)
        if won:
            structlog.get_logger().warning("requests_reaped", pool=pool.tag, count=won)
        return won

    def _is_workers(self, record: RequestRecord) -> bool:
        """A live worker ends its own requests: only it knows what was delivered. Past the deadline it has none."""
        if record.phase is not RequestPhase.OWNED:
            return False
        deadline = usage_event_pb2.UsageEvent.FromString(record.prebuilt_event).times.end_time
        return self._clock.wall() < deadline.ToNanoseconds() / 1e9 + QUIET_S

    def _terminal(self, record: RequestRecord) -> Terminal:
        """Nothing is billed for a request that never ran; the prompt only where gateway and worker both died."""
        event = usage_event_pb2.UsageEvent.FromString(record.prebuilt_event)
        event.terminal_state = common_pb2.TERMINAL_STATE_FAILED
        event.error_reason = GatewayLost.row.reason
        event.epoch = record.epoch
        event.worker_instance = record.worker_instance
        event.times.end_time.FromMilliseconds(int(self._clock.wall() * 1000))
        ran = record.phase is RequestPhase.OWNED or record.attempt > 1
        prompt_token_count = event.delivered.prompt_token_count if ran else 0
        event.billed.prompt_token_count = prompt_token_count
        return Terminal(record.tenant, record.request_id, 0, event.terminal_state, prompt_token_count, event)
