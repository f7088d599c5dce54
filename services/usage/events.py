"""Turns the bytes of a usage event into a checked ledger entry, or says why they are poison.

Pure: no database, no Redis, no clock. Called by the consumer and by tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from google.protobuf import message as protobuf_message
from google.protobuf import timestamp_pb2
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

MAX_EVENT_BYTES = 262_144
MAX_ID_CHARS = 256
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Of the years 1 to 9999.
FIRST_SECOND = -62_135_596_800
LAST_SECOND = 253_402_300_799


class PoisonEvent(Exception):
    """The event can never become a ledger row; `str()` is the reason kept with the dead letter."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Token counts of one request; cached <= prompt and reasoning <= completion."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Prompt, cached, completion, reasoning: the order of the ledger's columns."""
        return (self.prompt, self.cached, self.completion, self.reasoning)

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.completion + other.completion,
            self.reasoning + other.reasoning,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One usage event, checked. `day` is the UTC day of its end, by which balances are kept; `raw` is the event.

    `times` are the marks of TIME_FIELDS in UTC, None where absent; the last is `end_time`.
    """

    request_id: str
    tenant: str
    end_time: datetime
    times: tuple[datetime | None, ...]
    delivered: Tokens
    billed: Tokens
    traceparent: str
    event: usage_event_pb2.UsageEvent
    raw: bytes

    @property
    def day(self) -> date:
        return self.end_time.date()


def parse_event(raw: bytes, *, published_ms: int) -> LedgerEntry:
    """Check one event. `published_ms` (the stream entry's time) stands in where the producer left out the end.

    Raises PoisonEvent.
    """
    if len(raw) > MAX_EVENT_BYTES:
        raise PoisonEvent(f"the event has {len(raw)} bytes, more than {MAX_EVENT_BYTES}")
    try:
        event = usage_event_pb2.UsageEvent.FromString(raw)
    except protobuf_message.DecodeError:
        raise PoisonEvent("the event is not a UsageEvent message") from None
    check_id("request_id", event.request_id)
    check_id("tenant", event.tenant)
    if event.terminal_state not in _TERMINAL_STATES:
        raise PoisonEvent("terminal_state is not set")
    delivered = _tokens("delivered", event.delivered)
    billed = _tokens("billed", event.billed)
    if event.terminal_state == common_pb2.TERMINAL_STATE_REJECTED and billed != Tokens():
        raise PoisonEvent("a rejected request is billed")
    # A slice is a list at once; to loop over the field itself costs ten times as much.
    if min(event.choice_token_counts[:], default=0) < 0:
        raise PoisonEvent("choice_token_counts has a negative count")
    stamps = event.times
    *marks, last = [time_of(stamps, name) for name in TIME_FIELDS]
    end_time = last if last is not None else _published(published_ms)
    times = (*marks, end_time)
    return LedgerEntry(
        event.request_id, event.tenant, end_time, times, delivered, billed, event.traceparent, event, raw
    )


TIME_FIELDS = ("admit_time", "claim_time", "submit_time", "start_time", "first_token_time", "end_time")
_TERMINAL_STATES = frozenset(common_pb2.TerminalState.values()) - {common_pb2.TERMINAL_STATE_UNSPECIFIED}


def request_id_of(raw: bytes) -> str | None:
    """The request id of an event that may be poison, so that its producer can forget it; None if unreadable."""
    if len(raw) > MAX_EVENT_BYTES:
        return None
    try:
        event = usage_event_pb2.UsageEvent.FromString(raw)
    except protobuf_message.DecodeError:
        return None
    return event.request_id or None


def time_of(holder: Any, name: str) -> datetime | None:
    """The time in the field `name` of a message, None where it is absent. Raises PoisonEvent."""
    if not holder.HasField(name):
        return None
    stamp: timestamp_pb2.Timestamp = getattr(holder, name)
    seconds, nanos = stamp.seconds, stamp.nanos
    # Not ToDatetime(), which takes ten times as long and is called six times an event.
    if not (FIRST_SECOND <= seconds <= LAST_SECOND and 0 <= nanos < 10**9):
        raise PoisonEvent(f"{name} is out of range")
    return EPOCH + timedelta(0, seconds, nanos // 1000)


def enum_label(names: Mapping[int, str], prefix: str, value: int) -> str:
    """`TERMINAL_STATE_COMPLETED` → `completed`; unset is the empty text, an unknown number is kept as digits."""
    name = names.get(value)
    if name is None:
        return str(value)
    label = name.removeprefix(prefix).lower()
    return "" if label == "unspecified" else label


def check_id(name: str, text: str) -> None:
    """Raises PoisonEvent for a text that cannot be an id."""
    if not text:
        raise PoisonEvent(f"{name} is empty")
    if len(text) > MAX_ID_CHARS:
        raise PoisonEvent(f"{name} has {len(text)} characters, more than {MAX_ID_CHARS}")
    if not text.isprintable():
        raise PoisonEvent(f"{name} has control characters")


def _tokens(name: str, usage: common_pb2.TokenUsage) -> Tokens:
    prompt, cached = usage.prompt_token_count, usage.cached_token_count
    completion, reasoning = usage.completion_token_count, usage.reasoning_token_count
    if min(prompt, cached, completion, reasoning) < 0:
        raise PoisonEvent(f"{name} has a negative count")
    if cached > prompt or reasoning > completion:
        raise PoisonEvent(f"{name} has a part that is larger than its whole")
    return Tokens(prompt, cached, completion, reasoning)


def _published(published_ms: int) -> datetime:
    try:
        return datetime.fromtimestamp(published_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise PoisonEvent("the event has no end time and its stream entry has no valid one") from None
