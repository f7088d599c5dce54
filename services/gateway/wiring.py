"""Builds a gateway from its settings: the only place that constructs its collaborators.

Also owns the order of start, drain and stop. Called by __main__ and by tests that run services in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from pathlib import Path

import redis.asyncio as aioredis
import structlog
from millrace.common.v1 import common_pb2

from services.common.admission_store import AdmissionStore
from services.common.admission_types import PoolCaps
from services.common.clock import Clock, SystemClock
from services.common.errors import Draining, MillraceError, NotReady, StoreUnavailable
from services.common.grpc_server import GrpcServer, start_server
from services.common.lifecycle import StartupError, new_instance_id
from services.common.metrics import Metrics
from services.common.redis_client import connect
from services.gateway.admission import AdmissionGenerator, AdmissionSettings
from services.gateway.app import create_app
from services.gateway.auth import CachedKeyRing
from services.gateway.config import GatewayConfig
from services.gateway.grpc_service import SERVICE_NAME, GatewayService
from services.gateway.http_server import HttpServer, listen
from services.gateway.live_requests import LiveTable
from services.gateway.model_directory import WorkerDirectory
from services.gateway.outbox import Outbox
from services.gateway.publisher import UsagePublisher
from services.gateway.redis_ports import CancelBus, LedgerCommits
from services.gateway.store_effects import StoreEffects
from services.gateway.tasks import Tasks
from services.gateway.template_renderer import TemplateRenderer
from services.gateway.watchdogs import Watchdogs
from services.gateway.worker_pool import WorkerPool

LAST_BYTES_S = 2.0
RETRY_AFTER_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayParts:
    """The collaborators of one gateway, for its app and for tests that look inside."""

    config: GatewayConfig
    instance: str
    clock: Clock
    metrics: Metrics
    redis: aioredis.Redis
    store: AdmissionStore
    table: LiveTable
    pool: WorkerPool
    directory: WorkerDirectory
    keyring: CachedKeyRing
    outbox: Outbox
    publisher: UsagePublisher
    effects: StoreEffects
    bus: CancelBus
    renderer: TemplateRenderer


class GatewayApp:
    """One running gateway."""

    def __init__(self, parts: GatewayParts, settings: AdmissionSettings) -> None:
        self.parts = parts
        self.draining = False
        self.generator = AdmissionGenerator(
            parts.store, parts.table, parts.pool, parts.bus, settings, parts.metrics, gate=self.closed_because
        )
        self._tasks = Tasks()
        self._http: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        self._watchdogs: Watchdogs | None = None
        self._served_before = False

    @property
    def http_port(self) -> int:
        """Port of the HTTP API, once started."""
        return self._http.port if self._http is not None else 0

    @property
    def grpc_address(self) -> str:
        """Address of the gRPC API, once started."""
        return self._grpc.address if self._grpc is not None else ""

    def closed_because(self) -> MillraceError | None:
        """Why no new work may start now, or None."""
        if self.draining:
            return Draining("The gateway is shutting down.", retry_after_s=RETRY_AFTER_S)
        if self.parts.outbox.full or self.parts.outbox.broken:
            return NotReady("The gateway cannot record usage at the moment.", retry_after_s=RETRY_AFTER_S)
        if self._watchdogs is None or not self._watchdogs.store_reachable:
            return StoreUnavailable("The admission store is not reachable.", retry_after_s=RETRY_AFTER_S)
        return None

    def ready(self) -> bool:
        """New work may start, and a model was served at least once."""
        if not self._served_before:
            served = (model.card.model for model in self.parts.directory.models())
            self._served_before = any(self.parts.pool.serves(model.model, model.version) for model in served)
        return self._served_before and self.closed_because() is None

    async def start(self) -> None:
        """Come up in order. Raises StartupError."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def drain(self, grace_s: float) -> None:
        """Refuse new work at once, let running streams end within the grace, then end them with an error."""
        self.draining = True
        parts = self.parts
        if self._grpc is not None:
            await self._grpc.set_serving(False)
        structlog.get_logger().info("draining", live=len(parts.table))
        if not await _within(grace_s, parts.table.wait_empty()):
            parts.table.fail_all()
            await _within(LAST_BYTES_S, parts.table.wait_empty())
        for request in parts.table.requests():
            await request.finish(common_pb2.TERMINAL_STATE_FAILED, common_pb2.FINISH_REASON_ERROR, "DRAINING")
        await _within(LAST_BYTES_S, parts.publisher.wait_published())

    async def stop(self) -> None:
        """Cut what is left and release everything. Safe after a failed start."""
        parts = self.parts
        self.draining = True
        if self._http is not None:
            await self._http.stop()
        if self._grpc is not None:
            await self._grpc.stop(0.5)
        for request in parts.table.requests():
            await request.finish(common_pb2.TERMINAL_STATE_FAILED, common_pb2.FINISH_REASON_ERROR, "DRAINING")
        await self.generator.close()
        await parts.effects.close()
        await parts.pool.close()
        if self._watchdogs is not None:
            await self._watchdogs.close()
            with contextlib.suppress(StoreUnavailable):
                await parts.store.deregister_gateway(parts.instance)
        await self._tasks.close()
        await parts.publisher.close()
        await parts.outbox.close()
        await parts.renderer.close()
        await parts.redis.aclose()

    async def _start(self) -> None:
        parts, config = self.parts, self.parts.config
        opened = listen(config.http_listen)
        try:
            await asyncio.to_thread(parts.outbox.open)
        except OSError as error:
            raise StartupError(
                f"The outbox in {config.data_dir} cannot be opened: {error.strerror or error}."
            ) from error
        app = create_app(
            self.generator,
            parts.directory,
            parts.keyring,
            metrics=parts.metrics,
            ready=self.ready,
            clock=parts.clock,
            renderer=parts.renderer,
        )
        service = GatewayService(
            self.generator, parts.directory, parts.keyring, clock=parts.clock, renderer=parts.renderer
        )
        self._grpc = await start_server(config.grpc_listen, service.add_to, service_names=[SERVICE_NAME])
        self._http = HttpServer(app, opened)
        self._watchdogs = Watchdogs(
            parts.store,
            parts.table,
            parts.pool,
            parts.directory,
            gateway_instance=parts.instance,
            address=config.advertise or self._grpc.address,
        )
        await parts.renderer.start()
        parts.publisher.start()
        self._watchdogs.start()
        self._tasks.spawn(parts.bus.listen(self.generator.cancel_local), name="cancel-bus")
        self._http.start()
        await self._grpc.set_serving(True)
        structlog.get_logger().info("gateway_started", http_port=self._http.port, grpc=self._grpc.address)


