"""Ledger rows as flat records with stable columns, their digests, and one line of text a row in each text format.

Every line can be read back, so that `millrace usage verify` compares what a file says with what was signed. Used by
the usage service (digests, HTTP exports) and by the command line (files). Pure.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from google.protobuf import timestamp_pb2
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2
from millrace.usage.v1 import usage_service_pb2 as pb

# Columns are only ever added at the end.
COLUMNS = (
    "row_id", "request_id", "tenant", "project", "key_id", "model", "version", "priority_class", "length_class",
    "terminal_state", "finish_reason", "error_reason", "billed_prompt_tokens", "billed_cached_tokens",
    "billed_completion_tokens", "billed_reasoning_tokens", "delivered_completion_tokens", "admit_time", "start_time",
    "first_token_time", "end_time", "attempt", "worker_instance", "gateway_instance", "user", "metadata", "insert_time",
    "claim_time", "targets_met",
)  # fmt: skip
# Files of earlier versions have the first columns only, and are verified as they are.
KNOWN_COLUMNS = (COLUMNS[:27], COLUMNS)
NUMBERS = frozenset(name for name in COLUMNS if name.endswith("_tokens") or name in ("row_id", "attempt"))
TIMES = frozenset(name for name in COLUMNS if name.endswith("_time"))
Value = str | int | dict[str, str]
Record = dict[str, Value]
DIGEST_BYTES = 16
EVENT_TYPE = "millrace.request"
EVENT_SOURCE = "millrace/gateway"
_TRUTH = ("false", "true")
_QUOTED = re.compile(r'[",\r\n]')
# What a spreadsheet would take for a formula; an apostrophe leads it, and what begins with one.
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "'")


def record_of(row: pb.LedgerRow) -> Record:
    """One row by column name; times are RFC 3339 in UTC or empty."""
    event = row.event
    times, billed, model, tags = event.times, event.billed, event.model, event.metadata
    values: tuple[Value, ...] = (
        row.row_id,
        event.request_id,
        event.tenant,
        event.project,
        event.key_id,
        model.model,
        model.version,
        _word(_PRIORITY, event.priority_class),
        _word(_LENGTH, event.length_class),
        _word(_TERMINAL, event.terminal_state),
        _word(_FINISH, event.finish_reason),
        event.error_reason,
        billed.prompt_token_count,
        billed.cached_token_count,
        billed.completion_token_count,
        billed.reasoning_token_count,
        event.delivered.completion_token_count,
        _time(times, "admit_time"),
        _time(times, "start_time"),
        _time(times, "first_token_time"),
        _time(times, "end_time"),
        event.attempt,
        event.worker_instance,
        event.gateway_instance,
        event.user,
        {name: tags[name] for name in sorted(tags)},
        _stamp(row.insert_time),
        _time(times, "claim_time"),
        _met(event.latency) if event.HasField("latency") else "",
    )
    return dict(zip(COLUMNS, values, strict=True))


def _met(latency: usage_event_pb2.Latency) -> str:
    return _TRUTH[latency.targets_met] if latency.HasField("targets_met") else ""


def digest_of_record(record: Record) -> bytes:
    """The first 16 bytes of SHA-256 over the record's values as compact JSON."""
    return hashlib.sha256(msgspec.json.encode(list(record.values()))).digest()[:DIGEST_BYTES]


@dataclasses.dataclass(frozen=True, slots=True)
class LineFormat:
    """A format of one record a line: how a record is written, and how a line's parsed value becomes a record again.

    `head` is the first line of a file. `read` raises ValueError or LookupError for what no record can have made.
    """

    media_type: str
    head: str
    line: Callable[[Record], str]
    read: Callable[[str], Record]
    # First lines of files of earlier versions.
    earlier_heads: tuple[str, ...] = ()


def csv_line(record: Record) -> str:
    """RFC 4180. Text that a spreadsheet would take for a formula is led by an apostrophe."""
    return ",".join(map(_cell, record.values())) + "\n"


def _read_csv(line: str) -> Record:
    (cells,) = csv.reader(io.StringIO(line, newline=""))
    record: Record = {}
    for name, cell in zip(_known(len(cells)), cells, strict=True):
        text = cell[1:] if cell.startswith("'") else cell
        record[name] = int(text) if name in NUMBERS else (json.loads(text or "{}") if name == "metadata" else text)
    return record


