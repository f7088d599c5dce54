"""Builds what a worker does with its peers: the part of wiring that knows the transports."""

from __future__ import annotations

import structlog

from services.common.clock import Clock
from services.common.grpc_client import dialler
from services.common.lifecycle import StartupError
from services.common.metrics import Metrics
from services.common.tls import WORKER, load_tls
from services.worker.config import WorkerConfig, WorkerRole
from services.worker.engine_loop import EngineLoop
from services.worker.kv_metrics import PeerMetrics
from services.worker.kv_peers import KVPeers
from services.worker.kv_staging import StagingArea
from services.worker.kv_transport import KVTransfer, Reception, TransferError
from services.worker.load_reporter import LoadBoard, WorkerIdentity
from services.worker.model_source import LoadedModel
from services.worker.prefill_desk import BATCH_BYTES, PrefillDesk
from services.worker.remote_prefill import RemotePrefills
from services.worker.runtime.transfers.grpc_stream import GrpcTransfer
from services.worker.runtime.transfers.nixl import NixlTransfer, nixl_module


def build_peers(
    config: WorkerConfig,
    loaded: LoadedModel,
    identity: WorkerIdentity,
    *,
    engine: EngineLoop,
    board: LoadBoard,
    metrics: Metrics,
    clock: Clock,
) -> KVPeers:
    """Both sides of disaggregation; a worker whose role has no use for a side has it idle."""
    layout = loaded.runner.kv_layout
    staging = StagingArea(block_bytes=layout.block_bytes, area_bytes=config.engine.kv_staging_bytes)
    transfers: tuple[KVTransfer, ...] = (*_nixl(config, identity, staging), GrpcTransfer())
    peer_metrics = PeerMetrics(metrics, identity.model)
    desk = PrefillDesk(
        identity=identity,
        layout=layout,
        engine=engine,
        board=board,
        transfers=transfers,
        metrics=peer_metrics,
        clock=clock,
    )
    remotes = RemotePrefills(
        identity=identity,
        reception=Reception(transfers[0], staging, layout, config.engine.kv_lease_ms / 1e3),
        engine=engine,
        board=board,
        metrics=peer_metrics,
        dial=dialler(load_tls(config.tls_dir), WORKER),
        clock=clock,
    )
    return KVPeers(desk, remotes, transfers)


def _nixl(config: WorkerConfig, identity: WorkerIdentity, staging: StagingArea) -> tuple[NixlTransfer, ...]:
    """NIXL where it is wanted and works. Raises StartupError when it is asked for by name and does not."""
    wanted = config.engine.kv_transfer
    is_asked_for = wanted == "nixl"
    if not is_asked_for and (wanted == "grpc" or identity.role is WorkerRole.AGGREGATED or config.tls_dir):
        return ()
    api = nixl_module()
    if api is None:
        if is_asked_for:
            raise StartupError("kv_transfer=nixl needs the package nixl: install the extra `transfer`.")
        return ()
    try:
        return (NixlTransfer(api, staging, agent=identity.instance, batch=max(1, BATCH_BYTES // staging.block_bytes)),)
    except TransferError as error:
        if is_asked_for:
            raise StartupError(f"kv_transfer=nixl does not work here: {error}.") from error
        structlog.get_logger().warning("nixl_unavailable", detail=str(error))
        return ()
