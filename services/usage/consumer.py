"""Moves usage events from Redis into the ledger: read → dedupe → insert in one transaction → ack → tell gateways.

A crash after reading costs nothing: the entries are pending and read again. A crash after the commit costs a second
look: the unique request id makes the replay a no-op. Only then are entries acked, published as committed and trimmed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import redis.asyncio as aioredis
import sqlalchemy as sa
import structlog
from sqlalchemy.exc import DataError, IntegrityError

from services.common.admission_scripts import pool_key, store_errors
from services.common.admission_store import AdmissionStore
from services.common.admission_types import Pool
from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.lifecycle import crash_point
from services.common.metrics import Metrics
from services.common.streams import StreamEntry, UsageStream
from services.common.telemetry import context_from, tracer
from services.usage.attempts import WorkerRows, insert_worker_rows, parse_report
from services.usage.events import LedgerEntry, PoisonEvent, parse_event, request_id_of
from services.usage.ledger import CONFLICT, DeadLetter, conflicting, insert_dead_letters, insert_entries
from services.usage.store import Store

GROUP = "ledger"
# The field of a worker's report; a gateway's event has another.
REPORT = "w"
# One constant name: a restarted service finds its own pending entries, and two services share one cursor safely,
# because the ledger's unique id decides.
CONSUMER = "usage"
COMMITTED_KEPT_MS = 3_600_000
BLOCK_MS = 1_000
# A transaction costs about the same for one event as for many: what comes within this time after one shares the next.
GATHER_S = 0.2
POOL_REFRESH_S = 1.0
TRIM_EVERY_S = 5.0
# So long events stay for the canary controller: its looks, and the lease of one that died.
KEPT_MS = 15_000
RETRY_S = 0.5
# Entries that another usage service read before it died are looked for this often.
REREAD_EVERY_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    entries: list[LedgerEntry]
    letters: list[DeadLetter]
    # What outboxes may forget once the batch is durable, by stream.
    request_ids: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    worker_rows: list[WorkerRows] = dataclasses.field(default_factory=list)
    # Where each of `entries` came from: stream and entry id.
    places: list[tuple[str, str]] = dataclasses.field(default_factory=list)


class Consumer:
    """One loop over the usage streams of all pools."""

    def __init__(
        self,
        redis: aioredis.Redis,
        store: Store,
        *,
        clock: Clock,
        metrics: Metrics,
        batch_size: int,
        on_rows: Callable[[], None] = lambda: None,
    ) -> None:
        self._redis = redis
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._batch_size = batch_size
        self._on_rows = on_rows
        self._admission = AdmissionStore(redis)
        self._stream = UsageStream(redis)
        self._pools: dict[str, Pool] = {}
        self._refresh_at = 0.0
        self._trim_at = 0.0
        self._reread_at = clock.monotonic() + REREAD_EVERY_S
        self.away = False

    async def run(self) -> None:
        """Consume for ever; while Redis or the database is away, keep trying."""
        while True:
            try:
                count = await self.run_once(BLOCK_MS)
                self.away = False
                if not self._pools:
                    await self._clock.sleep(RETRY_S)
                elif 0 < count < self._batch_size:
                    await self._clock.sleep(GATHER_S)
            except StoreUnavailable as error:
                if not self.away:
                    structlog.get_logger().warning("usage_store_away", error=error.message)
                self.away = True
                await self._stream.reread_pending(list(self._pools))
                await self._clock.sleep(RETRY_S)

    async def run_once(self, block_ms: int) -> int:
        """Read one batch and make it durable; returns the number of stream entries done. Raises StoreUnavailable."""
        await self._refresh_pools()
        if not self._pools:
            return 0
        if self._clock.monotonic() >= self._reread_at:
            self._reread_at = self._clock.monotonic() + REREAD_EVERY_S
            await self._stream.reread_pending(list(self._pools))
        found = await self._stream.read(list(self._pools), GROUP, CONSUMER, self._batch_size, block_ms)
        if found:
            crash_point("usage.after_read")
            await self._persist(found)
        if self._clock.monotonic() >= self._trim_at:
            self._trim_at = self._clock.monotonic() + TRIM_EVERY_S
            for name in self._pools:
                await self._stream.trim_acked(name, GROUP, KEPT_MS)
        return len(found)

    async def _refresh_pools(self) -> None:
        if self._pools and self._clock.monotonic() < self._refresh_at:
            return
        self._refresh_at = self._clock.monotonic() + POOL_REFRESH_S
        self._pools = {pool_key(pool, "usage"): pool for pool in await self._admission.list_pools()}

    async def _persist(self, found: Sequence[StreamEntry]) -> None:
        batch = _parse(found)
        crash_point("usage.before_insert")
        try:
            await self._commit(batch)
        except (DataError, IntegrityError):
            # One event that the database refuses must not hold up the rest: each goes alone.
            for entry in found:
                await self._commit_alone(entry)
        crash_point("usage.after_commit")
        crash_point("usage.before_ack")
        by_stream: dict[str, list[str]] = {}
        for entry in found:
            by_stream.setdefault(entry.stream, []).append(entry.entry_id)
        for stream, entry_ids in by_stream.items():
            await self._publish(self._pools[stream], batch.request_ids.get(stream, []))
            await self._stream.ack(stream, GROUP, entry_ids)
        crash_point("usage.after_ack")

    async def _commit(self, batch: _Batch) -> None:
        now = datetime.fromtimestamp(self._clock.wall(), UTC)
        self._observe(batch, await self._store.write(lambda connection: _insert(connection, batch, now)))

    async def _commit_alone(self, entry: StreamEntry) -> None:
        try:
            await self._commit(_parse([entry]))
        except (DataError, IntegrityError) as error:
            reason = f"the database refuses it: {type(error.orig).__name__}"
            letter = DeadLetter(entry.stream, entry.entry_id, reason, _body(entry))
            await self._commit(_Batch([], [letter]))

    async def _publish(self, pool: Pool, request_ids: Sequence[str]) -> None:
        """Name what is durable, so that outboxes may forget it; names older than an hour go."""
        now_ms = int(self._clock.wall() * 1000)
        if request_ids:
            key = pool_key(pool, "committed")
            with store_errors():
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.zadd(key, dict.fromkeys(request_ids, now_ms))
                    pipe.zremrangebyscore(key, "-inf", now_ms - COMMITTED_KEPT_MS)
                    await pipe.execute()

    def _observe(self, batch: _Batch, fresh: Sequence[LedgerEntry]) -> None:
        counts = {
            "inserted": len(fresh),
            "duplicate": len(batch.entries) - len(fresh),
            "dead_letter": len(batch.letters),
        }
        if fresh:
            self._on_rows()
        for outcome, count in counts.items():
            self._metrics.usage_events_total.labels(outcome).inc(count)
        for letter in batch.letters:
            structlog.get_logger().error("usage_dead_letter", entry_id=letter.entry_id, reason=letter.reason)
        for entry in fresh:
            if not _is_sampled(entry.traceparent):
                continue
            with tracer().start_as_current_span("usage.insert", context=context_from(entry.traceparent)) as span:
                span.set_attribute("millrace.request_id", entry.request_id)
                span.set_attribute("millrace.tenant", entry.tenant)
                span.set_attribute("gen_ai.usage.input_tokens", entry.billed.prompt)
                span.set_attribute("gen_ai.usage.output_tokens", entry.billed.completion)


def _is_sampled(traceparent: str) -> bool:
    """The last bit of the flags; a request that is not traced gets no span here either."""
    return traceparent[-1:] in frozenset("13579bdf")


def _parse(found: Sequence[StreamEntry]) -> _Batch:
    batch = _Batch([], [])
    for entry in found:
        raw = _body(entry)
        try:
            if REPORT in entry.fields:
                batch.worker_rows.append(parse_report(raw))
                continue
            parsed = parse_event(raw, published_ms=int(entry.entry_id.partition("-")[0]))
        except PoisonEvent as poison:
            batch.letters.append(DeadLetter(entry.stream, entry.entry_id, str(poison), raw))
            request_id = request_id_of(raw) if REPORT not in entry.fields else None
        else:
            batch.entries.append(parsed)
            batch.places.append((entry.stream, entry.entry_id))
            request_id = parsed.request_id
        if request_id is not None:
            batch.request_ids.setdefault(entry.stream, []).append(request_id)
    return batch


def _conflicts(connection: sa.Connection, batch: _Batch, fresh: Sequence[LedgerEntry]) -> list[DeadLetter]:
    if len(fresh) == len(batch.entries):
        return []
    new = set(map(id, fresh))
    doubles = {id(entry) for entry in conflicting(connection, [e for e in batch.entries if id(e) not in new])}
    return [
        DeadLetter(*place, CONFLICT, entry.raw)
        for place, entry in zip(batch.places, batch.entries, strict=True)
        if id(entry) in doubles
    ]


def _body(entry: StreamEntry) -> bytes:
    return entry.fields.get(REPORT) or entry.fields.get("e", b"")


def _insert(connection: sa.Connection, batch: _Batch, now: datetime) -> list[LedgerEntry]:
    fresh = insert_entries(connection, batch.entries, now)
    insert_worker_rows(connection, batch.worker_rows, now)
    crash_point("usage.after_insert")
    insert_dead_letters(connection, batch.letters + _conflicts(connection, batch, fresh), now)
    crash_point("usage.before_commit")
    return fresh
