"""Cached blocks beyond the pool: what is evicted goes to a tier, what a request needs comes back if that is cheaper.

Owns the moves of the step in hand and the reads that requests wait for. Never does I/O: a `KVTiers` does, elsewhere.
Called by the KV cache manager; the engine calls `move` once a step.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from services.worker.engine.kv_blocks import KVBlock, KVLayout, is_intact, sealed
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.outputs import TierStats
from services.worker.engine.request import Request, RequestKey, RequestState

# A slow disk may hold a request up for so long; then it computes what it waited for.
FETCH_PATIENCE_S = 2.0
# Steps with fewer prompt tokens say more about their overhead than about the rate of a prefill.
_MIN_RATE_TOKENS = 16
_RATE_WEIGHT = 0.2


class Tier(enum.Enum):
    HOST = "host"
    DISK = "disk"


class Place(NamedTuple):
    """Where a block is: `seconds` to bring it back, and whether it lies in memory, ready to be copied."""

    seconds: float
    in_memory: bool


class KVTiers(Protocol):
    """Storage of blocks by hash. Every call returns at once, and none raises for what storage does."""

    def holds(self, full_hash: bytes) -> bool:
        """True when the block is here; it then counts as used just now."""
        ...

    def put(self, block: KVBlock) -> None:
        """Keep the block if there is room, in memory or (later) on disk, at the cost of those longest unused."""
        ...

    def locate(self, key: RequestKey, hashes: Sequence[bytes]) -> list[Place]:
        """Where the first of `hashes` are, up to the first that is nowhere."""
        ...

    def fetch(self, key: RequestKey, hashes: Sequence[bytes]) -> None:
        """Start to bring blocks into memory, as many as there is room for, and keep them there until `release`."""
        ...

    def is_fetching(self, key: RequestKey) -> bool:
        """True while blocks that `fetch` started for this request are on their way."""
        ...

    def read(self, key: RequestKey, full_hash: bytes) -> tuple[Tier, KVBlock] | None:
        """The block as it was put, and the tier it was found in; None unless it lies in memory."""
        ...

    def release(self, key: RequestKey) -> None:
        """Forget what was fetched for the request."""
        ...

    def discard(self, full_hash: bytes) -> None:
        """Drop a block that turned out to be spoilt."""
        ...

    def stats(self) -> TierStats:
        """Counts as of now, hit tokens left out."""
        ...


def worth_restoring(seconds: Sequence[float], *, recompute_s: float) -> int:
    """How many of the first blocks to bring back, given what each costs and what computing one costs instead."""
    best, best_gain, gain = 0, 0.0, 0.0
    for index, cost in enumerate(seconds):
        gain += recompute_s - cost
        if gain > best_gain:
            best, best_gain = index + 1, gain
    return best


class PrefillRate:
    """Prompt tokens a second, from steps that follow each other without a pause."""

    def __init__(self) -> None:
        self._seen: tuple[float, int] | None = None
        self.tokens_per_s: float | None = None

    def observe(self, now: float, prefill_total: int, *, after_pause: bool) -> None:
        """A step starts: the one before it has computed the tokens that `prefill_total` grew by."""
        before, self._seen = self._seen, (now, prefill_total)
        if before is None or after_pause:
            return
        seconds, count = now - before[0], prefill_total - before[1]
        if count < _MIN_RATE_TOKENS or seconds <= 0.0:
            return
        rate = count / seconds
        known = self.tokens_per_s
        self.tokens_per_s = rate if known is None else known + _RATE_WEIGHT * (rate - known)


@dataclasses.dataclass(slots=True)
class _Fetch:
    request: Request
    give_up_at: float
    is_over: bool = False


class SpilledBlocks:
    """The engine's side of the tiers."""

    def __init__(self, tiers: KVTiers, layout: KVLayout, *, block_size: int) -> None:
        self._tiers = tiers
        self._layout = layout
        self._block_size = block_size
        self._rate = PrefillRate()
        self._now = 0.0
        self._fetches: dict[RequestKey, _Fetch] = {}
        self._evicted: list[tuple[int, bytes]] = []
        self._restored: list[tuple[int, bytes]] = []
        self._spilled_total = 0
        self._spoilt_total = 0
        self._hit_tokens = dict.fromkeys(Tier, 0)

    @property
    def is_fetching(self) -> bool:
        """True while a request waits for a read."""
        return any(not fetch.is_over for fetch in self._fetches.values())

    def begin_step(self, now: float, *, prefill_total: int, after_pause: bool) -> None:
        """Take the time, and look after the reads: over, too slow, or for a request that waits no more."""
        self._now = now
        self._rate.observe(now, prefill_total, after_pause=after_pause)
        for key, fetch in list(self._fetches.items()):
            if fetch.request.state not in (RequestState.WAITING, RequestState.PREEMPTED):
                self._drop(key)
            elif self.must_wait(fetch.request) and now >= fetch.give_up_at:
                self._tiers.release(key)
                fetch.is_over = True

    def evicted(self, block: int, full_hash: bytes) -> None:
        """The pool gives away a hittable block: keep its contents before the step overwrites them."""
        if not self._tiers.holds(full_hash):
            self._evicted.append((block, full_hash))

    def must_wait(self, request: Request) -> bool:
        """True while blocks that the request will use are being read."""
        fetch = self._fetches.get(request.key)
        if fetch is None or fetch.request is not request or fetch.is_over:
            return False
        fetch.is_over = not self._tiers.is_fetching(request.key)
        return not fetch.is_over

    def plan(self, request: Request, hashes: Sequence[bytes]) -> int:
        """How many of `hashes`, the blocks that `request` needs next, can be restored now; may start a read instead."""
        if self.must_wait(request):
            return 0
        places = self._tiers.locate(request.key, hashes)
        rate = self._rate.tokens_per_s
        count = len(places)
        if rate is not None:
            count = worth_restoring([place.seconds for place in places], recompute_s=self._block_size / rate)
        ready = next((index for index in range(count) if not places[index].in_memory), count)
        fetch = self._fetches.get(request.key)
        if ready < count and (fetch is None or fetch.request is not request):
            self._drop(request.key)
            self._tiers.fetch(request.key, hashes[:count])
            self._fetches[request.key] = _Fetch(request, self._now + FETCH_PATIENCE_S)
        return ready

    def restore(self, request: Request, hashes: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Have this step copy `hashes` into `blocks`; returns for how many of the first that can be done."""
        count = 0
        for full_hash, block in zip(hashes, blocks, strict=False):
            found = self._tiers.read(request.key, full_hash)
            if found is None:
                break
            tier, kept = found
            if kept.full_hash != full_hash or not is_intact(kept, self._layout):
                self._spoilt_total += 1
                self._tiers.discard(full_hash)
                break
            self._restored.append((block, kept.payload))
            self._hit_tokens[tier] += self._block_size
            count += 1
        # Longest unused goes first, so the end of a prefix must not look fresher than its start.
        for full_hash in reversed(hashes[:count]):
            self._tiers.holds(full_hash)
        return count

    def move(self, runner: ModelRunner) -> None:
        """Copy blocks out and in, before the step computes; a block may be both given away and filled again."""
        for block, full_hash in self._evicted:
            self._tiers.put(sealed(full_hash, runner.export_block(block), self._layout))
            self._spilled_total += 1
        for block, payload in self._restored:
            runner.import_block(block, payload)
        self.forget_moves()

    def forget_moves(self) -> None:
        """The step in hand is given up: what the pool holds may be spoilt."""
        self._evicted.clear()
        self._restored.clear()

    def stats(self) -> TierStats:
        """Counts as of now."""
        stats = self._tiers.stats()
        return dataclasses.replace(
            stats,
            spilled_block_total=self._spilled_total,
            dropped_block_total=stats.dropped_block_total + self._spoilt_total,
            host_hit_token_total=self._hit_tokens[Tier.HOST],
            disk_hit_token_total=self._hit_tokens[Tier.DISK],
        )

    def _drop(self, key: RequestKey) -> None:
        if self._fetches.pop(key, None) is not None:
            self._tiers.release(key)
