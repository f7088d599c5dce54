"""Says how much room this worker has: to routers by Watch, to the registry by lease, to people by metrics.

Owns the last known engine counts and the draining and ready marks. Decides nothing about requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import structlog
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Pool, WorkerRecord
from services.common.clock import Clock
from services.common.errors import MillraceError
from services.common.metrics import Metrics
from services.worker import wire
from services.worker.cache_board import CacheBoard
from services.worker.config import WorkerRole
from services.worker.engine.outputs import EngineStats
from services.worker.engine_loop import EngineLoop
from services.worker.prefill_rate import PrefillRate
from services.worker.requests import RequestTable
from services.worker.view_feed import ViewFeed

LEASE_S = 5.0
# Block counts change each step; only a change of this part of the pool is worth a message of its own.
_BLOCK_STEPS = 32
# With so many slots and this part of the blocks free, no router waits to hear of more: it claims 32 requests at once.
_PLENTY_SLOTS = 32
_PLENTY_BLOCKS = 0.5
_ROLES: dict[WorkerRole, common_pb2.WorkerRole.ValueType] = {
    WorkerRole.AGGREGATED: common_pb2.WORKER_ROLE_AGGREGATED,
    WorkerRole.PREFILL: common_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: common_pb2.WORKER_ROLE_DECODE,
}


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this worker is and what it can hold; `kv_token_bytes` is what a token takes in a transfer."""

    instance: str
    model: common_pb2.ModelRef
    pool: Pool
    max_num_seqs: int
    block_size: int
    block_count: int
    role: WorkerRole = WorkerRole.AGGREGATED
    kv_token_bytes: int = 0
    prompt_digest: bytes = b""


