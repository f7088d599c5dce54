"""Tells Redis how requests ended: outbox → finish → settle → clear, and forgets a record once the ledger has it.

Works behind the clients' backs and tries again while Redis is away; everything is idempotent by request id. Records
are published again when Redis' run id or role changes. Owned by wiring.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from services.common.admission_store import AdmissionStore
from services.common.admission_types import FinishResult, Pool, Terminal
from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.lifecycle import crash_point
from services.gateway.outbox import Outbox, OutboxError, OutboxRecord
from services.gateway.tasks import Tasks

BATCH = 32
RETRY_S = 0.5
COMMIT_POLL_S = 1.0


class Commits(Protocol):
    """What the ledger has said to be durable."""

    async def committed(self, pool: Pool, request_ids: Sequence[str]) -> list[str]:
        """Those of the ids that the ledger holds. Raises StoreUnavailable."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """`replayed`: from an earlier incarnation, which may have published it already."""

    pool: Pool
    record: OutboxRecord
    replayed: bool = False


class UsagePublisher:
    """One queue of unpublished records, and one of published records that the ledger has not confirmed."""

    def __init__(
        self,
        store: AdmissionStore,
        outbox: Outbox,
        commits: Commits,
        clock: Clock,
        *,
        on_settled: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        self._store = store
        self._outbox = outbox
        self._commits = commits
        self._clock = clock
        self._on_settled = on_settled
        self._unpublished: dict[str, _Waiting] = {}
        self._unconfirmed: dict[str, _Waiting] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._run_id = ""
        self._tasks = Tasks()

    @property
    def unpublished_count(self) -> int:
        return len(self._unpublished)

    def start(self) -> None:
        """Publish what the outbox holds, and keep publishing."""
        for record in self._outbox.records:
            self._queue(_Waiting(_pool_of(record), record, replayed=True))
        self._tasks.spawn(self._publish(), name="publish-usage")
        self._tasks.spawn(self._confirm(), name="confirm-usage")

    async def add(self, pool: Pool, record: OutboxRecord) -> None:
        """Return once the record is on disk (or, with a full disk, in memory); Redis is told in the background."""
        try:
            await self._outbox.append(record)
        except OutboxError:
            structlog.get_logger().error("usage_not_on_disk", request_id=record.request_id)
        crash_point("gateway.after_outbox")
        self._queue(_Waiting(pool, record))

    async def wait_published(self) -> None:
        """Return once Redis knows everything."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stop; what is unpublished stays in the outbox."""
        await self._tasks.close()

    def _queue(self, waiting: _Waiting) -> None:
        self._unpublished[waiting.record.request_id] = waiting
        self._idle.clear()
        self._wake.set()

    async def _publish(self) -> None:
        while True:
            if not self._unpublished:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            try:
                await self._publish_batch()
            except StoreUnavailable:
                await self._clock.sleep(RETRY_S)

    async def _publish_batch(self) -> None:
        pool = next(iter(self._unpublished.values())).pool
        batch = [w for w in self._unpublished.values() if w.pool == pool][:BATCH]
        # Epoch 0: only this gateway ends its requests, whatever epoch a router has raised meanwhile.
        terminals = [
            Terminal(
                tenant=w.record.event.tenant,
                request_id=w.record.request_id,
                epoch=0,
                state=w.record.event.terminal_state,
                computed_tokens=w.record.computed_tokens,
                event=w.record.event,
            )
            for w in batch
        ]
        results = await self._store.finish(pool, terminals)
        crash_point("gateway.after_finish")
        await asyncio.gather(*map(self._settle, batch, results))
        crash_point("gateway.after_settle")
        await self._store.clear_unsettled(pool, [w.record.request_id for w in batch])
        await self._done(batch, results)

    async def _settle(self, waiting: _Waiting, result: FinishResult) -> None:
        event = waiting.record.event
        tenant = result.tenant or event.tenant
        await self._store.settle(tenant, event.request_id, result.computed_tokens, result.billed_tokens)

    async def _done(self, batch: Sequence[_Waiting], results: Sequence[FinishResult]) -> None:
        lost = []
        for waiting, result in zip(batch, results, strict=True):
            request_id = waiting.record.request_id
            if self._unpublished.get(request_id) is waiting:
                del self._unpublished[request_id]
            if result.won or waiting.replayed:
                self._unconfirmed[request_id] = waiting
            elif request_id not in self._unconfirmed:
                # Another caller's terminal stands: our event is dropped.
                lost.append(request_id)
            self._on_settled(request_id)
        if lost:
            await self._outbox.resolve(lost)

    async def _confirm(self) -> None:
        while True:
            await self._clock.sleep(COMMIT_POLL_S)
            if self._outbox.broken:
                await self._outbox.mend()
            if not self._unconfirmed:
                continue
            try:
                await self._confirm_once()
            except StoreUnavailable:
                continue

    async def _confirm_once(self) -> None:
        _, run_id = await self._store.uptime()
        if self._run_id and run_id != self._run_id:
            # A restart or a promoted replica may have lost the last writes.
            for waiting in self._unconfirmed.values():
                self._queue(waiting)
        self._run_id = run_id
        for pool in {w.pool for w in self._unconfirmed.values()}:
            ids = [request_id for request_id, w in self._unconfirmed.items() if w.pool == pool]
            done = await self._commits.committed(pool, ids)
            for request_id in done:
                self._unconfirmed.pop(request_id, None)
                self._unpublished.pop(request_id, None)
            await self._outbox.resolve(done)


def _pool_of(record: OutboxRecord) -> Pool:
    pool = record.event.pool
    return Pool(pool.model, pool.pool, pool.shard)
