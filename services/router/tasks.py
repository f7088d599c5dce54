"""Ends tasks for certain: libraries lose a cancellation that comes while they handle a timeout of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_PATIENCE_S = 0.2


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel until every task is done. Never raises what they raised."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_PATIENCE_S)
