"""Which blocks a request may use: prefix hits, allocation, copy-on-write, and waiting for what others compute.

Owns the block pool and every request's block list. Never decides who runs. Called by the scheduler only.
A hash is published after the step that computed the block, so a hit is always on finished keys and values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from services.common.block_hash import chain_hashes, root_hash
from services.worker.engine.block_pool import BlockPool
from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.kv_exports import KVExports
from services.worker.engine.kv_tiers import SpilledBlocks
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.outputs import TierStats
from services.worker.engine.request import KVRole, Request, RequestState
from services.worker.engine.tenant_shares import Room, TenantShares


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Tokens that need no computing: `shared` blocks in full, then `copy_source`'s first tokens by copy-on-write.

    Instead of a copy, `restored` are hashes of the blocks after the shared ones, to be copied in from a tier.
    """

    num_computed_tokens: int = 0
    shared: tuple[int, ...] = ()
    copy_source: int | None = None
    restored: tuple[bytes, ...] = ()


_NO_MATCH = PrefixMatch()


class KVCacheManager:
    """Blocks of all requests of one engine."""

    def __init__(
        self, *, num_blocks: int, block_size: int, config: EngineConfig, spilled: SpilledBlocks | None = None
    ) -> None:
        """`spilled` is where evicted blocks go and come back from; None, and they are lost."""
        self.block_size = block_size
        self.spilled = spilled
        self.pool = BlockPool(num_blocks, on_evict=spilled.evicted if spilled is not None else None)
        self.exports = KVExports(self.pool, block_size=block_size)
        self._model_version = config.model_version
        self._shares = TenantShares(
            num_blocks,
            reserved={tenant: limits.reserved_blocks for tenant, limits in config.tenant_limits.items()},
            cap_of=lambda tenant: config.limits_of(tenant).max_blocks,
        )
        self._watermark = num_blocks // 100
        # Hash of a block being computed → the running request that computes it.
        self._computing: dict[bytes, Request] = {}
        self._copies: dict[int, int] = {}
        self._pinned: list[int] = []
        self.copy_total = 0

    def root_of(self, *, adapter_digest: bytes, cache_salt: bytes) -> bytes | None:
        """Start of a request's hash chain; None, and so no sharing with other requests, without a tenant salt."""
        if not cache_salt:
            return None
        return root_hash(model_version=self._model_version, adapter_digest=adapter_digest, tenant_salt=cache_salt)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def limit(self, tenant: str) -> int:
        """The most blocks one request of `tenant` can ever hold."""
        return self._shares.limit(tenant)

    def room(self, tenant: str) -> Room:
        """Blocks that `tenant` may take now."""
        return self._shares.room(tenant, available=self.pool.available_count, held_by=self.pool.held_by)

    def frees_for_others(self, request: Request) -> bool:
        """True when preempting `request` gives blocks to other tenants."""
        return not self._shares.within_reservation(request.tenant, held=self.pool.held_by(request.tenant))

    def exclusive_count(self, request: Request) -> int:
        """Blocks that only `request` holds: what preempting it gives back."""
        return sum(self.pool.ref_count(block) == 1 for block in request.blocks)

    def must_wait(self, request: Request) -> bool:
        """True while what `request` needs next is being read, or computed by (a peer for) a request of no worse class.

        Nothing is held while waiting, and who is waited for has all its blocks: no cycle can form.
        """
        if self.spilled is not None and self.spilled.must_wait(request):
            return True
        shared = self._shared_with_siblings(request)
        siblings = [
            each for each in request.group.members if each is not request and each.state is RequestState.RUNNING
        ]
        if any(each.num_computed_tokens >= shared for each in siblings):
            return False
        if request.waits_for is not None and request.waits_for in self._computing:
            siblings.append(self._computing[request.waits_for])
        return any(each.priority_class <= request.priority_class for each in siblings)

    def match(self, request: Request) -> PrefixMatch:
        """Longest computed prefix of an unscheduled request; notes in `waits_for` the block it should wait for.

        At least the newest token is left to compute, since its logits are wanted. Holds nothing, but may start to
        read blocks that it should wait for.
        """
        request.waits_for = None
        if request.needs_whole_prompt:
            return _NO_MATCH
        fork = self._match_sibling(request)
        blocks: list[int] = []
        hashes = self._hashes(request, request.num_tokens // self.block_size)
        for full_hash in hashes:
            block = self.pool.lookup(full_hash)
            if block is None:
                request.waits_for = full_hash if full_hash in self._computing else None
                break
            blocks.append(block)
        cached = self._cut(request, blocks, len(blocks) * self.block_size)
        if fork.num_computed_tokens > cached.num_computed_tokens:
            request.waits_for = None
            return fork
        missing = hashes[len(blocks) :]
        if self.spilled is None or not missing or request.waits_for is not None or fork.num_computed_tokens:
            return cached
        restored = missing[: self.spilled.plan(request, missing)]
        computed = (len(blocks) + len(restored)) * self.block_size
        return PrefixMatch(min(computed, request.num_tokens - 1), cached.shared, restored=tuple(restored))

    def without_copy(self, match: PrefixMatch) -> PrefixMatch:
        """The same match in whole blocks only."""
        if match.copy_source is None:
            return match
        return PrefixMatch(len(match.shared) * self.block_size, match.shared)

    def needed(self, request: Request, match: PrefixMatch) -> int:
        """Available blocks that `allocate` would use up."""
        pool = self.pool
        unheld = sum(pool.ref_count(block) == 0 for block in match.shared)
        if match.copy_source is not None and pool.ref_count(match.copy_source) == 0:
            unheld += 1
        return self.blocks_for(request.num_tokens) - len(match.shared) + unheld

    def spare(self, *, running: int) -> int:
        """Blocks that admission leaves alone so that running requests can grow; 0 when nothing runs."""
        return min(self._watermark + 1, running)

    def allocate(self, request: Request, match: PrefixMatch) -> None:
        """Give `request` blocks for all its known tokens. The caller has checked that `needed` fits in `room`.

        A block to be restored that is gone or spoilt by now, and those after it, are left to compute.
        """
        pool = self.pool
        pool.hold(match.shared, tenant=request.tenant)
        source = match.copy_source
        if source is not None:
            # The source may itself be waiting for its copy in this step: take it from where that one does.
            source = self._copies.get(source, source)
            pool.hold((source,), tenant=request.tenant)
            self._pinned.append(source)
        fresh = pool.take(self.blocks_for(request.num_tokens) - len(match.shared), tenant=request.tenant)
        if source is not None:
            self._copies[fresh[0]] = source
            self.copy_total += 1
        computed = match.num_computed_tokens
        if self.spilled is not None and match.restored:
            restored_count = self.spilled.restore(request, match.restored, fresh)
            computed = min(computed, (len(match.shared) + restored_count) * self.block_size)
        self._set_blocks(request, (*match.shared, *fresh))
        request.num_computed_tokens = computed
        self._set_published(request, len(match.shared))
        self.exports.extend(request, len(match.shared))
        for full_hash in self._hashes(request, request.num_tokens // self.block_size)[len(match.shared) :]:
            if pool.lookup(full_hash) is None:
                self._computing.setdefault(full_hash, request)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend a running request's blocks to hold `num_tokens`; False, and nothing changed, without room."""
        missing = -(-num_tokens // self.block_size) - len(request.blocks)
        if missing > 0:
            pool, tenant = self.pool, request.tenant
            if not self._shares.has_room(tenant, missing, available=pool.available_count, held_by=pool.held_by):
                return False
            self._set_blocks(request, request.blocks + tuple(pool.take(missing, tenant=tenant)))
        return True

    def publish(self, request: Request) -> None:
        """Make the blocks that are now fully computed hittable. Call after the step that computed them."""
        full_blocks = request.num_computed_tokens // self.block_size
        hashes = self._hashes(request, full_blocks)
        if hashes:
            for index in range(request.num_published_blocks, full_blocks):
                self.pool.publish(request.blocks[index], hashes[index])
                self._stop_computing(request, hashes[index])
            if request.group.source.kv_role is KVRole.EXPORT:
                self.exports.extend(request, full_blocks)
        self._set_published(request, full_blocks)

    def free(self, request: Request) -> None:
        """Give back all blocks. Those published stay hittable until taken."""
        for full_hash in request.block_hashes[request.num_published_blocks :]:
            self._stop_computing(request, full_hash)
        for block in request.blocks:
            self._copies.pop(block, None)
        self.pool.release(request.blocks)
        self._set_blocks(request, ())
        request.num_computed_tokens = 0
        self._set_published(request, 0)

    def begin_step(self, now: float, *, prefill_total: int) -> None:
        """A step is about to be scheduled; `prefill_total` prompt tokens were computed before it."""
        if self.spilled is not None:
            self.spilled.begin_step(now, prefill_total=prefill_total, after_pause=self.pool.held_count == 0)

    @property
    def is_reading(self) -> bool:
        """True while a request waits for blocks on their way from a tier."""
        return self.spilled is not None and self.spilled.is_fetching

    def tier_stats(self) -> TierStats:
        """Counts of the tiers, all 0 without any."""
        return self.spilled.stats() if self.spilled is not None else TierStats()

    def move_blocks(self, runner: ModelRunner) -> None:
        """Copy this step's evicted blocks out to a tier and restored ones in, before the step computes."""
        if self.spilled is not None:
            self.spilled.move(runner)

    def forget_contents(self) -> None:
        """A device fault may have spoilt what the pool holds: no block is hit, spilled or sent to a peer any more."""
        if self.spilled is not None:
            self.spilled.forget_moves()
        self.exports.release_all()
        self.pool.forget_cached()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) pairs to copy before this step computes. Sources stay held until `end_step`."""
        copies = tuple((source, destination) for destination, source in self._copies.items())
        self._copies.clear()
        return copies

    def end_step(self) -> None:
        """The copies are done: let go of their sources."""
        if self._pinned:
            self.pool.release(self._pinned)
            self._pinned.clear()

    def check_invariants(self, requests: list[Request]) -> None:
        """Raise AssertionError unless `requests`, all that may hold blocks, account for every held one."""
        holdings = [request.blocks for request in requests]
        self.pool.check_invariants([*holdings, self._pinned, *self.exports.holdings()])
        at_work = (RequestState.RUNNING, RequestState.WAITING_FOR_REMOTE_KV)
        running = {id(request) for request in requests if request.state in at_work}
        assert all(id(request) in running for request in self._computing.values()), "a gone request still computes"
        for request in requests:
            assert request.num_computed_tokens <= len(request.blocks) * self.block_size, f"{request} lacks blocks"
            for block, full_hash in zip(request.blocks, request.block_hashes, strict=False):
                assert self.pool.hash_of(block) in (None, full_hash), f"{request} holds block {block} of another prefix"

    def _shared_with_siblings(self, request: Request) -> int:
        return min(request.num_prompt_tokens, request.num_tokens - 1)

    def _match_sibling(self, request: Request) -> PrefixMatch:
        """The prompt as a running choice of the same request has it, its partial last block by copy."""
        computed = self._shared_with_siblings(request)
        for member in request.group.members:
            if (
                member.state is RequestState.RUNNING
                and member.num_computed_tokens >= computed
                and member is not request
            ):
                return self._cut(request, member.blocks, computed)
        return _NO_MATCH

    def _cut(self, request: Request, blocks: Sequence[int], computed: int) -> PrefixMatch:
        computed = min(computed, request.num_tokens - 1)
        whole, rest = divmod(computed, self.block_size)
        return PrefixMatch(computed, tuple(blocks[:whole]), blocks[whole] if rest else None)

    def _hashes(self, request: Request, full_blocks: int) -> list[bytes]:
        """The request's block hashes, known at least for its first `full_blocks`, all full; none if off."""
        root, size, hashes = request.group.root, self.block_size, request.block_hashes
        if root is None or len(hashes) >= full_blocks:
            return hashes
        if not hashes:
            leader = request.group.members[0]
            hashes.extend(leader.block_hashes[: request.num_prompt_tokens // size])
        known = len(hashes)
        if known < full_blocks:
            packed = request.packed(known * size, full_blocks * size)
            hashes += chain_hashes(hashes[-1] if hashes else root, packed, block_size=size)
        return hashes

    def _stop_computing(self, request: Request, full_hash: bytes) -> None:
        if self._computing.get(full_hash) is request:
            del self._computing[full_hash]

    def _set_blocks(self, request: Request, blocks: tuple[int, ...]) -> None:
        request.blocks = blocks
        request.fits_outputs = len(blocks) * self.block_size - request.num_prompt_tokens

    def _set_published(self, request: Request, full_blocks: int) -> None:
        request.num_published_blocks = full_blocks
        request.full_at = (full_blocks + 1) * self.block_size - request.num_prompt_tokens
