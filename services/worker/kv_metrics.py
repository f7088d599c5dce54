"""What is counted about blocks that move between workers. Called by the prefill desk and the remote prefills."""

from __future__ import annotations

from millrace.common.v1 import common_pb2

from services.common.metrics import Metrics
from services.worker.kv_staging import StagingCounts


class PeerMetrics:
    """Counters and gauges of one worker, labelled with its model."""

    def __init__(self, metrics: Metrics, model: common_pb2.ModelRef) -> None:
        self._metrics = metrics
        self._labels = (model.model, model.version)

    def transferred(self, transport: str, outcome: str, *, received_bytes: int, seconds: float) -> None:
        """A prompt's blocks were asked for and came, or some of them; `outcome` is `imported` or the cause."""
        labels = (*self._labels, transport, outcome)
        self._metrics.transfer_bytes_total.labels(*labels).inc(received_bytes)
        self._metrics.transfer_seconds.labels(*labels).observe(seconds)

    def fell_back(self, cause: str) -> None:
        """A prompt, or the rest of it, is computed here though a peer was asked."""
        self._metrics.prefill_fallbacks_total.labels(*self._labels, cause).inc()

    def orphans(self, count: int) -> None:
        """Blocks that were kept for a peer whose lease ran out."""
        self._metrics.kv_orphan_blocks_total.labels(*self._labels).inc(count)

    def staging(self, counts: StagingCounts) -> None:
        """Slots by state."""
        slots = {"free": counts.free, "leased": counts.leased, "quarantined": counts.quarantined}
        for state, count in slots.items():
            self._metrics.kv_staging_slots.labels(*self._labels, state).set(count)