class LoadBoard:
    """The worker's room as of now, and a change signal for watchers."""

    def __init__(
        self, identity: WorkerIdentity, table: RequestTable, engine: EngineLoop, metrics: LoadMetrics, clock: Clock
    ) -> None:
        self._identity = identity
        self._metrics = metrics
        self._table = table
        self._engine = engine
        self._stats: EngineStats | None = None
        self._prefill_rate = PrefillRate()
        self._shown: tuple[object, ...] = ()
        self._shown_tight = True
        self.views = ViewFeed(self._message, clock)
        self.cache = CacheBoard(identity.instance)
        self.draining = False
        # Prompts being computed for peers, and how fast blocks of peers come, in bytes a second.
        self.prefill_count = 0
        self.transfer_rate: float | None = None
        self.started = False

    @property
    def ready(self) -> bool:
        """New work is welcome: the canary came, the engine beats, no drain."""
        return self.started and not self.draining and self._engine.healthy()

    @property
    def stats(self) -> EngineStats | None:
        """Engine counts of the newest report."""
        return self._stats

    def free_slots(self) -> int:
        """Choices that the batch still has room for."""
        return max(0, self._identity.max_num_seqs - self._table.slot_count - self.prefill_count)

    def free_blocks(self) -> int:
        """Blocks that a new prompt could take now, those promised to accepted prompts excluded."""
        stats = self._stats
        free = self._identity.block_count if stats is None else stats.free_block_count + stats.cached_block_count
        return max(0, free - self._table.pending_block_count)

    def update(self, stats: EngineStats, step_seconds: list[float]) -> None:
        """Take the engine's newest counts and how long its steps took."""
        self._stats = stats
        self._prefill_rate.note(stats, step_seconds)
        self._metrics.update(stats, step_seconds)

    def touch(self) -> None:
        """Something may have changed: wake the watchers if it is worth a message."""
        step = max(1, self._identity.block_count // _BLOCK_STEPS)
        slots, blocks = self.free_slots(), self.free_blocks()
        state = self._table.attached_gateways(), self.draining, self.ready, self.prefill_count
        shown = (slots, blocks // step, *state)
        if shown == self._shown:
            return
        before, self._shown = self._shown, shown
        was_tight = self._shown_tight
        self._shown_tight = slots < _PLENTY_SLOTS or blocks < _PLENTY_BLOCKS * self._identity.block_count
        if was_tight or self._shown_tight or before[2:] != state:
            self.views.press()
        else:
            self.views.note()

    def _message(self, sequence: int) -> worker_service_pb2.WatchResponse:
        """The present state."""
        identity, stats = self._identity, self._stats
        message = worker_service_pb2.WatchResponse(
            worker_instance=identity.instance,
            sequence=sequence,
            model=identity.model,
            pool=pool_ref(identity.pool),
            role=_ROLES[identity.role],
            free_slot_count=self.free_slots(),
            free_block_count=self.free_blocks(),
            block_size=identity.block_size,
            running_count=stats.running_count if stats else 0,
            waiting_count=stats.waiting_count if stats else 0,
            backlog_token_count=(stats.backlog_token_count if stats else 0) + self._engine.untold_token_count,
            attached_gateways=self._table.attached_gateways(),
            draining=self.draining,
            ready=self.ready,
            in_flight_count=len(self._table.unfinished()) + self.prefill_count,
            kv_token_byte_count=identity.kv_token_bytes,
            prompt_digest=identity.prompt_digest,
            suspect_count=self._table.suspect_count,
            prefill_rate_token_count=self._prefill_rate.per_second,
        )
        if self.transfer_rate is not None:
            message.transfer_rate_byte_count = round(self.transfer_rate)
        age = self._engine.progress_age()
        if age is not None:
            message.progress_age.CopyFrom(wire.duration_of(max(0.0, age)))
        return message


def pool_ref(pool: Pool) -> common_pb2.PoolRef:
    """The wire's name of a pool."""
    return common_pb2.PoolRef(model=pool.model, pool=pool.pool, shard=pool.shard)


class RegistryLease:
    """Keeps this worker in the registry. Redis away changes nothing here: the lease comes back with Redis."""

    def __init__(self, store: AdmissionStore, record: WorkerRecord, clock: Clock) -> None:
        self._store = store
        self._record = record
        self._clock = clock
        self._away = False

    async def run(self) -> None:
        """Renew at a third of the lease until cancelled."""
        while True:
            await self._renew()
            await self._clock.sleep(LEASE_S / 3)

    async def end(self) -> None:
        """Leave the registry; a failure only means that the lease runs out by itself."""
        try:
            await self._store.deregister_worker(self._record)
        except MillraceError as error:
            structlog.get_logger().warning("deregister_failed", reason=error.row.reason)

    async def _renew(self) -> None:
        try:
            await self._store.register_worker(self._record)
        except MillraceError as error:
            if not self._away:
                structlog.get_logger().warning("registry_away", reason=error.row.reason)
            self._away = True
            return
        if self._away:
            structlog.get_logger().info("registry_back")
        self._away = False


class LoadMetrics:
    """Turns engine counts into gauges and counters."""

    def __init__(self, metrics: Metrics, model: common_pb2.ModelRef) -> None:
        labels = (model.model, model.version)
        self._running = metrics.running.labels(*labels)
        self._waiting = metrics.waiting.labels(*labels)
        self._backlog = metrics.backlog_tokens.labels(*labels)
        self._blocks_used = metrics.kv_blocks_used.labels(*labels)
        self._blocks_total = metrics.kv_blocks_total.labels(*labels)
        self._tier_bytes = {tier: metrics.tier_bytes.labels(*labels, tier) for tier in ("host", "disk")}
        self._disk_on = metrics.disk_tier_on.labels(*labels)
        self._step_seconds = metrics.step_seconds.labels(*labels)
        self._totals: list[tuple[Callable[[float], None], Callable[[EngineStats], int]]] = [
            (metrics.preemptions_total.labels(*labels).inc, lambda s: s.preemption_total),
            (metrics.prefix_query_tokens_total.labels(*labels).inc, lambda s: s.prefix_query_token_total),
            (metrics.prefix_hit_tokens_total.labels(*labels).inc, lambda s: s.prefix_hit_token_total),
            (metrics.prompt_tokens_total.labels(*labels).inc, lambda s: s.prefill_token_total),
            (metrics.completion_tokens_total.labels(*labels).inc, lambda s: s.decode_token_total),
            (metrics.kv_orphan_blocks_total.labels(*labels).inc, lambda s: s.transfer.orphan_block_total),
            (metrics.tier_hit_tokens_total.labels(*labels, "host").inc, lambda s: s.tiers.host_hit_token_total),
            (metrics.tier_hit_tokens_total.labels(*labels, "disk").inc, lambda s: s.tiers.disk_hit_token_total),
            (metrics.tier_blocks_total.labels(*labels, "spilled").inc, lambda s: s.tiers.spilled_block_total),
            (metrics.tier_blocks_total.labels(*labels, "skipped").inc, lambda s: s.tiers.skipped_block_total),
            (metrics.tier_blocks_total.labels(*labels, "dropped").inc, lambda s: s.tiers.dropped_block_total),
            (metrics.draft_tokens_total.labels(*labels).inc, lambda s: s.draft_token_total),
            (metrics.accepted_draft_tokens_total.labels(*labels).inc, lambda s: s.accepted_draft_token_total),
        ]
        self._seen = [0] * len(self._totals)

    def update(self, stats: EngineStats, step_seconds: list[float]) -> None:
        """Take the counts after some steps."""
        self._running.set(stats.running_count)
        self._waiting.set(stats.waiting_count)
        self._backlog.set(stats.backlog_token_count)
        self._blocks_used.set(stats.held_block_count)
        self._blocks_total.set(stats.total_block_count)
        self._tier_bytes["host"].set(stats.tiers.host_bytes)
        self._tier_bytes["disk"].set(stats.tiers.disk_bytes)
        self._disk_on.set(stats.tiers.disk_on)
        for seconds in step_seconds:
            self._step_seconds.observe(seconds)
        for index, (increase, read) in enumerate(self._totals):
            total = read(stats)
            if total != self._seen[index]:
                increase(total - self._seen[index])
                self._seen[index] = total
