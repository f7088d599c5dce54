"""Background tasks with an owner: none is lost, none dies silently, all end with `close`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import structlog

from services.common.lifecycle import end_tasks


class Tasks:
    """A set of running tasks. A failure is logged and ends only its task."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, None], *, name: str) -> asyncio.Task[None]:
        """Run `work` until it ends or `close`."""
        task = asyncio.create_task(self._guarded(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel what still runs and wait for it."""
        await end_tasks(self._tasks)

    async def _guarded(self, work: Coroutine[object, object, None], name: str) -> None:
        try:
            await work
        except Exception as error:
            structlog.get_logger().error("task_failed", task=name, error=type(error).__name__, exc_info=error)
