"""Prefill in one engine, decode in another: the values that cross, and what each side holds meanwhile.

Owns the requests that wait for a peer's blocks. Never sends anything: the shell does,
and reports. Called by scheduler, KV cache manager and engine. The first token is sampled by the engine that decodes,
from the imported blocks: noise is a function of the position, so it is the token that the peer would have sampled.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from services.worker.engine.kv_blocks import KVBlock, is_intact
from services.worker.engine.kv_cache_manager import KVCacheManager
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.outputs import TransferStats
from services.worker.engine.request import Request, RequestKey, RequestState
from services.worker.engine.request_queue import RequestQueue
from services.worker.engine.running_batch import RunningBatch
from services.worker.engine.step_builder import StepBuilder


@dataclasses.dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A request has its blocks and wants their contents: those of `full_hashes`, in order, from position `start` on.

    The shell must answer by `kv_received`, as often as it takes, or `kv_failed`; what comes after the last full block
    is computed here.
    """

    key: RequestKey
    start: int
    full_hashes: tuple[bytes, ...]


class ImportOutcome(enum.Enum):
    """What became of a request whose blocks were handed over.

    WAITING: more are wanted. READY: all have come. SPOILT: one was not the right one, or not intact; it and all after
    it are computed here. ORPHAN: nobody waits for them (any more).
    """

    WAITING = "waiting"
    READY = "ready"
    SPOILT = "spoilt"
    ORPHAN = "orphan"


@dataclasses.dataclass(slots=True)
class _Waiting:
    """A request, what it asked for, and how many of those blocks have come."""

    request: Request
    prefill: RemotePrefill
    count: int = 0


class KVImports:
    """Requests in WAITING_FOR_REMOTE_KV. They hold all their blocks and no slot of the batch."""

    def __init__(self, kv: KVCacheManager, queue: RequestQueue, running: RunningBatch, *, max_waiting: int) -> None:
        self._kv = kv
        self._queue = queue
        self._running = running
        self._max_waiting = max_waiting
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._ready: list[Request] = []
        self._announced: list[RemotePrefill] = []
        self._imported_block_total = 0
        self._refused_block_total = 0
        self._orphan_total = self._orphan_block_total = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._ready)

    @property
    def is_waiting(self) -> bool:
        """True while a peer owes an answer."""
        return bool(self._waiting)

    def takes(self, request: Request) -> bool:
        """True when an admitted request, its blocks allocated, now waits for a peer instead of joining the batch.

        It does so once. It is computed here when no full block is missing, when all of its prompt must be, or
        when too many wait already.
        """
        if not request.wants_remote_kv:
            return False
        request.wants_remote_kv = False
        start, size = request.num_computed_tokens, self._kv.block_size
        hashes = tuple(request.block_hashes[start // size : request.num_tokens // size])
        is_small = request.num_tokens - start < size or not hashes
        if is_small or request.needs_whole_prompt or len(self) >= self._max_waiting:
            return False
        prefill = RemotePrefill(request.key, start, hashes)
        request.state = RequestState.WAITING_FOR_REMOTE_KV
        self._waiting[_name(request)] = _Waiting(request, prefill)
        self._announced.append(prefill)
        return True

    def take_announced(self) -> list[RemotePrefill]:
        """Prefills to ask a peer for since the last call; one whose request has ended meanwhile is left out."""
        announced = [each for each in self._announced if (each.key.request_id, each.key.epoch) in self._waiting]
        self._announced.clear()
        return announced

    def received(self, request_id: str, epoch: int, blocks: Sequence[KVBlock], runner: ModelRunner) -> ImportOutcome:
        """Copy a peer's next blocks in, as far as they are the right ones and intact.

        Those that have come stand, whatever becomes of the rest. What nobody waits for is counted as an orphan.
        """
        waiting = self._waiting.get((request_id, epoch))
        if waiting is None:
            self._orphan_total += 1
            self._orphan_block_total += len(blocks)
            return ImportOutcome.ORPHAN
        request, wanted = waiting.request, waiting.prefill.full_hashes
        first, size, count = waiting.prefill.start // self._kv.block_size, self._kv.block_size, 0
        places = request.blocks[first + waiting.count :]
        for full_hash, block, sent in zip(wanted[waiting.count :], places, blocks, strict=False):
            if sent.full_hash != full_hash or not is_intact(sent, runner.kv_layout):
                break
            runner.import_block(block, sent.payload)
            count += 1
        waiting.count += count
        self._imported_block_total += count
        self._refused_block_total += len(blocks) - count
        if count:
            request.num_computed_tokens = min((first + waiting.count) * size, request.num_tokens - 1)
            self._kv.publish(request)
        is_complete = waiting.count == len(wanted)
        if not is_complete and count == len(blocks):
            return ImportOutcome.WAITING
        self._go_on(waiting)
        return ImportOutcome.READY if is_complete else ImportOutcome.SPOILT

    def failed(self, request_id: str, epoch: int) -> bool:
        """The peer delivers no more: compute the rest here. False, an orphan, when nobody waits for it."""
        waiting = self._waiting.get((request_id, epoch))
        if waiting is None:
            self._orphan_total += 1
            return False
        self._go_on(waiting)
        return True

    def resume(self, builder: StepBuilder) -> None:
        """Requests whose blocks have come join the batch, in order of arrival, as far as there are slots."""
        left: list[Request] = []
        for request in self._ready:
            if self._running.is_full or self._running.room(request.tenant).total < 1:
                left.append(request)
                continue
            self._running.add(request)
            builder.introduce(request)
        self._ready = left

    def leave(self, request: Request) -> None:
        """The request ends while it waits: its blocks are free at once, what comes for it later is an orphan."""
        if request in self._ready:
            self._ready.remove(request)
        else:
            del self._waiting[_name(request)]
        request.state = RequestState.FINISHED
        self._kv.free(request)

    def stats(self) -> TransferStats:
        """Counts as of now."""
        return TransferStats(
            len(self),
            self._imported_block_total,
            self._refused_block_total,
            self._orphan_total,
            self._orphan_block_total,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when a waiting request is not in its state, or lacks a block."""
        requests = [waiting.request for waiting in self._waiting.values()] + self._ready
        for request in requests:
            assert request.state is RequestState.WAITING_FOR_REMOTE_KV, f"{request} waits for blocks in another state"
            assert len(request.blocks) == self._kv.blocks_for(request.num_tokens), f"{request} lacks blocks"

    def _go_on(self, waiting: _Waiting) -> None:
        """Nothing more will come: with what has come into the batch, or with nothing back to the queue."""
        request = waiting.request
        del self._waiting[_name(request)]
        if waiting.count:
            self._ready.append(request)
            return
        self._kv.free(request)
        request.state = RequestState.WAITING
        self._queue.put(request)


def _name(request: Request) -> tuple[str, int]:
    return (request.key.request_id, request.key.epoch)
