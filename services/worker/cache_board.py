"""Tells routers which prefix blocks this worker has cached: all of them first, then what changed, in batches.

Owns the set of their hashes, truncated as admission entries carry them. Keeps no queue for anybody: a watcher that fell
too far behind gets all of them again. Fed with the engine loop's reports, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from millrace.worker.v1 import worker_service_pb2

from services.common.block_hash import TRUNCATED_SIZE, pack_truncated
from services.worker.engine.outputs import KVEvents

KEPT_BATCHES = 64
MAX_MESSAGE_HASHES = 131_072


class CacheBoard:
    """What can be hit in this worker's block pool."""

    def __init__(self, worker_instance: str) -> None:
        self._worker_instance = worker_instance
        self._hittable: set[bytes] = set()
        self._batches: deque[KVEvents] = deque(maxlen=KEPT_BATCHES)
        self._batch_count = 0
        self._changed = asyncio.Event()

    def update(self, events: KVEvents) -> None:
        """Take what the engine stored and removed."""
        if events.snapshot:
            self._hittable.clear()
            self._batches.clear()
        else:
            self._batches.append(events)
        self._hittable.difference_update(each[:TRUNCATED_SIZE] for each in events.removed)
        self._hittable.update(each[:TRUNCATED_SIZE] for each in events.stored)
        self._batch_count += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[worker_service_pb2.WatchCacheResponse]:
        """All that is cached, then each batch of changes, for ever. Sequences count from 1 without a gap."""
        sequence, seen = 0, -1
        while True:
            changed, missed = self._changed, self._batch_count - seen
            if seen < 0 or missed > len(self._batches):
                messages = self._all()
            else:
                messages = [m for batch in list(self._batches)[len(self._batches) - missed :] for m in _parts(batch)]
            seen = self._batch_count
            for message in messages:
                sequence += 1
                message.worker_instance = self._worker_instance
                message.sequence = sequence
                yield message
            if seen == self._batch_count:
                await changed.wait()

    def _all(self) -> list[worker_service_pb2.WatchCacheResponse]:
        messages = _parts(KVEvents(stored=tuple(self._hittable))) or [worker_service_pb2.WatchCacheResponse()]
        messages[0].snapshot = True
        return messages


def _parts(events: KVEvents) -> list[worker_service_pb2.WatchCacheResponse]:
    removed = [worker_service_pb2.WatchCacheResponse(removed=pack_truncated(part)) for part in _cut(events.removed)]
    return removed + [
        worker_service_pb2.WatchCacheResponse(stored=pack_truncated(part)) for part in _cut(events.stored)
    ]


def _cut(hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [hashes[start : start + MAX_MESSAGE_HASHES] for start in range(0, len(hashes), MAX_MESSAGE_HASHES)]
