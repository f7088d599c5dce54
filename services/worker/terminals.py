"""Ends the requests of gateways that stayed away: only this worker knows what those gateways had received.

Owns terminals that Redis has not taken yet, bounded. Called by the hub when a gateway's grace is over.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from typing import Protocol

import structlog
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_types import SHADOW_TENANT, FinishResult, Pool, Terminal
from services.common.clock import Clock
from services.common.errors import MillraceError
from services.common.lifecycle import crash_point
from services.worker import wire
from services.worker.streams import RequestStream

RETRY_S = 1.0
BATCH = 32
MAX_PENDING = 16_384


class FinishStore(Protocol):
    """The part of the admission store that is used here."""

    async def finish(self, pool: Pool, terminals: list[Terminal]) -> list[FinishResult]: ...


def gateway_lost_terminal(stream: RequestStream, *, worker_instance: str, now_wall: float) -> Terminal:
    """`failed(GATEWAY_LOST)` with what the gateway said was delivered; free when there were none."""
    facts, entry = stream.facts, stream.facts.entry
    counts = stream.delivered_counts()
    delivered = sum(counts)
    pays = delivered > 0 and entry.tenant != SHADOW_TENANT
    prompt, cached = facts.prompt_token_count, stream.cached_token_count
    event = usage_event_pb2.UsageEvent(
        request_id=facts.request_id,
        tenant=entry.tenant,
        project=entry.project,
        key_id=entry.key_id,
        model=entry.model,
        pool=entry.pool,
        priority_class=entry.priority_class,
        length_class=entry.length_class,
        terminal_state=common_pb2.TERMINAL_STATE_FAILED,
        error_reason="GATEWAY_LOST",
        delivered=wire.token_usage(prompt, cached, delivered),
        billed=wire.token_usage(prompt, cached, delivered) if pays else common_pb2.TokenUsage(),
        attempt=facts.attempt,
        epoch=facts.epoch,
        worker_instance=worker_instance,
        gateway_instance=facts.gateway_instance,
        traceparent=entry.traceparent,
        choice_token_counts=counts,
    )
    marks = stream.marks
    if facts.claimed_at is not None:
        event.times.claim_time.CopyFrom(facts.claimed_at)
    event.times.submit_time.CopyFrom(wire.timestamp_of(marks.submit))
    if marks.start is not None:
        event.times.start_time.CopyFrom(wire.timestamp_of(marks.start))
    if marks.first_token is not None:
        event.times.first_token_time.CopyFrom(wire.timestamp_of(marks.first_token))
    event.times.end_time.CopyFrom(wire.timestamp_of(now_wall))
    computed = (prompt if stream.started else 0) + stream.produced_count()
    state = common_pb2.TERMINAL_STATE_FAILED
    return Terminal(entry.tenant, facts.request_id, facts.epoch, state, computed, event)


class TerminalWriter:
    """Writes terminals until Redis has taken them; over the bound the oldest is given up and logged."""

    def __init__(self, store: FinishStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._pending: dict[str, tuple[Pool, Terminal]] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, pool: Pool, terminal: Terminal) -> None:
        """Queue one terminal; returns at once."""
        if len(self._pending) >= MAX_PENDING:
            lost = next(iter(self._pending))
            del self._pending[lost]
            structlog.get_logger().error("terminal_given_up", request_id=lost)
        self._pending[terminal.request_id] = (pool, terminal)
        self._wake.set()

    async def run(self) -> None:
        """Write what is queued, again after a second when Redis is away, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while not await self.flush():
                await self._clock.sleep(RETRY_S)

    async def flush(self) -> bool:
        """One try for everything queued; False when Redis is away."""
        by_pool: dict[Pool, list[Terminal]] = defaultdict(list)
        for pool, terminal in self._pending.values():
            by_pool[pool].append(terminal)
        for pool, terminals in by_pool.items():
            waiting = iter(terminals)
            while batch := list(itertools.islice(waiting, BATCH)):
                try:
                    crash_point("worker.before_finish")
                    results = await self._store.finish(pool, batch)
                    crash_point("worker.after_finish")
                except MillraceError as error:
                    structlog.get_logger().warning("finish_delayed", reason=error.row.reason, count=len(self._pending))
                    return False
                for terminal, result in zip(batch, results, strict=True):
                    self._pending.pop(terminal.request_id, None)
                    structlog.get_logger().info("gateway_lost", request_id=terminal.request_id, won=result.won)
        return True
