"""A block pool against a model of it: holders, hashes, eviction order and tenants' charges agree at every moment."""

from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.engine.block_pool import BlockPool

TENANTS = ["a", "b"]


def name(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


class PoolMachine(RuleBasedStateMachine):
    """Holders add, append, fork, publish, abort and hit; the model is the list of their block lists."""

    @initialize(num_blocks=st.integers(1, 12))
    def build(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holders: list[list[int]] = []
        self.hashes: dict[int, bytes] = {}
        self.events: set[bytes] = set()
        # Cached blocks, longest unused first.
        self.cached: list[int] = []

    def held(self) -> set[int]:
        return {block for blocks in self.holders for block in blocks}

    @rule(count=st.integers(0, 4), tenant=st.sampled_from(TENANTS))
    def add(self, count: int, tenant: str) -> None:
        if count > self.pool.available_count:
            return
        free = self.pool.available_count - self.pool.cached_count
        evicted = self.cached[: max(0, count - free)]
        blocks = self.pool.take(count, tenant=tenant)

        assert not set(blocks) & self.held(), "a held block was given out"
        assert set(evicted) <= set(blocks), "a younger cached block was taken before an older one"
        for block in evicted:
            self.cached.remove(block)
            del self.hashes[block]
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), tenant=st.sampled_from(TENANTS))
    def fork(self, data: st.DataObject, tenant: str) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        length = data.draw(st.integers(0, len(blocks)))
        self.pool.hold(blocks[:length], tenant=tenant)
        self.holders.append(blocks[:length])

    @precondition(lambda self: self.held())
    @rule(data=st.data(), number=st.integers(0, 15))
    def publish(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.held())))
        self.pool.publish(block, name(number))
        if block not in self.hashes and name(number) not in self.hashes.values():
            self.hashes[block] = name(number)

    @rule(number=st.integers(0, 15), tenant=st.sampled_from(TENANTS))
    def hit(self, number: int, tenant: str) -> None:
        block = self.pool.lookup(name(number))
        expected = [each for each, full_hash in self.hashes.items() if full_hash == name(number)]
        assert ([] if block is None else [block]) == expected
        if block is not None:
            self.pool.hold([block], tenant=tenant)
            self.holders.append([block])
            if block in self.cached:
                self.cached.remove(block)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            if block not in self.held() and block in self.hashes and block not in self.cached:
                self.cached.append(block)

    @rule()
    def follow_events(self) -> None:
        events = self.pool.take_events()
        self.events = (
            set(events.stored) if events.snapshot else (self.events - set(events.removed)) | set(events.stored)
        )

        assert self.events == set(self.hashes.values()), "a router that follows the events is wrong"

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_invariants(self.holders)
        free = pool.available_count - pool.cached_count
        assert free + pool.cached_count + pool.held_count == pool.num_blocks
        assert pool.cached_count == len(self.cached)
        assert pool.held_count == len(self.held()) == sum(pool.held_by(tenant) for tenant in TENANTS)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for blocks in self.holders:
            self.pool.release(blocks)
        self.pool.check_invariants([])
        assert self.pool.held_count == 0


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
