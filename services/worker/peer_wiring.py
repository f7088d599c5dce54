"""Builds what a worker does with its peers: the part of wiring that knows the transports."""

from __future__ import annotations

from services.common.clock import Clock
from services.common.grpc_client import dialler
from services.common.metrics import Metrics
from services.common.tls import WORKER, load_tls
from services.worker.config import WorkerConfig
from services.worker.engine_loop import EngineLoop
from services.worker.kv_metrics import PeerMetrics
from services.worker.kv_peers import KVPeers
from services.worker.kv_staging import StagingArea
from services.worker.kv_transport import Reception
from services.worker.load_reporter import LoadBoard, WorkerIdentity
from services.worker.model_source import LoadedModel
from services.worker.prefill_desk import PrefillDesk
from services.worker.remote_prefill import RemotePrefills
from services.worker.runtime.transfers.grpc_stream import GrpcTransfer


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
    transfer = GrpcTransfer()
    peer_metrics = PeerMetrics(metrics, identity.model)
    desk = PrefillDesk(
        identity=identity,
        layout=layout,
        engine=engine,
        board=board,
        transfers=(transfer,),
        metrics=peer_metrics,
        clock=clock,
    )
    remotes = RemotePrefills(
        identity=identity,
        reception=Reception(transfer, staging, layout, config.engine.kv_lease_ms / 1e3),
        engine=engine,
        board=board,
        metrics=peer_metrics,
        dial=dialler(load_tls(config.tls_dir), WORKER),
        clock=clock,
    )
    return KVPeers(desk, remotes, (transfer,))
