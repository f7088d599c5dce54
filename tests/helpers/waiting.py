"""Waiting for a state, never for a time. One limit for all tests: only what is broken comes to it, however slow the
machine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

WAIT_S = 60.0


async def until(condition: Callable[[], object], *, every_s: float = 0.005, within_s: float = WAIT_S) -> None:
    """Return once `condition()` is true; it may be a coroutine function. Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return
            await asyncio.sleep(every_s)