def json_line(record: Record) -> str:
    """One JSON object."""
    return _json(record) + "\n"


def cloud_event(record: Record) -> dict[str, Any]:
    """A CloudEvents 1.0 structured event: unique by source and id, `subject` is the tenant."""
    return {
        "specversion": "1.0",
        "type": EVENT_TYPE,
        "source": EVENT_SOURCE,
        "id": record["request_id"],
        "time": record["end_time"],
        "subject": record["tenant"],
        "datacontenttype": "application/json",
        "data": record,
    }


def lago_event(record: Record) -> dict[str, Any]:
    """An event of Lago's `POST /api/v1/events`: the subscription is the tenant, unique by transaction_id."""
    seconds = timestamp_pb2.Timestamp()
    seconds.FromJsonString(str(record["end_time"]))
    return {
        "event": {
            "transaction_id": record["request_id"],
            "external_subscription_id": record["tenant"],
            "code": EVENT_TYPE.replace(".", "_"),
            "timestamp": f"{seconds.seconds}.{seconds.nanos // 1_000_000:03d}",
            "properties": record,
        }
    }


def _read_json(line: str) -> Record:
    return _checked(json.loads(line))


def _checked(value: Any) -> Record:
    if not isinstance(value, dict) or tuple(value) not in KNOWN_COLUMNS:
        raise ValueError("not a usage record")
    return value


def _known(count: int) -> tuple[str, ...]:
    found = [columns for columns in KNOWN_COLUMNS if len(columns) == count]
    if not found:
        raise ValueError("not a usage record")
    return found[0]


def _cell(value: Value) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        text = json.dumps(value, ensure_ascii=False, sort_keys=True) if value else ""
    else:
        text = "'" + value if value.startswith(FORMULAS) else value
    # Readers take a bare \r or \n for the end of a line.
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text


def _csv_head(columns: Sequence[str]) -> str:
    return ",".join(columns) + "\n"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


FORMATS: Mapping[str, LineFormat] = {
    "csv": LineFormat(
        "text/csv", _csv_head(COLUMNS), csv_line, _read_csv, tuple(_csv_head(columns) for columns in KNOWN_COLUMNS[:-1])
    ),
    "jsonl": LineFormat("application/x-ndjson", "", json_line, _read_json),
    "cloudevents": LineFormat(
        "application/x-ndjson",
        "",
        lambda record: _json(cloud_event(record)) + "\n",
        lambda line: _checked(json.loads(line)["data"]),
    ),
    "lago": LineFormat(
        "application/x-ndjson",
        "",
        lambda record: _json(lago_event(record)) + "\n",
        lambda line: _checked(json.loads(line)["event"]["properties"]),
    ),
}


def _names(enum: Any, prefix: str) -> dict[int, str]:
    words = {number: name.removeprefix(prefix).lower() for name, number in enum.items()}
    return {number: "" if word == "unspecified" else word for number, word in words.items()}


_PRIORITY = _names(common_pb2.PriorityClass, "PRIORITY_CLASS_")
_LENGTH = _names(common_pb2.LengthClass, "LENGTH_CLASS_")
_TERMINAL = _names(common_pb2.TerminalState, "TERMINAL_STATE_")
_FINISH = _names(common_pb2.FinishReason, "FINISH_REASON_")


def _word(names: Mapping[int, str], number: int) -> str:
    # The value of a newer producer has no name here: it stays a number.
    return names[number] if number in names else str(number)


def _time(times: common_pb2.RequestTimes, name: str) -> str:
    return _stamp(getattr(times, name)) if times.HasField(name) else ""  # type: ignore[arg-type]


def _stamp(stamp: timestamp_pb2.Timestamp) -> str:
    """As `ToJsonString` writes it, at a tenth of the time: a row has seven."""
    second, nanos = _second(stamp.seconds), stamp.nanos
    if nanos == 0:
        return second + "Z"
    if nanos % 1_000_000 == 0:
        return f"{second}.{nanos // 1_000_000:03d}Z"
    return f"{second}.{nanos // 1_000:06d}Z" if nanos % 1_000 == 0 else f"{second}.{nanos:09d}Z"


@functools.lru_cache(1_024)
def _second(seconds: int) -> str:
    # Rows that stand together ended together.
    return (datetime(1970, 1, 1) + timedelta(seconds=seconds)).isoformat()
