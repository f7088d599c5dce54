"""Tells each router how much room this worker has: by its Watch, and with the answers to what it submits.

What a router read with an answer it is not told again. A change that leaves plenty of room binds nothing and may wait
as long as the router asked for: of hundreds of workers each such message would cost it as much as a request. Owned by
the load board, which says what has changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable

from millrace.worker.v1 import worker_service_pb2

from services.common.clock import Clock

WATCH_PERIOD_S = 1.0
WATCH_COALESCE_S = 0.005


@dataclasses.dataclass(slots=True, eq=False)
class _Reader:
    """A router that watches: the last change it was told, and how long it waits for one that leaves plenty of room."""

    told: int = 0
    patience_s: float = WATCH_COALESCE_S


class ViewFeed:
    """Views of one worker, numbered over all its readers."""

    def __init__(self, make: Callable[[int], worker_service_pb2.WatchResponse], clock: Clock) -> None:
        """`make(sequence)` is the present state as a message of that number."""
        self._make = make
        self._clock = clock
        self._readers: dict[str, _Reader] = {}
        self._change = self._pressing_change = 0
        self._changed, self._pressing = asyncio.Event(), asyncio.Event()
        # Number of the last view that was made.
        self.sequence = 0

    def note(self) -> None:
        """Something changed that leaves plenty of room."""
        self._change += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def press(self) -> None:
        """Something changed that routers wait for."""
        self.note()
        self._pressing_change = self._change
        self._pressing.set()
        self._pressing = asyncio.Event()

    def answer(self, router_instance: str, patience_s: float) -> worker_service_pb2.WatchResponse | None:
        """A view to go with an answer to a router that reads them there; None for one that does not watch.

        From now on a change that leaves plenty of room may reach its Watch by `patience_s` late, 1 s at most.
        """
        reader = self._readers.get(router_instance)
        if reader is None:
            return None
        reader.patience_s = min(max(patience_s, WATCH_COALESCE_S), WATCH_PERIOD_S)
        return self._tell(reader)

    async def watch(self, router_instance: str) -> AsyncIterator[worker_service_pb2.WatchResponse]:
        """Views: one now, then on change (changes within 5 ms share one) and at least each second."""
        reader = self._readers[router_instance] = _Reader()
        try:
            while True:
                yield self._tell(reader)
                await self._wait_due(reader)
        finally:
            if self._readers.get(router_instance) is reader:
                del self._readers[router_instance]

    def view(self) -> worker_service_pb2.WatchResponse:
        """The present state, of the next number."""
        self.sequence += 1
        return self._make(self.sequence)

    def _tell(self, reader: _Reader) -> worker_service_pb2.WatchResponse:
        reader.told = self._change
        return self.view()

    async def _wait_due(self, reader: _Reader) -> None:
        """Until there is something to tell this reader, or the period is over."""
        ends_at = self._clock.monotonic() + WATCH_PERIOD_S
        while (left_s := ends_at - self._clock.monotonic()) > 0:
            if reader.told == self._change:
                await self._clock.wait(self._changed, left_s)
                continue
            if self._pressing_change <= reader.told:
                await self._clock.wait(self._pressing, min(left_s, reader.patience_s))
            if self._pressing_change > reader.told:
                await self._clock.sleep(WATCH_COALESCE_S)
            if reader.told != self._change:
                return
