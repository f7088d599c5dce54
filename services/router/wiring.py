"""Builds a router from its settings: the only place that constructs its collaborators.

Also owns the order of start, drain and stop. Called by __main__ and by tests that run services in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine

import grpc
import redis.asyncio as aioredis
import structlog
from millrace.router.v1 import router_service_pb2_grpc

from services.common.admission_store import AdmissionStore
from services.common.clock import Clock, SystemClock
from services.common.grpc_client import dialler
from services.common.grpc_server import GrpcServer, start_server
from services.common.lifecycle import StartupError, end_tasks, new_instance_id
from services.common.metrics import Metrics, MetricsServer, start_metrics_server
from services.common.redis_client import connect
from services.common.route_store import RouteStore
from services.common.route_watch import RouteWatch
from services.common.tls import OPERATOR, WORKER, access, load_tls
from services.router.claim import ClaimLoop
from services.router.config import RouterConfig
from services.router.dispatcher import Dispatcher
from services.router.policy import RoutingPolicy
from services.router.reaper import Reaper
from services.router.redirect import Redirect
from services.router.registry import EndpointRegistry
from services.router.service import RouterService

SERVICE_NAME = "millrace.router.v1.RouterService"
CALLERS = {"GetStatus": (OPERATOR,), "Drain": (OPERATOR,)}


class RouterApp:
    """One running router."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        instance: str,
        store: AdmissionStore,
        routes: RouteWatch,
        redis: aioredis.Redis,
        clock: Clock,
    ) -> None:
        """`redis` is closed by `stop`."""
        self.instance = instance
        self._tls = load_tls(config.tls_dir)
        self.metrics = Metrics()
        self.registry = EndpointRegistry(store, instance, clock, self._changed, dial=dialler(self._tls, WORKER))
        self._dispatcher = Dispatcher(store, self.registry, self.metrics, clock, router_instance=instance)
        rng = random.Random(instance)  # noqa: S311 - breaks ties, guards nothing
        policy = RoutingPolicy(rng, self.registry.prefixes)
        self.routes = routes
        redirects = Redirect(lambda: self.routes.table)
        self.claims = ClaimLoop(
            store, self.registry, self._dispatcher, policy, redirects, clock, router_instance=instance
        )
        self._clock = clock
        self.reaper = Reaper(store, self.registry, clock)
        self._service = RouterService(
            router_instance=instance,
            registry=self.registry,
            claims=self.claims,
            clock=clock,
            begin_drain=self.begin_drain,
        )
        self._config = config
        self._redis = redis
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._server: GrpcServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._task_died = False

    @property
    def address(self) -> str:
        """Where RouterService answers, once started."""
        return self._server.address if self._server is not None else ""

    @property
    def metrics_port(self) -> int:
        """Port of /metrics and /healthz; 0 before start."""
        return self._metrics_server.port if self._metrics_server is not None else 0

    def healthy(self) -> bool:
        """No task of this process died."""
        return not self._task_died

    def ready(self) -> bool:
        """Healthy, claiming, and Redis answers."""
        return self.healthy() and not self.claims.draining and not self.claims.store_away

    async def start(self) -> None:
        """Come up; Redis and workers may come later. Raises StartupError."""
        try:
            self._metrics_server = await _metrics_server(self, self._config.metrics_listen)
            self._server = await start_server(
                self._config.grpc_listen,
                self._add_service,
                service_names=[SERVICE_NAME],
                access=access(self._tls, CALLERS),
            )
        except BaseException:
            await self.stop()
            raise
        for name, work in (
            ("discover", self.registry.run()),
            ("routes", self.routes.run(self._clock, self._changed)),
            ("claim", self.claims.run()),
            ("own", self._dispatcher.run()),
            ("bell", self.claims.listen()),
            ("keep", self.claims.keep()),
            ("reap", self.reaper.run()),
        ):
            self._spawn(name, work)
        await self._server.set_serving(True)
        structlog.get_logger().info("router_ready", address=self.address)

    def begin_drain(self, grace_s: float) -> None:
        """Drain in the background, by RPC; the process stays until it is told to end."""
        if "drain" not in self._tasks:
            self._spawn("drain", self.drain(grace_s))

    async def drain(self, grace_s: float) -> None:
        """Unready at once; submits under way get the grace; held claims go back to the queue."""
        if self._server is not None:
            await self._server.set_serving(False)
        await self.claims.drain(grace_s)

    async def stop(self) -> None:
        """Release everything. Safe after a failed start."""
        await end_tasks(self._tasks.values())
        self._tasks.clear()
        self.claims.stop()
        await self.registry.close()
        if self._server is not None:
            await self._server.stop(0.5)
        if self._metrics_server is not None:
            await self._metrics_server.close()
        with contextlib.suppress(OSError):
            await self._redis.aclose()

    def _changed(self) -> None:
        self.claims.wake()

    def _add_service(self, server: grpc.aio.Server) -> None:
        router_service_pb2_grpc.add_RouterServiceServicer_to_server(self._service, server)

    def _spawn(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error("task_died", task=task.get_name(), exc_info=error)
            self._task_died = True


def build(
    config: RouterConfig,
    *,
    clock: Clock | None = None,
    store: AdmissionStore | None = None,
    instance: str | None = None,
) -> RouterApp:
    """A router that is ready to start."""
    redis = connect(config.redis_url, load_tls(config.tls_dir))
    return RouterApp(
        config,
        instance=instance if instance is not None else new_instance_id("router"),
        store=store if store is not None else AdmissionStore(redis),
        routes=RouteWatch(RouteStore(redis)),
        redis=redis,
        clock=clock if clock is not None else SystemClock(),
    )


async def _metrics_server(app: RouterApp, listen: str) -> MetricsServer:
    try:
        return await start_metrics_server(listen, app.metrics, app.healthy, app.ready)
    except OSError as error:
        raise StartupError(f"The address {listen} cannot be bound: is the port taken?") from error
