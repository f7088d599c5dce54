"""Finds unfinished batches and runs them: for each, one runner among the gateways, by a lease in Redis that it keeps.

One batch of a tenant at a time in a gateway, so that no tenant's queue of batches holds up another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import redis.asyncio as aioredis
import structlog

from services.common.admission_scripts import slot_key
from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.lease import Lease
from services.common.lifecycle import end_tasks
from services.gateway.batch_lines import LineDoor
from services.gateway.batch_run import BatchRun, LineRunner
from services.gateway.batch_store import BatchStore, FileStore, OwnedBatch
from services.gateway.generation import KeyRing
from services.gateway.tasks import Tasks

LEASE_S = 10.0
KEEP_S = 1.0
POLL_S = 0.5
# Lines that run at once in this gateway.
GATEWAY_LINES = 32


class BatchRunner:
    """Started and closed by wiring."""

    def __init__(self, batches: BatchStore, files: FileStore, lines: LineRunner) -> None:
        self._batches = batches
        self._files = files
        self._lines = lines
        self._tasks = Tasks()
        self._tenants: set[str] = set()
        self._watching: asyncio.Task[None] | None = None

    def start(self, redis: aioredis.Redis) -> None:
        """Begin to look for batches."""
        self._watching = self._tasks.spawn(self._watch(redis), name="batches")

    def drain(self) -> None:
        """Take no more batches; of those that run, lines under way end and no others begin, as the gateway says."""
        if self._watching is not None:
            self._watching.cancel()

    async def close(self) -> None:
        """Cut what runs; whoever takes a batch next goes on with it."""
        await self._tasks.close()

    async def _watch(self, redis: aioredis.Redis) -> None:
        while True:
            try:
                for owned in await self._batches.unfinished():
                    await self._take(owned, redis)
            except StoreUnavailable as error:
                structlog.get_logger().warning("batches_not_reachable", reason=error.message)
            await self._lines.clock.sleep(POLL_S)

    async def _take(self, owned: OwnedBatch, redis: aioredis.Redis) -> None:
        lease = Lease(redis, slot_key(owned.batch.id, "batch_runner"), LEASE_S)
        if owned.tenant not in self._tenants and await lease.take():
            self._tenants.add(owned.tenant)
            self._tasks.spawn(self._hold(owned, lease), name="batch")

    async def _hold(self, owned: OwnedBatch, lease: Lease) -> None:
        """Run one batch as far as the lease and the store allow."""
        run = BatchRun(owned, self._batches, self._files, self._lines)
        try:
            await run.open()
            if await _kept(run.lines(), lease, run.is_over):
                await _kept(run.close(), lease, _never)
        except StoreUnavailable as error:
            structlog.get_logger().warning("batch_interrupted", batch_id=owned.batch.id, reason=error.message)
        finally:
            self._tenants.discard(owned.tenant)
            await asyncio.shield(lease.release())


async def _kept(part: Coroutine[Any, Any, None], lease: Lease, is_over: Callable[[], Awaitable[bool]]) -> bool:
    """Work until it is done or to be given up; False when the lease is lost. Raises what the work raises."""
    work = asyncio.ensure_future(part)
    try:
        while True:
            await asyncio.wait({work}, timeout=KEEP_S)
            if not await lease.keep():
                return False
            if work.done():
                work.result()
                return True
            if await is_over():
                return True
    finally:
        await end_tasks([work])


async def _never() -> bool:
    return False


def line_runner(door: LineDoor, keys: KeyRing, clock: Clock) -> LineRunner:
    """Runs the lines of one gateway."""
    return LineRunner(door, keys, clock, asyncio.Semaphore(GATEWAY_LINES))
