"""What workers computed: reports from the usage stream, checked, and one row an attempt and a span of a worker's time.

A row's key is its event id, and what is there stays: a report that comes again changes nothing. Functions that take a
connection block; they run inside the consumer's transaction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from google.protobuf import duration_pb2
from google.protobuf import message as protobuf_message
from millrace.usage.v1 import usage_event_pb2

from services.usage import schema
from services.usage.bulk import insert_missing
from services.usage.events import PoisonEvent, check_id, time_of
from services.usage.rows import Value, storable

# Of one report: 500 attempts take about 150 bytes each.
MAX_REPORT_BYTES = 1_048_576
# A span or a share longer than this was not measured.
MAX_SECONDS = 10 * 366 * 86_400

ATTEMPT_COLUMNS = (
    "request_id", "epoch", "worker_instance", "attempt", "tenant", "model", "version", "prompt_tokens",
    "cached_tokens", "prefill_tokens", "decode_tokens", "accepted_draft_tokens", "rejected_draft_tokens",
    "block_milliseconds", "prefill_nanos", "decode_nanos", "choices", "error_reason", "start_time", "end_time",
    "asking_worker", "insert_time",
)  # fmt: skip
TIME_COLUMNS = (
    "worker_instance", "sequence", "model", "version", "start_time", "end_time", "busy_nanos", "idle_nanos",
    "insert_time",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerRows:
    """Values of ATTEMPT_COLUMNS and of TIME_COLUMNS, but for the time of insertion."""

    attempts: list[tuple[Value, ...]] = dataclasses.field(default_factory=list)
    times: list[tuple[Value, ...]] = dataclasses.field(default_factory=list)


def parse_report(raw: bytes) -> WorkerRows:
    """Check one report as a whole. Raises PoisonEvent."""
    if len(raw) > MAX_REPORT_BYTES:
        raise PoisonEvent(f"the report has {len(raw)} bytes, more than {MAX_REPORT_BYTES}")
    try:
        report = usage_event_pb2.WorkerReport.FromString(raw)
    except protobuf_message.DecodeError:
        raise PoisonEvent("the report is not a WorkerReport message") from None
    return WorkerRows([_attempt(event) for event in report.attempts], [_time(span) for span in report.times])


def insert_worker_rows(connection: sa.Connection, rows: Sequence[WorkerRows], now: datetime) -> None:
    """Insert what is not there yet."""
    attempts = [(*row, now) for each in rows for row in each.attempts]
    times = [(*row, now) for each in rows for row in each.times]
    insert_missing(connection, schema.attempts, ATTEMPT_COLUMNS, attempts)
    insert_missing(connection, schema.worker_times, TIME_COLUMNS, times)


def _attempt(event: usage_event_pb2.AttemptEvent) -> tuple[Value, ...]:
    check_id("request_id", event.request_id)
    check_id("tenant", event.tenant)
    check_id("worker_instance", event.worker_instance)
    counts = (
        event.prompt_token_count,
        event.cached_token_count,
        event.prefill_token_count,
        event.decode_token_count,
        event.accepted_draft_token_count,
        event.rejected_draft_token_count,
        event.block_milliseconds,
    )
    ranges = [(each.choice, each.start_index, each.end_index) for each in event.choices[:]]
    if min(counts) < 0 or any(choice < 0 or not 0 <= start <= end for choice, start, end in ranges):
        raise PoisonEvent("an attempt has a negative count")
    return (
        event.request_id,
        event.epoch,
        event.worker_instance,
        event.attempt,
        event.tenant,
        storable(event.model.model),
        storable(event.model.version),
        *counts,
        _nanos("prefill_time", event.prefill_time),
        _nanos("decode_time", event.decode_time),
        str([list(each) for each in ranges]),
        storable(event.error_reason),
        time_of(event, "start_time"),
        _required(event, "end_time"),
        storable(event.asking_worker_instance) or None,
    )


def _time(span: usage_event_pb2.WorkerTime) -> tuple[Value, ...]:
    check_id("worker_instance", span.worker_instance)
    return (
        span.worker_instance,
        span.sequence,
        storable(span.model.model),
        storable(span.model.version),
        _required(span, "start_time"),
        _required(span, "end_time"),
        _nanos("busy", span.busy),
        _nanos("idle", span.idle),
    )


def _required(holder: Any, name: str) -> datetime:
    time = time_of(holder, name)
    if time is None:
        raise PoisonEvent(f"{name} is missing")
    return time


def _nanos(name: str, duration: duration_pb2.Duration) -> int:
    if not (0 <= duration.seconds <= MAX_SECONDS and 0 <= duration.nanos < 10**9):
        raise PoisonEvent(f"{name} is out of range")
    return duration.seconds * 10**9 + duration.nanos