def build(config: GatewayConfig, *, clock: Clock | None = None, instance: str | None = None) -> GatewayApp:
    """A gateway that is ready to start; nothing is opened yet."""
    clock = clock if clock is not None else SystemClock()
    instance = instance if instance is not None else new_instance_id("gateway")
    redis = connect(config.redis_url)
    store = AdmissionStore(redis)
    caps = PoolCaps(requests=config.queue_max_requests, predicted_wait_ms=config.queue_max_wait_ms)
    table = LiveTable(clock)
    pool = WorkerPool(instance, table, clock)
    outbox = Outbox(Path(config.data_dir), instance, max_bytes=config.outbox_max_bytes, clock=clock)
    publisher = UsagePublisher(store, outbox, LedgerCommits(redis), clock)
    effects = StoreEffects(store, table, pool, publisher, caps)
    table.effects = effects
    parts = GatewayParts(
        config=config,
        instance=instance,
        clock=clock,
        metrics=Metrics(),
        redis=redis,
        store=store,
        table=table,
        pool=pool,
        directory=WorkerDirectory(),
        keyring=CachedKeyRing(store, clock),
        outbox=outbox,
        publisher=publisher,
        effects=effects,
        bus=CancelBus(redis, instance, clock),
        renderer=TemplateRenderer(),
    )
    if not config.cache_secret:
        structlog.get_logger().warning("cache_secret_random", hint="set MILLRACE_CACHE_SECRET on every gateway")
    secret = config.cache_secret.encode() if config.cache_secret else secrets.token_bytes(32)
    return GatewayApp(parts, AdmissionSettings(instance, secret, caps))


async def _within(seconds: float, work: object) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await work  # type: ignore[misc]
    except TimeoutError:
        return False
    return True
