"""What this worker computed, told to the ledger: one event an attempt, and how its time was spent.

Collects on the event loop, writes batches to the pool's usage stream, at most one entry a second and 500 attempts. The
ledger drops what it has by its id, so a batch whose fate is unknown is written again. Bounded: over it the oldest go.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import structlog
from millrace.usage.v1 import usage_event_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.clock import Clock
from services.common.errors import MillraceError
from services.worker import wire
from services.worker.engine.step_costs import ChoiceCost
from services.worker.engine_loop import LoopReport
from services.worker.load_reporter import WorkerIdentity
from services.worker.streams import RequestStream
from services.worker.time_account import TimeSpent

FLUSH_S = 1.0
TIME_EVERY_S = 10.0
BATCH = 500
MAX_PENDING = 16_384
TOKEN_ID_BYTES = 4


@dataclasses.dataclass(slots=True)
class _Open:
    """An attempt that the engine is not done with. `left` counts its choices without a last output."""

    describe: Callable[[], usage_event_pb2.AttemptEvent]
    left: int
    costs: list[ChoiceCost] = dataclasses.field(default_factory=list)


class AttemptLog:
    """Attempts in hand, and the events of those that ended, until they are taken."""

    def __init__(self, worker_instance: str) -> None:
        self._instance = worker_instance
        self._open: dict[tuple[str, int], _Open] = {}
        self._events: deque[usage_event_pb2.AttemptEvent] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def open(self, stream: RequestStream) -> None:
        """The engine will get this attempt."""
        facts = stream.facts
        self._open[facts.request_id, facts.epoch] = _Open(functools.partial(_of_stream, stream), len(stream.choices))

    def open_for_peer(self, start: worker_service_pb2.PrefillStart) -> None:
        """The engine will compute this prompt for another worker's attempt."""
        self._open[start.request_id, start.epoch] = _Open(functools.partial(_of_peer, start), 1)

    def take_report(self, report: LoopReport, now_wall: float) -> None:
        """Engine outputs that the streams have taken already; an attempt whose choices all ended becomes an event."""
        for cost in report.costs:
            if (attempt := self._open.get((cost.key.request_id, cost.key.epoch))) is not None:
                attempt.costs.append(cost)
        for output in report.outputs:
            if output.finish_reason is None:
                continue
            key = output.key.request_id, output.key.epoch
            if (attempt := self._open.get(key)) is None:
                continue
            attempt.left -= 1
            if not attempt.left:
                self._end(key, now_wall)
        for rejection in report.rejections:
            self._end((rejection.request_id, rejection.epoch), now_wall)
        if report.failed:
            for key in list(self._open):
                self._end(key, now_wall)

    def peek(self, count: int) -> list[usage_event_pb2.AttemptEvent]:
        """The oldest events."""
        return [self._events[index] for index in range(min(count, len(self._events)))]

    def forget(self, events: Iterable[usage_event_pb2.AttemptEvent]) -> None:
        """These were written."""
        written = {id(event) for event in events}
        self._events = deque(event for event in self._events if id(event) not in written)

    def is_idle(self) -> bool:
        """True when the engine is done with every attempt."""
        return not self._open

    def _end(self, key: tuple[str, int], now_wall: float) -> None:
        attempt = self._open.pop(key, None)
        if attempt is None:
            return
        if len(self._events) >= MAX_PENDING:
            lost = self._events.popleft()
            structlog.get_logger().error("attempt_event_given_up", request_id=lost.request_id)
        self._events.append(_event(attempt, self._instance, now_wall))


