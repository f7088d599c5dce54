"""A clock that only tests move."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """Implements `services.common.clock.Clock`. `advance` wakes sleepers in the order of their times."""

    def __init__(self, *, monotonic: float = 1_000.0, wall: float = 1_800_000_000.0) -> None:
        self._now = monotonic
        self._wall_offset = wall - monotonic
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        if event.is_set() or seconds <= 0:
            return
        tasks = {asyncio.ensure_future(event.wait()), asyncio.ensure_future(self.sleep(seconds))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    @property
    def sleeper_count(self) -> int:
        """How many wait for time to move."""
        return len(self._sleepers)

    def jump(self, seconds: float) -> None:
        """Move time without letting any task run."""
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        """Move time; each sleeper that becomes due runs before time moves on."""
        end = self._now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            due, _, future = heapq.heappop(self._sleepers)
            self._now = max(self._now, due)
            if not future.done():
                future.set_result(None)
            await settle()
        self._now = end
        await settle()


async def settle(turns: int = 20) -> None:
    """Let tasks that can run do so."""
    for _ in range(turns):
        await asyncio.sleep(0)
