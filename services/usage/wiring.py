"""Builds a usage service from its settings: the only place that constructs its collaborators.

Also owns the order of start, drain and stop. Called by __main__ and by tests that run services in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path

import grpc
import structlog
from millrace.usage.v1 import (
    canary_service_pb2,
    canary_service_pb2_grpc,
    route_service_pb2,
    route_service_pb2_grpc,
    usage_service_pb2,
    usage_service_pb2_grpc,
)

from services.common.admission_store import AdmissionStore
from services.common.clock import Clock, SystemClock
from services.common.errors import StoreUnavailable
from services.common.grpc_server import GrpcServer, start_server
from services.common.http_server import HttpServer
from services.common.http_server import listen as open_socket
from services.common.lifecycle import StartupError, end_tasks
from services.common.metrics import Metrics, MetricsServer, start_metrics_server
from services.common.redis_client import connect
from services.common.release import parse_keys
from services.common.route_store import RouteStore
from services.common.tls import GATEWAY, OPERATOR, access, load_tls
from services.usage.account_service import AccountService
from services.usage.accounts import Accounts
from services.usage.admin_http import create_admin_app
from services.usage.admin_keys import AdminKeys
from services.usage.canary.controller import CanaryController, ProgressStore
from services.usage.canary.service import CanaryService
from services.usage.config import UsageConfig
from services.usage.consumer import Consumer
from services.usage.days import Days
from services.usage.hot_copy import HotCopy
from services.usage.price_service import PriceService
from services.usage.rating import Rater
from services.usage.release_gate import ReleaseGate
from services.usage.route_log import RouteLog
from services.usage.route_service import RouteService
from services.usage.seals import Signer, open_signer
from services.usage.service import UsageService
from services.usage.store import Store, open_store
from services.usage.usage_http import usage_routes

_FILES = (usage_service_pb2.DESCRIPTOR, canary_service_pb2.DESCRIPTOR, route_service_pb2.DESCRIPTOR)
_SERVICES = [service for file in _FILES for service in file.services_by_name.values()]
SERVICE_NAMES = tuple(service.full_name for service in _SERVICES)
CALLERS = {method.name: (OPERATOR,) for service in _SERVICES for method in service.methods} | {
    "QueryUsage": (OPERATOR, GATEWAY)
}


class UsageApp:
    """One running usage service."""

    def __init__(self, config: UsageConfig, store: Store, signer: Signer, clock: Clock) -> None:
        self.metrics = Metrics()
        self._config = config
        self._store = store
        self._tls = load_tls(config.tls_dir)
        self._redis = connect(config.redis_url, self._tls)
        self.hot_copy = HotCopy(store, AdmissionStore(self._redis), clock)
        self.accounts = Accounts(store, self.hot_copy, clock)
        self.admins = AdminKeys(store, clock, config.admin_token)
        self.account_service = AccountService(self.accounts, self.admins, store)
        self.route_log = RouteLog(store, RouteStore(self._redis), clock)
        gate, self._workers = ReleaseGate(parse_keys(config.release_keys)), AdmissionStore(self._redis).list_workers
        self.route_service = RouteService(self.route_log, self.admins, gate, clock, self._workers)
        self._http: HttpServer | None = None
        self.rater = Rater(store, clock)
        self.consumer = Consumer(
            self._redis,
            store,
            clock=clock,
            metrics=self.metrics,
            batch_size=config.batch_size,
            on_rows=self.rater.tell,
        )
        self.days = Days(store, signer, clock)
        self.canaries = CanaryController(self._redis, RouteStore(self._redis), clock)
        self.usage_service = UsageService(store, self.admins, signer, self.days)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._server: GrpcServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._task_died = False

    @property
    def address(self) -> str:
        """Where the gRPC services answer, once started."""
        return self._server.address if self._server is not None else ""

    @property
    def admin_port(self) -> int:
        """Port of the administrators' HTTP API, once started."""
        return self._http.port if self._http is not None else 0

    def healthy(self) -> bool:
        """No task of this process died."""
        return not self._task_died

    def ready(self) -> bool:
        """Healthy, and neither Redis nor the database is away."""
        return self.healthy() and not self.consumer.away

    async def start(self) -> None:
        """Come up; Redis may come later. Raises StartupError."""
        try:
            if self._config.bootstrap_key:
                await self._bootstrap()
            listen = self._config.metrics_listen
            try:
                self._metrics_server = await start_metrics_server(listen, self.metrics, self.healthy, self.ready)
            except OSError as error:
                raise StartupError(f"The address {listen} cannot be bound: is the port taken?") from error
            self._http = HttpServer(
                create_admin_app(
                    self.account_service, self.route_service, self.admins, usage_routes(self.usage_service)
                ),
                open_socket(self._config.admin_http_listen),
            )
            self._server = await start_server(
                self._config.grpc_listen, self._add, service_names=SERVICE_NAMES, access=access(self._tls, CALLERS)
            )
        except BaseException:
            await self.stop()
            raise
        self._http.start()
        self._spawn("consume", self.consumer.run())
        self._spawn("hot_copy", self.hot_copy.keep())
        self._spawn("route_log", self.route_log.keep())
        self._spawn("rate", self.rater.run())
        self._spawn("seal_days", self.days.run())
        self._spawn("judge_canaries", self.canaries.run())
        await self._server.set_serving(True)
        structlog.get_logger().info("usage_ready", address=self.address, admin_http_port=self.admin_port)

    async def drain(self, grace_s: float) -> None:
        """Unready at once. What is not in the ledger yet stays pending in Redis for the next start."""
        if self._server is not None:
            await self._server.set_serving(False)
            await self._server.stop(grace_s)

    async def stop(self) -> None:
        """Release everything; a transaction under way ends first. Safe after a failed start."""
        await end_tasks(self._tasks.values())
        self._tasks.clear()
        if self._http is not None:
            await self._http.stop()
        if self._server is not None:
            await self._server.stop(0.5)
        if self._metrics_server is not None:
            await self._metrics_server.close()
        await asyncio.to_thread(self._store.close)
        with contextlib.suppress(OSError):
            await self._redis.aclose()

    async def _bootstrap(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            # Redis may come later: the key is in the database then, and the hot copy follows from it.
            await self.accounts.bootstrap(self._config.bootstrap_key)

    def _add(self, server: grpc.aio.Server) -> None:
        usage_service_pb2_grpc.add_UsageServiceServicer_to_server(self.usage_service, server)
        prices = PriceService(self.rater, self.admins, self.hot_copy.mark_stale)
        usage_service_pb2_grpc.add_PriceServiceServicer_to_server(prices, server)
        usage_service_pb2_grpc.add_AccountServiceServicer_to_server(self.account_service, server)
        route_service_pb2_grpc.add_RouteServiceServicer_to_server(self.route_service, server)
        canaries = CanaryService(ProgressStore(self._redis), self.admins, RouteStore(self._redis), self._workers)
        canary_service_pb2_grpc.add_CanaryServiceServicer_to_server(canaries, server)

    def _spawn(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error("task_died", task=task.get_name(), exc_info=error)
            self._task_died = True


def build(config: UsageConfig, *, clock: Clock | None = None) -> UsageApp:
    """Open and migrate the database; a service that is ready to start. Blocks. Raises StartupError."""
    signer = open_signer(Path(config.data_dir))
    return UsageApp(config, open_store(config.database_url), signer, clock if clock is not None else SystemClock())
