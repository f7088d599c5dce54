"""The gateway without its doors: admission, attachments, metering and watchdogs, constructed and run as one.

`build_parts` is wiring's other half. Owns the order in which the back starts, drains and stops; never serves a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
import structlog
from millrace.common.v1 import common_pb2

from services.common.admission_store import AdmissionStore
from services.common.admission_types import PoolCaps
from services.common.clock import Clock
from services.common.errors import Draining, MillraceError, NotReady, StoreUnavailable
from services.common.grpc_client import dialler
from services.common.lifecycle import StartupError
from services.common.metrics import Metrics
from services.common.redis_client import connect
from services.common.route_store import RouteStore
from services.common.route_watch import RouteWatch
from services.common.tls import USAGE, WORKER, load_tls
from services.gateway.admission import AdmissionGenerator
from services.gateway.auth import CachedKeyRing
from services.gateway.config import GatewayConfig
from services.gateway.entries import AdmissionSettings
from services.gateway.live_requests import LiveTable
from services.gateway.mirror import MirroringGenerator
from services.gateway.model_directory import WorkerDirectory
from services.gateway.outbox import OUTBOX_BYTES, Outbox
from services.gateway.publisher import UsagePublisher
from services.gateway.redis_ports import CancelBus, LedgerCommits
from services.gateway.store_effects import StoreEffects
from services.gateway.tasks import Tasks
from services.gateway.usage_reader import UsageReader
from services.gateway.watchdogs import Watchdogs
from services.gateway.worker_pool import WorkerPool

LAST_BYTES_S = 2.0
RETRY_AFTER_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class BackParts:
    """The collaborators behind the doors, for the app and for tests that look inside."""

    instance: str
    clock: Clock
    metrics: Metrics
    redis: aioredis.Redis
    store: AdmissionStore
    table: LiveTable
    pool: WorkerPool
    directory: WorkerDirectory
    routes: RouteWatch
    keyring: CachedKeyRing
    outbox: Outbox
    publisher: UsagePublisher
    effects: StoreEffects
    bus: CancelBus
    admission: AdmissionSettings
    usage: UsageReader


class Back:
    """Runs the parts."""

    def __init__(self, parts: BackParts) -> None:
        self.parts = parts
        self.draining = False
        self.generator = AdmissionGenerator(
            parts.store, parts.table, parts.pool, parts.bus, parts.admission, parts.metrics, gate=self.closed_because
        )
        self.mirror = MirroringGenerator(self.generator, parts.directory, lambda: parts.routes.table)
        self.watchdogs = Watchdogs(
            parts.store, parts.table, parts.pool, parts.directory, parts.routes, gateway_instance=parts.instance
        )
        self._tasks = Tasks()
        self._served_before = False

    def closed_because(self) -> MillraceError | None:
        """Why no new work may start now, or None."""
        if self.draining:
            return Draining("The gateway is shutting down.", retry_after_s=RETRY_AFTER_S)
        if self.parts.outbox.full or self.parts.outbox.broken:
            return NotReady("The gateway cannot record usage at the moment.", retry_after_s=RETRY_AFTER_S)
        if not self.watchdogs.store_reachable:
            return StoreUnavailable("The admission store is not reachable.", retry_after_s=RETRY_AFTER_S)
        return None

    def ready(self) -> bool:
        """New work may start, and a model was served at least once."""
        if not self._served_before:
            served = (model.card.model for model in self.parts.directory.models())
            self._served_before = any(self.parts.pool.serves(model.model, model.version) for model in served)
        return self._served_before and self.closed_because() is None

    async def open(self) -> None:
        """Open the outbox, take the routes of the last run. Raises StartupError."""
        try:
            await asyncio.to_thread(self.parts.outbox.open)
        except OSError as error:
            raise StartupError(f"The usage outbox cannot be opened: {error.strerror or error}.") from error
        await asyncio.to_thread(self.parts.routes.load)

    def start(self, address: str) -> None:
        """Begin to publish, watch and attach; `address` is where other gateways reach this one."""
        self.parts.publisher.start()
        self.watchdogs.start(address)
        self._tasks.spawn(self.parts.bus.listen(self.generator.cancel_local), name="cancel-bus")

    async def drain(self, grace_s: float) -> None:
        """Refuse new work at once, let running streams end within the grace, then end them with an error."""
        self.draining = True
        parts = self.parts
        structlog.get_logger().info("draining", live=len(parts.table))
        if not await _within(grace_s, parts.table.wait_empty()):
            parts.table.fail_all()
            await _within(LAST_BYTES_S, parts.table.wait_empty())
        await self._finish_rest()
        await _within(LAST_BYTES_S, parts.publisher.wait_published())

    async def stop(self) -> None:
        """Cut what is left and release everything. Safe after a failed start."""
        parts = self.parts
        self.draining = True
        await self._finish_rest()
        await self._tasks.close()
        await self.mirror.close()
        await self.generator.close()
        await parts.effects.close()
        await parts.pool.close()
        await self.watchdogs.close()
        with contextlib.suppress(StoreUnavailable):
            await parts.store.deregister_gateway(parts.instance)
        await parts.publisher.close()
        await parts.usage.close()
        await parts.outbox.close()
        await parts.redis.aclose()

    async def _finish_rest(self) -> None:
        for request in self.parts.table.requests():
            await request.finish(common_pb2.TERMINAL_STATE_FAILED, common_pb2.FINISH_REASON_ERROR, "DRAINING")


def build_parts(config: GatewayConfig, clock: Clock, instance: str) -> BackParts:
    """The collaborators of one gateway; nothing is opened yet."""
    tls = load_tls(config.tls_dir)
    redis = connect(config.redis_url, tls)
    store = AdmissionStore(redis)
    caps = PoolCaps(requests=config.queue.max_requests, predicted_wait_ms=config.queue.max_wait_ms)
    table = LiveTable(clock)
    dial = dialler(tls, WORKER)
    pool = WorkerPool(instance, table, clock, dial)
    outbox = Outbox(Path(config.data_dir), instance, max_bytes=OUTBOX_BYTES, clock=clock)
    publisher = UsagePublisher(store, outbox, LedgerCommits(redis), clock)
    routes = RouteWatch(RouteStore(redis), Path(config.data_dir) / "routes.json")
    directory = WorkerDirectory(dial=dial, routes=lambda: routes.table)
    if not config.cache_secret:
        structlog.get_logger().warning("cache_secret_random", hint="set MILLRACE_CACHE_SECRET on every gateway")
    secret = config.cache_secret.encode() if config.cache_secret else secrets.token_bytes(32)
    settings = AdmissionSettings(instance, secret, caps, config.latency_targets)
    effects = StoreEffects(store, table, pool, directory, publisher, settings)
    table.effects = effects
    return BackParts(
        instance=instance,
        clock=clock,
        metrics=Metrics(),
        redis=redis,
        store=store,
        table=table,
        pool=pool,
        directory=directory,
        routes=routes,
        keyring=CachedKeyRing(store, clock),
        outbox=outbox,
        publisher=publisher,
        effects=effects,
        bus=CancelBus(redis, instance, clock),
        admission=settings,
        usage=UsageReader(config.usage_address, dialler(tls, USAGE)),
    )


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True
