"""Ledger rows as flat records with stable columns, and the writers of each export format."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from typing import IO

from google.protobuf import timestamp_pb2
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_service_pb2 as pb

# Columns are only ever added at the end.
COLUMNS = (
    "row_id", "request_id", "tenant", "project", "key_id", "model", "version", "priority_class", "length_class",
    "terminal_state", "finish_reason", "error_reason", "billed_prompt_tokens", "billed_cached_tokens",
    "billed_completion_tokens", "billed_reasoning_tokens", "delivered_completion_tokens", "admit_time", "start_time",
    "first_token_time", "end_time", "attempt", "worker_instance", "gateway_instance", "user", "metadata", "insert_time",
)  # fmt: skip
Value = str | int | dict[str, str]
Write = Callable[[pb.LedgerRow], None]


def record_of(row: pb.LedgerRow) -> dict[str, Value]:
    """One row by column name; times are RFC 3339 in UTC or empty."""
    event, times, billed = row.event, row.event.times, row.event.billed
    values: tuple[Value, ...] = (
        row.row_id,
        event.request_id,
        event.tenant,
        event.project,
        event.key_id,
        event.model.model,
        event.model.version,
        _word(common_pb2.PriorityClass.items(), event.priority_class, "PRIORITY_CLASS_"),
        _word(common_pb2.LengthClass.items(), event.length_class, "LENGTH_CLASS_"),
        _word(common_pb2.TerminalState.items(), event.terminal_state, "TERMINAL_STATE_"),
        _word(common_pb2.FinishReason.items(), event.finish_reason, "FINISH_REASON_"),
        event.error_reason,
        billed.prompt_token_count,
        billed.cached_token_count,
        billed.completion_token_count,
        billed.reasoning_token_count,
        event.delivered.completion_token_count,
        *(_time(times, name) for name in ("admit_time", "start_time", "first_token_time", "end_time")),
        event.attempt,
        event.worker_instance,
        event.gateway_instance,
        event.user,
        dict(event.metadata),
        _stamp(row.insert_time),
    )
    return dict(zip(COLUMNS, values, strict=True))


def csv_writer(out: IO[str]) -> Write:
    """RFC 4180 with a header line. Text that a spreadsheet would take for a formula is led by an apostrophe."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)

    def write(row: pb.LedgerRow) -> None:
        writer.writerow([_cell(value) for value in record_of(row).values()])

    return write


def jsonl_writer(out: IO[str]) -> Write:
    """One JSON object a line."""

    def write(row: pb.LedgerRow) -> None:
        out.write(json.dumps(record_of(row), ensure_ascii=False, separators=(",", ":")) + "\n")

    return write


def _cell(value: Value) -> str | int:
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, sort_keys=True) if value else ""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + value
    return value


def _word(names: Iterable[tuple[str, int]], number: int, prefix: str) -> str:
    # The value of a newer producer has no name here: it stays a number.
    name = next((name for name, value in names if value == number), str(number))
    word = name.removeprefix(prefix).lower()
    return "" if word == "unspecified" else word


def _time(times: common_pb2.RequestTimes, name: str) -> str:
    return _stamp(getattr(times, name)) if times.HasField(name) else ""  # type: ignore[arg-type]


def _stamp(stamp: timestamp_pb2.Timestamp) -> str:
    return stamp.ToJsonString()
