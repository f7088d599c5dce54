"""Waiting for a state, never for a time. One limit for all tests: only what is broken comes to it, however slow the
machine."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

WAIT_S = 60.0


async def until(condition: Callable[[], object], *, every_s: float = 0.005) -> None:
    """Return once `condition()` is true; it may be a coroutine function. Raises TimeoutError."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return
            await asyncio.sleep(every_s)


def wait_until(condition: Callable[[], object], what: str, *, every_s: float = 0.05) -> None:
    """As `until`, of a test without a loop. Raises AssertionError that says `what` was waited for."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not so after {WAIT_S:g} s: {what}"
        time.sleep(every_s)
