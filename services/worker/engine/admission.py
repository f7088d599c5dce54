"""Which waiting requests start to run, and which running ones give way to a better class.

Owns the rules of admission: fair order, slots, blocks for the whole of what is known, nobody overtaken for ever.
Never preempts by itself. Called by the scheduler only.
"""

from __future__ import annotations

import enum

from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.kv_cache_manager import KVCacheManager, PrefixMatch
from services.worker.engine.kv_transfer import KVImports
from services.worker.engine.request import PriorityClass, Request
from services.worker.engine.request_queue import RequestQueue
from services.worker.engine.running_batch import RunningBatch
from services.worker.engine.step_builder import StepBuilder

# Requests too big for the pool that a round of admission looks at before it gives up, and requests in all: a step's
# time must not follow the queue.
_MAX_TRIES = 32
_MAX_LOOKS = 256
# Long prefills that hold blocks at once; they take turns by tenant.
_MAX_LONG_PREFILLS = 4


class _Obstacle(enum.Enum):
    """Why a request cannot start now."""

    OTHER_COMPUTES = enum.auto()
    LONG_PREFILLS = enum.auto()
    TENANT_SLOTS = enum.auto()
    TENANT_BLOCKS = enum.auto()
    POOL_BLOCKS = enum.auto()


class Admission:
    """One round of admission per step, over the queue in fair order."""

    def __init__(
        self,
        queue: RequestQueue,
        running: RunningBatch,
        kv: KVCacheManager,
        *,
        imports: KVImports,
        config: EngineConfig,
    ) -> None:
        self._queue = queue
        self._running = running
        self._kv = kv
        self._imports = imports
        self._max_bypass_count = config.max_bypass_count
        self.prefix_query_total = 0
        self.prefix_hit_total = 0

    def admit(self, builder: StepBuilder) -> None:
        """Start waiting requests while budget, slots and blocks last.

        A request that the pool cannot hold yet is overtaken at most `max_bypass_count` times, then it holds the door;
        nothing of a worse class passes it at all.
        """
        walk = self._queue.walk()
        blocked: list[Request] = []
        for _ in range(_MAX_LOOKS):
            if builder.budget <= 0 or self._running.is_full or len(blocked) >= _MAX_TRIES:
                return
            request = walk.peek()
            if request is None or (blocked and request.priority_class > blocked[0].priority_class):
                return
            fit = self._fit(request, builder)
            if isinstance(fit, PrefixMatch):
                self._start(request, fit, builder)
                walk.taken()
                for passed in blocked:
                    passed.bypass_count += 1
                continue
            if fit is _Obstacle.POOL_BLOCKS:
                blocked.append(request)
                if request.bypass_count >= self._max_bypass_count:
                    return
            if fit is _Obstacle.TENANT_SLOTS:
                walk.pass_by_tenant()
            else:
                walk.pass_by()

    def victims_for_better_class(self) -> list[Request]:
        """BATCH requests to preempt so that the first INTERACTIVE one held up by the pool can start; often none."""
        if not self._queue.has_class(PriorityClass.INTERACTIVE) or not self._running.has_batch_class():
            return []
        walk = self._queue.walk()
        for _ in range(_MAX_TRIES):
            request = walk.peek()
            if request is None or request.priority_class is not PriorityClass.INTERACTIVE:
                break
            if self._running.room(request.tenant).by_tenant < 1:
                walk.pass_by_tenant()
                continue
            fit = self._fit_blocks(request)
            if isinstance(fit, PrefixMatch) or fit is _Obstacle.POOL_BLOCKS:
                return self._victims(request)
            walk.pass_by()
        return []

    def _fit(self, request: Request, builder: StepBuilder) -> PrefixMatch | _Obstacle:
        if self._running.room(request.tenant).total < 1:
            return _Obstacle.TENANT_SLOTS
        if self._too_many_long(request, builder):
            return _Obstacle.LONG_PREFILLS
        return self._fit_blocks(request)

    def _fit_blocks(self, request: Request) -> PrefixMatch | _Obstacle:
        """What `request` can take over and still get blocks for all its known tokens, or what is in the way."""
        kv = self._kv
        if kv.must_wait(request):
            return _Obstacle.OTHER_COMPUTES
        match = kv.match(request)
        if kv.must_wait(request):
            return _Obstacle.OTHER_COMPUTES
        room = kv.room(request.tenant)
        spare = kv.spare(running=len(self._running))
        # A copy needs its source on top: in a tiny pool that block may have to be given up instead.
        for candidate in (match, kv.without_copy(match)):
            needed = kv.needed(request, candidate)
            if needed <= room.by_tenant and needed + spare <= room.by_pool:
                return candidate
        return _Obstacle.TENANT_BLOCKS if needed > room.by_tenant else _Obstacle.POOL_BLOCKS

    def _start(self, request: Request, match: PrefixMatch, builder: StepBuilder) -> None:
        group = request.group
        self._queue.remove(request)
        self._queue.dispatched(request)
        self._kv.allocate(request, match)
        if group.cached_token_count is None:
            group.cached_token_count = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.prefix_query_total += request.num_tokens
            self.prefix_hit_total += request.num_computed_tokens
        request.bypass_count = 0
        if self._imports.takes(request):
            return
        self._running.add(request)
        builder.introduce(request)
        size = builder.chunk_size(request, others_wait=len(self._queue) > 0)
        if size:
            builder.add_chunk(request, size)
            self._queue.charge_chunk(request, size)

    def _too_many_long(self, request: Request, builder: StepBuilder) -> bool:
        if not builder.is_long(request):
            return False
        longs = [each for each in self._running.worst_first() if builder.is_long(each)]
        return sum(each.priority_class <= request.priority_class for each in longs) >= _MAX_LONG_PREFILLS

    def _victims(self, request: Request) -> list[Request]:
        """The fewest worst BATCH requests that make room for `request`; none if all of them would not do."""
        kv = self._kv
        slots = self._running.room(request.tenant).by_pool
        blocks = kv.room(request.tenant).by_pool
        needed = kv.needed(request, kv.without_copy(kv.match(request))) + kv.spare(running=len(self._running))
        victims: list[Request] = []
        for victim in self._running.worst_first():
            if victim.priority_class is not PriorityClass.BATCH or (slots >= 1 and blocks >= needed):
                break
            gives_slot = victim.tenant == request.tenant or self._running.frees_for_others(victim)
            gives_blocks = victim.tenant == request.tenant or kv.frees_for_others(victim)
            if (slots < 1 and gives_slot) or (blocks < needed and gives_blocks):
                victims.append(victim)
                slots += gives_slot
                blocks += kv.exclusive_count(victim) if gives_blocks else 0
        return victims if slots >= 1 and blocks >= needed else []
