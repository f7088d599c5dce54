"""Who holds which KV block: reference counts, the hash map, and the order in which unused blocks are taken.

Owns block ids, never their contents. A block that nobody holds but that has a hash stays hittable until it is taken.
Called by the KV cache manager only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from services.worker.engine.outputs import KVEvents

_MAX_EVENTS = 65_536


class BlockPool:
    """Fixed number of blocks; each is free, cached (unheld but hittable) or held by one or more holders."""

    def __init__(self, num_blocks: int, *, on_evict: Callable[[int, bytes], None] | None = None) -> None:
        """`on_evict` is told (block, hash) when `take` gives a cached block away, its contents still there."""
        if num_blocks < 1:
            raise ValueError("num_blocks must be at least 1")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._owners: list[str | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Unheld blocks, next to be taken first: those without a hash, then the longest unused.
        self._unheld: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached_count = 0
        self._held_by_tenant: dict[str, int] = {}
        # Net change of each hash since the last `take_events`: True became hittable, False stopped being so.
        self._changes: dict[bytes, bool] = {}
        self._events_lost = True

    @property
    def available_count(self) -> int:
        """Blocks that can be taken now: free and cached ones."""
        return len(self._unheld)

    @property
    def cached_count(self) -> int:
        """Unheld blocks that can still be hit."""
        return self._cached_count

    @property
    def held_count(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - len(self._unheld)

    def held_by(self, tenant: str) -> int:
        """Blocks charged to `tenant`: those it was first to hold since they were last unheld."""
        return self._held_by_tenant.get(tenant, 0)

    def ref_count(self, block: int) -> int:
        """How many holders `block` has."""
        return self._ref_counts[block]

    def hash_of(self, block: int) -> bytes | None:
        """The hash under which `block` can be hit, or None."""
        return self._hashes[block]

    def lookup(self, full_hash: bytes) -> int | None:
        """The block whose computed contents have this hash, or None. Changes nothing."""
        return self._by_hash.get(full_hash)

    def take(self, count: int, *, tenant: str) -> list[int]:
        """Hold `count` blocks with undefined contents, evicting cached ones in order. Raises RuntimeError if short."""
        if count > len(self._unheld):
            raise RuntimeError(f"{count} blocks asked for, {len(self._unheld)} available")
        taken = []
        for _ in range(count):
            block, _ = self._unheld.popitem(last=False)
            full_hash = self._hashes[block]
            if full_hash is not None:
                if self._on_evict is not None:
                    self._on_evict(block, full_hash)
                self._forget(block)
            self._ref_counts[block] = 1
            self._owners[block] = tenant
            taken.append(block)
        if count:
            self._held_by_tenant[tenant] = self._held_by_tenant.get(tenant, 0) + count
        return taken

    def hold(self, blocks: Iterable[int], *, tenant: str) -> None:
        """Add a holder to blocks that are held or cached; cached ones leave the eviction order."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._unheld[block]
                if self._hashes[block] is not None:
                    self._cached_count -= 1
                self._owners[block] = tenant
                self._held_by_tenant[tenant] = self._held_by_tenant.get(tenant, 0) + 1
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each block. The end of the sequence is given up first, so prefixes live longest."""
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} released more often than held")
            self._ref_counts[block] = count
            if count == 0:
                self._to_unheld(block)

    def publish(self, block: int, full_hash: bytes) -> None:
        """Make a held, fully computed block hittable. A hash that another block has stays with that block."""
        if self._ref_counts[block] == 0:
            raise RuntimeError(f"block {block} is published by nobody who holds it")
        if full_hash in self._by_hash or self._hashes[block] is not None:
            return
        self._by_hash[full_hash] = block
        self._hashes[block] = full_hash
        self._note(full_hash, hittable=True)

    def forget_cached(self) -> None:
        """Make no block hittable any more. Raises RuntimeError while any is held."""
        if self.held_count:
            raise RuntimeError(f"{self.held_count} blocks are held")
        for block in list(self._unheld):
            self._forget(block)

    def take_events(self) -> KVEvents:
        """Hashes stored and removed since the last call; a snapshot at first and after more than 65,536 of them."""
        if self._events_lost:
            events = KVEvents(stored=tuple(self._by_hash), snapshot=True)
        else:
            stored = tuple(full_hash for full_hash, hittable in self._changes.items() if hittable)
            removed = tuple(full_hash for full_hash, hittable in self._changes.items() if not hittable)
            events = KVEvents(stored=stored, removed=removed)
        self._changes.clear()
        self._events_lost = False
        return events

    def check_invariants(self, holdings: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless counts agree with `holdings`, the block lists of all holders."""
        expected = Counter(block for blocks in holdings for block in blocks)
        for block, count in enumerate(self._ref_counts):
            assert count == expected[block], f"block {block} counts {count} holders, has {expected[block]}"
            assert (count == 0) == (block in self._unheld), f"block {block} is both held and in the eviction order"
            full_hash = self._hashes[block]
            assert full_hash is None or self._by_hash.get(full_hash) == block, f"block {block} has a stale hash"
            assert (self._owners[block] is None) == (count == 0), f"block {block} is charged to the wrong tenant"
        assert len(self._by_hash) == sum(full_hash is not None for full_hash in self._hashes), "stray hashes"
        cached = sum(self._hashes[block] is not None for block in self._unheld)
        assert cached == self._cached_count, f"cached {self._cached_count}, really {cached}"
        charged = Counter(owner for owner in self._owners if owner is not None)
        assert charged == Counter(self._held_by_tenant), "tenants are charged for blocks they do not hold"

    def _forget(self, block: int) -> None:
        full_hash = self._hashes[block]
        if full_hash is not None:
            self._hashes[block] = None
            del self._by_hash[full_hash]
            self._cached_count -= 1
            self._note(full_hash, hittable=False)

    def _to_unheld(self, block: int) -> None:
        self._unheld[block] = None
        if self._hashes[block] is None:
            self._unheld.move_to_end(block, last=False)
        else:
            self._cached_count += 1
        owner = self._owners[block]
        self._owners[block] = None
        if owner is not None:
            self._held_by_tenant[owner] -= 1
            if not self._held_by_tenant[owner]:
                del self._held_by_tenant[owner]

    def _note(self, full_hash: bytes, *, hittable: bool) -> None:
        if self._events_lost:
            return
        self._changes[full_hash] = hittable
        if len(self._changes) > _MAX_EVENTS:
            self._events_lost = True
            self._changes.clear()
