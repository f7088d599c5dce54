"""The only place that reads time. Everything else is handed a Clock, so that tests can move it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol


class Clock(Protocol):
    """Time as a collaborator."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""
        ...

    def wall(self) -> float:
        """Unix seconds, for people and bills only."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend the task for that many seconds of this clock."""
        ...

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Return when the event is set or so many seconds of this clock are over."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        if event.is_set() or seconds <= 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
