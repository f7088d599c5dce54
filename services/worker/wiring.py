"""Builds a worker from its settings: the only place that constructs its collaborators.

Also owns the order of start, drain and stop. Called by __main__ and by tests that run services in one process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import socket
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

import grpc
import redis.asyncio as aioredis
import structlog
from millrace.worker.v1 import worker_service_pb2_grpc

from services.common.admission_scripts import pool_key, store_errors
from services.common.admission_store import AdmissionStore
from services.common.admission_types import Pool, WorkerRecord
from services.common.clock import Clock, SystemClock
from services.common.grpc_server import GrpcServer, start_server
from services.common.lifecycle import StartupError, end_tasks, new_instance_id
from services.common.metrics import Metrics, MetricsServer, start_metrics_server
from services.common.redis_client import connect
from services.common.routes import prompt_digest
from services.common.tls import GATEWAY, OPERATOR, ROUTER, WORKER, access, load_tls
from services.worker.attach import GatewayHub
from services.worker.attempt_records import AttemptRecorder
from services.worker.config import WorkerConfig
from services.worker.engine.engine import Engine
from services.worker.engine.engine_config import EngineConfig
from services.worker.engine_loop import EngineLoop, LoopReport
from services.worker.grammar_gate import GrammarGate
from services.worker.kv_peers import KVPeers
from services.worker.load_reporter import LoadBoard, LoadMetrics, RegistryLease, WorkerIdentity
from services.worker.model_source import LoadedModel, load_model
from services.worker.peer_wiring import build_peers
from services.worker.requests import RequestTable
from services.worker.runtime.tier_disk import DiskTier
from services.worker.runtime.tier_file import FileFormat
from services.worker.runtime.tier_store import TierStore
from services.worker.service import WorkerService
from services.worker.stages import StageClock
from services.worker.streams import Failure
from services.worker.tenant_caps import TenantCaps
from services.worker.terminals import TerminalWriter
from services.worker.usage_reports import AttemptLog, UsageReporter

SERVICE_NAME = "millrace.worker.v1.WorkerService"
CALLERS = {
    "GetModelCard": (GATEWAY, ROUTER, OPERATOR),
    "GetTokenizer": (GATEWAY,),
    "Submit": (ROUTER,),
    "SubmitStream": (ROUTER,),
    "Attach": (GATEWAY,),
    "Watch": (ROUTER,),
    "WatchCache": (ROUTER,),
    "Drain": (ROUTER, OPERATOR),
    "Prefill": (WORKER,),
}
CANARY_TIMEOUT_S = 120.0
LAST_FRAMES_S = 1.0
# Of the grace of a drain, what is left for others to fetch the blocks of requests that did not end in time.
HAND_OVER_SHARE, HAND_OVER_S = 0.25, 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerParts:
    """The collaborators of one worker, for its app and for tests that look inside.

    `redis` is set when this worker opened it, and so closes it.
    """

    config: WorkerConfig
    identity: WorkerIdentity
    engine: EngineLoop
    table: RequestTable
    board: LoadBoard
    gate: GrammarGate
    hub: GatewayHub
    terminals: TerminalWriter
    metrics: Metrics
    store: AdmissionStore
    redis: aioredis.Redis | None
    clock: Clock
    canary_token_id: int
    service: WorkerService
    tiers: TierStore | None
    reporter: UsageReporter
    peers: KVPeers
    stages: StageClock

    def on_report(self, report: LoopReport) -> None:
        """Tell everybody what the engine did: peers first, so that what has ended for a gateway has ended for them."""
        self.peers.on_report(report)
        self.hub.on_report(report)


class WorkerApp:
    """One running worker."""

    def __init__(self, parts: WorkerParts) -> None:
        self.parts = parts
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._server: GrpcServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._lease: RegistryLease | None = None
        self._task_died = False

    @property
    def instance(self) -> str:
        return self.parts.identity.instance

    @property
    def address(self) -> str:
        """Where others reach this worker, once started."""
        config = self.parts.config
        if config.advertise or self._server is None:
            return config.advertise
        host, _, port = self._server.address.rpartition(":")
        return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]", "") else self._server.address  # noqa: S104

    @property
    def metrics_port(self) -> int:
        """Port of /metrics and /healthz; 0 before start."""
        return self._metrics_server.port if self._metrics_server is not None else 0

    def healthy(self) -> bool:
        """The engine makes progress and no task of this process died."""
        return self.parts.engine.healthy() and not self._task_died

    def record(self) -> WorkerRecord:
        """This worker's entry in the registry; complete once started."""
        identity = self.parts.identity
        model = identity.model
        return WorkerRecord(
            identity.instance,
            self.address,
            model.model,
            model.version,
            identity.pool,
            role=identity.role.value,
            digest=model.manifest_digest.hex(),
        )

    async def start(self) -> None:
        """Come up in order; ready only after a generated canary token. Raises StartupError."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def drain(self, grace_s: float) -> None:
        """Refuse new work at once, let running streams end within the grace, tell the rest, leave the registry."""
        await self._end_streams(grace_s)
        await self._end_task("lease")
        if self._lease is not None:
            await self._lease.end()

    async def stop(self) -> None:
        """Cut what is left and release everything. Safe after a failed start."""
        parts = self.parts
        for name in list(self._tasks):
            await self._end_task(name)
        parts.hub.close_sessions()
        await parts.gate.close()
        await parts.peers.close()
        if self._server is not None:
            await self._server.stop(0.5)
        if not await parts.engine.stop():
            structlog.get_logger().error("engine_thread_stuck")
        if parts.tiers is not None:
            await asyncio.to_thread(parts.tiers.close)
        if len(parts.terminals):
            await parts.terminals.flush()
        await parts.reporter.flush(last=True)
        if self._metrics_server is not None:
            await self._metrics_server.close()
        if parts.redis is not None:
            await parts.redis.aclose()

    def begin_drain(self, grace_s: float) -> None:
        """Drain in the background, by RPC; the process stays until it is told to end."""
        if "drain" not in self._tasks:
            self._spawn("drain", self._end_streams(grace_s))

    async def _start(self) -> None:
        parts, config = self.parts, self.parts.config
        self._metrics_server = await _metrics_server(self)
        parts.engine.start(parts.on_report)
        parts.stages.ended("wiring")
        try:
            await parts.engine.canary(parts.canary_token_id, CANARY_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            raise StartupError("The engine did not generate its first token; see the log above.") from error
        parts.stages.ended("canary")
        self._server = await start_server(
            config.grpc_listen,
            self._add_service,
            service_names=[SERVICE_NAME],
            access=access(load_tls(config.tls_dir), CALLERS),
        )
        parts.board.started = True
        await self._server.set_serving(True)
        self._lease = RegistryLease(parts.store, self.record(), parts.clock)
        self._spawn("lease", self._lease.run())
        self._spawn("sweep", parts.hub.sweep())
        self._spawn("terminals", parts.terminals.run())
        self._spawn("usage", parts.reporter.run())
        model, stages_s = parts.identity.model.model, parts.stages.seconds
        structlog.get_logger().info("worker_ready", address=self.address, model=model, stages_s=stages_s)

    async def _end_streams(self, grace_s: float) -> None:
        parts = self.parts
        parts.board.draining = True
        parts.board.touch()
        if self._server is not None:
            await self._server.set_serving(False)
        hand_over_s = min(HAND_OVER_S, HAND_OVER_SHARE * grace_s)
        gives_up_at = parts.clock.monotonic() + grace_s
        if not await parts.hub.wait_ended(grace_s - hand_over_s):
            parts.peers.desk.offer(parts.table.begun())
            parts.hub.fail_all(Failure("DRAINING", "The worker is leaving.", retryable=True))
            await parts.hub.wait_ended(LAST_FRAMES_S)
        if not await parts.peers.desk.wait_ended(gives_up_at - parts.clock.monotonic()):
            parts.peers.desk.fail_all()
            await parts.peers.desk.wait_ended(LAST_FRAMES_S)

    def _add_service(self, server: grpc.aio.Server) -> None:
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self.parts.service, server)

    def _spawn(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = self._tasks[name] = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error("task_died", task=task.get_name(), exc_info=error)
            self._task_died = True

    async def _end_task(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            await end_tasks([task])


def build(
    config: WorkerConfig,
    *,
    clock: Clock | None = None,
    store: AdmissionStore | None = None,
    model: LoadedModel | None = None,
    instance: str | None = None,
) -> WorkerApp:
    """A worker that is ready to start; loads the model when none is given. Raises StartupError."""
    clock = clock if clock is not None else SystemClock()
    loaded = model if model is not None else load_model(config)
    card = loaded.served.card
    identity = _identity(config, loaded, instance if instance is not None else new_instance_id("worker"))
    redis = None
    if store is None:
        redis = connect(config.redis_url, load_tls(config.tls_dir))
        store = AdmissionStore(redis)
    metrics, table, tiers = Metrics(), RequestTable(), _tiers(config, loaded, clock)
    engine = EngineLoop(_engine(config, loaded, tiers, table.caps), clock=clock)
    gate = GrammarGate(engine, loaded.grammars)
    board = LoadBoard(identity, table, engine, LoadMetrics(metrics, card.model), clock)
    terminals, log = TerminalWriter(store, clock), AttemptLog(identity.instance)
    reporter = UsageReporter(log, _publisher(redis, identity.pool), identity, lambda: engine.time_spent, clock)
    hub = GatewayHub(
        worker_instance=identity.instance,
        table=table,
        engine=gate,
        board=board,
        recorder=AttemptRecorder(metrics, log),
        terminals=terminals,
        clock=clock,
    )
    peers = build_peers(config, loaded, identity, engine=engine, board=board, metrics=metrics, clock=clock)
    peers.desk.on_open = log.open_for_peer
    service = WorkerService(
        identity=identity, model=loaded.served, table=table, hub=hub, board=board, peers=peers, clock=clock
    )
    parts = WorkerParts(
        config,
        identity,
        engine,
        table,
        board,
        gate,
        hub,
        terminals,
        metrics,
        store,
        redis,
        clock,
        card.bos_token_id if card.HasField("bos_token_id") else min(card.eos_token_ids, default=0),
        service,
        tiers,
        reporter,
        peers,
        loaded.stages,
    )
    gate.on_report = parts.on_report
    service.begin_drain = (app := WorkerApp(parts)).begin_drain
    return app


def _publisher(redis: aioredis.Redis | None, pool: Pool) -> Callable[[bytes], Awaitable[None]]:
    """Appends a report to the usage stream of `pool`; without Redis of its own a worker tells nobody."""

    async def publish(report: bytes) -> None:
        if redis is not None:
            with store_errors():
                await redis.xadd(pool_key(pool, "usage"), {"w": report})

    return publish


def _identity(config: WorkerConfig, loaded: LoadedModel, instance: str) -> WorkerIdentity:
    card = loaded.served.card
    return WorkerIdentity(
        instance=instance,
        model=card.model,
        pool=Pool(card.model.model, config.pool),
        max_num_seqs=card.max_num_seqs,
        block_size=card.block_size,
        block_count=card.block_count,
        role=config.engine.role,
        kv_token_bytes=math.ceil(loaded.runner.kv_layout.block_bytes / card.block_size),
        prompt_digest=prompt_digest(card.tokenizer_digest, card.chat_template, add_bos=card.add_bos),
    )


def _model_version(loaded: LoadedModel) -> str:
    """What cached keys and values belong to."""
    model = loaded.served.card.model
    return f"{model.model}@{model.version}:{model.manifest_digest.hex()}"


def _tiers(config: WorkerConfig, loaded: LoadedModel, clock: Clock) -> TierStore | None:
    """Where cached blocks go that the pool gives up; None when both tiers are off."""
    knobs, layout = config.engine, loaded.runner.kv_layout
    disk = None
    if knobs.disk_kv_bytes:
        form = FileFormat(layout, _model_version(loaded))
        path = Path(knobs.disk_kv_path).expanduser()
        disk = DiskTier(path, form, capacity_bytes=knobs.disk_kv_bytes, clock=clock)
    if disk is None and not knobs.host_kv_bytes:
        return None
    return TierStore(host_bytes=knobs.host_kv_bytes, block_bytes=layout.block_bytes, disk=disk, clock=clock)


def _engine(config: WorkerConfig, loaded: LoadedModel, tiers: TierStore | None, caps: TenantCaps) -> Engine:
    knobs = config.engine
    left = knobs.max_num_batched_tokens - knobs.max_num_seqs
    if left < knobs.max_prefill_chunk:
        structlog.get_logger().warning("prompts_wait_for_a_full_batch", prompt_tokens_a_step=left)
    try:
        return Engine(
            loaded.runner,
            EngineConfig(
                model_version=_model_version(loaded),
                max_num_seqs=knobs.max_num_seqs,
                max_num_batched_tokens=knobs.max_num_batched_tokens,
                max_prefill_chunk=knobs.max_prefill_chunk,
                step_time_target_s=knobs.tpot_target_ms / 1000 or None,
                max_draft_count=knobs.max_draft_count,
                max_draft_batch=knobs.max_draft_batch,
                tenant_limits=caps,
            ),
            tiers=tiers,
            proposer=loaded.proposer,
        )
    except (ValueError, RuntimeError) as error:
        raise StartupError(f"The engine cannot work with these settings: {error}.") from error


async def _metrics_server(app: WorkerApp) -> MetricsServer:
    listen = app.parts.config.metrics_listen
    try:
        return await start_metrics_server(
            listen, app.parts.metrics, app.healthy, lambda: app.healthy() and app.parts.board.ready
        )
    except OSError as error:
        raise StartupError(f"The address {listen} cannot be bound: is the port taken?") from error
