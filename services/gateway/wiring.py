"""Builds a gateway from its settings: the back (back.py) and the doors in front of it.

Also owns the order of start, drain and stop. Called by __main__ and by tests that run services in one process.

Doors may be shared with another gateway of this machine, which is about to take this one's place or to leave its own to
it (`shared:`): it opens them once it can serve, and who leaves them to another refuses nobody who has come in.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import structlog

from services.common.clock import Clock, SystemClock
from services.common.errors import StoreUnavailable
from services.common.grpc_server import GrpcServer, start_server
from services.common.http_server import HttpServer, listen
from services.common.lifecycle import StartupError, new_instance_id
from services.common.metrics import MetricsServer, start_metrics_server
from services.gateway.app import create_app
from services.gateway.back import Back, build_parts
from services.gateway.batch_lines import LineDoor
from services.gateway.batch_runner import BatchRunner, line_runner
from services.gateway.batch_store import BatchStore, FileStore, batch_database
from services.gateway.config import GatewayConfig
from services.gateway.front_parts import FrontParts
from services.gateway.grammar_checker import GrammarChecker
from services.gateway.grpc_service import SERVICE_NAME, GatewayService
from services.gateway.idempotency_store import IdempotencyStore
from services.gateway.limits import Limits
from services.gateway.peers import Peers
from services.gateway.response_store import SqliteResponseStore
from services.gateway.resumable import ResumableAnswers
from services.gateway.template_renderer import TemplateRenderer
from services.gateway.validation import Validator
from services.gateway.worker_pool import SUBSET_SIZE

# How long a gateway whose doors are shared keeps its own closed, at most, for workers that it cannot reach.
ATTACH_S = 20.0


class GatewayApp:
    """One running gateway."""

    def __init__(self, config: GatewayConfig, back: Back) -> None:
        self.back = back
        self._config = config
        self._shared = config.grpc_listen.startswith("shared:")
        self._renderer = TemplateRenderer()
        self._grammars = GrammarChecker()
        parts = back.parts
        self.answers = ResumableAnswers(
            IdempotencyStore(parts.redis), Peers(parts.store.list_gateways), parts.clock, instance=parts.instance
        )
        store_dir = Path(config.store_dir) if config.store_dir else Path(config.data_dir) / "store"
        self._responses = SqliteResponseStore(store_dir, parts.clock)
        self._database = batch_database(store_dir)
        self._runner: BatchRunner | None = None
        self._store_dir = store_dir
        self._http: HttpServer | None = None
        self._grpc: GrpcServer | None = None
        # Where other gateways reach this one, if not at the gRPC door.
        self._own: GrpcServer | None = None
        self._metrics: MetricsServer | None = None

    @property
    def http_port(self) -> int:
        """Port of the HTTP API, once started."""
        return self._http.port if self._http is not None else 0

    @property
    def grpc_address(self) -> str:
        """Address of the gRPC API, once started."""
        return self._grpc.address if self._grpc is not None else ""

    async def start(self) -> None:
        """Come up in order. Raises StartupError."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def drain(self, grace_s: float) -> None:
        """Refuse new work at once, let running streams end within the grace, then end them with an error."""
        began = self.back.parts.clock.monotonic()
        for server in self._grpc_servers():
            await server.set_serving(False)
        if self._runner is not None:
            self._runner.drain()
        if self._shared and self._http is not None and self._grpc is not None and await self._others_serve():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.gather(self._http.leave(), self._grpc.stop(grace_s))
        await self.back.drain(max(0.0, grace_s - (self.back.parts.clock.monotonic() - began)))

    async def stop(self) -> None:
        """Cut what is left and release everything. Safe after a failed start."""
        if self._http is not None:
            await self._http.stop()
        for server in self._grpc_servers():
            await server.stop(0.5)
        if self._metrics is not None:
            await self._metrics.close()
        if self._runner is not None:
            await self._runner.close()
        await self.answers.close()
        await self.back.stop()
        await self._renderer.close()
        await self._grammars.close()
        await self._responses.close()
        await self._database.close()

    async def _start(self) -> None:
        if self._shared and not self._config.advertise:
            raise StartupError(
                "A shared MILLRACE_GRPC_LISTEN needs MILLRACE_ADVERTISE, an address of this gateway alone."
            )
        back, parts = self.back, self.back.parts
        opened = listen(self._config.http_listen)
        front = FrontParts(
            back.mirror,
            parts.directory,
            parts.keyring,
            parts.clock,
            Validator(parts.directory, self._renderer, self._grammars),
            self.answers,
            self._responses,
            FileStore(self._database, self._store_dir / "files", parts.clock, Limits()),
            BatchStore(self._database, Limits()),
            parts.usage,
        )
        app = create_app(front, metrics=parts.metrics, ready=back.ready)
        self._http = HttpServer(app, opened)
        try:
            # Scrapers of other hosts come here: the public port shows metrics to local peers only.
            where = self._config.metrics_listen
            self._metrics = await start_metrics_server(where, parts.metrics, lambda: True, back.ready)
        except OSError as error:
            raise StartupError(f"The address {where} cannot be bound: is the port taken?") from error
        await back.open()
        service = GatewayService(front)
        await self._renderer.start()
        if self._config.advertise.startswith("unix:"):
            self._own = await start_server(self._config.advertise, service.add_to, service_names=[SERVICE_NAME])
        if self._shared:
            back.start(self._config.advertise)
            await self._reach_workers()
        # The contract is public, so that tools like grpcurl may ask for it.
        self._grpc = await start_server(
            self._config.grpc_listen, service.add_to, service_names=[SERVICE_NAME], reflect=True
        )
        if not self._shared:
            back.start(self._config.advertise or self._grpc.address)
        self._runner = BatchRunner(front.batches, front.files, line_runner(LineDoor(front), front.keyring, parts.clock))
        self._runner.start(parts.redis)
        self._http.start()
        for server in self._grpc_servers():
            await server.set_serving(True)
        structlog.get_logger().info("gateway_started", http_port=self._http.port, grpc=self._grpc.address)

    async def _reach_workers(self) -> None:
        """Until this gateway can serve by all workers that there are; at once where there is none."""
        parts = self.back.parts
        with contextlib.suppress(TimeoutError, StoreUnavailable):
            async with asyncio.timeout(ATTACH_S):
                while decoding := [w for w in await parts.store.list_workers() if w.role != "prefill"]:
                    attached = len(parts.pool.attached_instances())
                    if self.back.ready() and attached >= min(len(decoding), SUBSET_SIZE):
                        return
                    await parts.clock.sleep(0.05)

    async def _others_serve(self) -> bool:
        """Another gateway lives, so whoever comes now finds it behind the shared doors."""
        parts = self.back.parts
        with contextlib.suppress(StoreUnavailable):
            return bool(set(await parts.store.list_gateways()) - {parts.instance})
        return False

    def _grpc_servers(self) -> list[GrpcServer]:
        return [server for server in (self._grpc, self._own) if server is not None]


def build(config: GatewayConfig, *, clock: Clock | None = None, instance: str | None = None) -> GatewayApp:
    """A gateway that is ready to start; nothing is opened yet."""
    clock = clock if clock is not None else SystemClock()
    instance = instance if instance is not None else new_instance_id("gateway")
    return GatewayApp(config, Back(build_parts(config, clock, instance)))