class UsageReporter:
    """Writes what the log holds. `publish` appends one entry to the usage stream; raises MillraceError."""

    def __init__(
        self,
        log: AttemptLog,
        publish: Callable[[bytes], Awaitable[None]],
        identity: WorkerIdentity,
        time_spent: Callable[[], TimeSpent],
        clock: Clock,
    ) -> None:
        self._log = log
        self._publish = publish
        self._identity = identity
        self._time_spent = time_spent
        self._clock = clock
        self._told: TimeSpent | None = None
        self._sequence = 0
        self._away = False

    async def run(self) -> None:
        """Until cancelled."""
        self._told = self._time_spent()
        while True:
            await self._clock.sleep(FLUSH_S)
            await self.flush()

    async def flush(self, *, last: bool = False) -> None:
        """Write what is due, the `last` time also a shorter span; what Redis does not take is kept."""
        spent = self._time_spent()
        due = self._told is not None and (last or spent.until - self._told.until >= TIME_EVERY_S)
        while len(self._log) or due:
            events = self._log.peek(BATCH)
            report = usage_event_pb2.WorkerReport(attempts=events)
            if due and self._told is not None:
                report.times.append(self._span(self._told, spent))
            try:
                await self._publish(report.SerializeToString())
            except MillraceError as error:
                if not self._away:
                    structlog.get_logger().warning("usage_report_delayed", reason=error.row.reason)
                self._away = True
                return
            self._away = False
            self._log.forget(events)
            if due:
                self._told, self._sequence, due = spent, self._sequence + 1, False

    def _span(self, since: TimeSpent, until: TimeSpent) -> usage_event_pb2.WorkerTime:
        now_wall, now = self._clock.wall(), self._clock.monotonic()
        return usage_event_pb2.WorkerTime(
            worker_instance=self._identity.instance,
            sequence=self._sequence + 1,
            model=self._identity.model,
            start_time=wire.timestamp_of(now_wall - (now - since.until)),
            end_time=wire.timestamp_of(now_wall - (now - until.until)),
            busy=wire.duration_of(until.busy_s - since.busy_s),
            idle=wire.duration_of(until.idle_s - since.idle_s),
        )


def _event(attempt: _Open, worker_instance: str, now_wall: float) -> usage_event_pb2.AttemptEvent:
    event, costs = attempt.describe(), attempt.costs
    event.worker_instance = worker_instance
    event.prefill_token_count = sum(cost.prefill_token_count for cost in costs)
    event.decode_token_count = sum(cost.decode_token_count for cost in costs)
    event.accepted_draft_token_count = sum(cost.accepted_draft_token_count for cost in costs)
    event.rejected_draft_token_count = sum(cost.rejected_draft_token_count for cost in costs)
    event.block_milliseconds = round(sum(cost.block_seconds for cost in costs) * 1000)
    event.prefill_time.CopyFrom(wire.duration_of(sum(cost.prefill_seconds for cost in costs)))
    event.decode_time.CopyFrom(wire.duration_of(sum(cost.decode_seconds for cost in costs)))
    event.end_time.CopyFrom(wire.timestamp_of(now_wall))
    return event


def _of_stream(stream: RequestStream) -> usage_event_pb2.AttemptEvent:
    facts, marks = stream.facts, stream.marks
    return usage_event_pb2.AttemptEvent(
        request_id=facts.request_id,
        tenant=facts.entry.tenant,
        attempt=facts.attempt,
        epoch=facts.epoch,
        model=facts.entry.model,
        priority_class=facts.entry.priority_class,
        prompt_token_count=facts.prompt_token_count,
        cached_token_count=stream.cached_token_count,
        choices=[
            usage_event_pb2.ChoiceRange(choice=choice.index, start_index=choice.start, end_index=choice.end)
            for choice in stream.choices.values()
        ],
        error_reason=stream.failure.reason if stream.failure is not None else "",
        start_time=None if marks.start is None else wire.timestamp_of(marks.start),
    )


def _of_peer(start: worker_service_pb2.PrefillStart) -> usage_event_pb2.AttemptEvent:
    return usage_event_pb2.AttemptEvent(
        request_id=start.request_id,
        tenant=start.tenant,
        epoch=start.epoch,
        model=start.model,
        priority_class=start.priority_class,
        prompt_token_count=len(start.token_ids) // TOKEN_ID_BYTES,
        asking_worker_instance=start.worker_instance,
    )
