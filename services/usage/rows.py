"""One checked usage event as the values of one ledger row. Pure; called once an event, so it is written to be cheap."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.usage.events import TIME_FIELDS, LedgerEntry, enum_label
from services.usage.schema import LATENCY_COLUMNS, TOKEN_COLUMNS

Value = str | int | bytes | datetime | None

_JSON = msgspec.json.Encoder(order="sorted")
_NO_LATENCY: tuple[Value, ...] = (None,) * 4

# The order of `row_values`.
ROW_COLUMNS = (
    "row_id", "request_id", "tenant", "project", "key_id", "model", "version", "manifest_digest", "pool_model", "pool",
    "shard", "priority_class", "length_class", "terminal_state", "finish_reason", "error_reason",
    *(f"delivered_{name}" for name in TOKEN_COLUMNS), *(f"billed_{name}" for name in TOKEN_COLUMNS),
    "choice_token_counts", *TIME_FIELDS, "attempt", "epoch", "worker_instance", "gateway_instance", "user_label",
    "metadata", "traceparent", "event", "insert_time", *LATENCY_COLUMNS, "targets_met",
)  # fmt: skip


def row_values(entry: LedgerEntry, row_id: int, now: datetime) -> tuple[Value, ...]:
    """The row of `entry` in the order of ROW_COLUMNS; JSON columns are text, times are aware and in UTC."""
    event = entry.event
    model, pool = event.model, event.pool
    return (
        row_id,
        entry.request_id,
        entry.tenant,
        storable(event.project),
        storable(event.key_id),
        storable(model.model),
        storable(model.version),
        model.manifest_digest,
        storable(pool.model),
        storable(pool.pool),
        pool.shard,
        _label(_PRIORITY, event.priority_class),
        _label(_LENGTH, event.length_class),
        _label(_TERMINAL, event.terminal_state),
        _label(_FINISH, event.finish_reason),
        storable(event.error_reason),
        *entry.delivered.counts,
        *entry.billed.counts,
        str(event.choice_token_counts[:]),
        *entry.times,
        event.attempt,
        event.epoch,
        storable(event.worker_instance),
        storable(event.gateway_instance),
        storable(event.user),
        _metadata(event.metadata) if event.metadata else "{}",
        storable(event.traceparent),
        entry.raw,
        now,
        *(_latency(event.latency) if event.HasField("latency") else _NO_LATENCY),
    )


def storable(text: str) -> str:
    """PostgreSQL stores no NUL in text; the event keeps what was sent."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}")


def _latency(latency: usage_event_pb2.Latency) -> tuple[Value, ...]:
    met = latency.targets_met if latency.HasField("targets_met") else None
    return (*(_micros(latency, name) for name in ("first_token", "per_token", "whole")), met)


def _micros(latency: usage_event_pb2.Latency, name: str) -> int | None:
    if not latency.HasField(name):  # type: ignore[arg-type]
        return None
    duration = getattr(latency, name)
    return int(duration.seconds) * 1_000_000 + int(duration.nanos) // 1_000


def _metadata(tags: Mapping[str, str]) -> str:
    return _JSON.encode({storable(key): storable(value) for key, value in tags.items()}).decode()


def _names(enum: type, prefix: str) -> dict[int, str]:
    names = {number: name for name, number in enum.items()}  # type: ignore[attr-defined]
    return {number: enum_label(names, prefix, number) for number in names}


_PRIORITY = _names(common_pb2.PriorityClass, "PRIORITY_CLASS_")
_LENGTH = _names(common_pb2.LengthClass, "LENGTH_CLASS_")
_TERMINAL = _names(common_pb2.TerminalState, "TERMINAL_STATE_")
_FINISH = _names(common_pb2.FinishReason, "FINISH_REASON_")


def _label(names: Mapping[int, str], value: int) -> str:
    """The word of an enum's number; the number of a newer producer is kept as digits."""
    return names.get(value) or ("" if value in names else str(value))
