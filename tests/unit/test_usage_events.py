"""What becomes a ledger entry, and what is poison and why."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest
from google.protobuf import timestamp_pb2
from hypothesis import given
from hypothesis import strategies as st
from millrace.common.v1 import common_pb2

from services.usage.events import PoisonEvent, Tokens, enum_label, parse_event, request_id_of
from tests.helpers.usage import START, make_event, parse


def test_an_event_keeps_its_bytes_and_counts() -> None:
    raw = make_event("r1", prompt=9, cached=3, completion=2).SerializeToString()

    entry = parse_event(raw, published_ms=0)

    assert (entry.raw, entry.request_id, entry.tenant, entry.end_time) == (raw, "r1", "acme", START)
    assert entry.billed == Tokens(9, 3, 2, 0)


def test_the_day_is_that_of_the_end_in_utc() -> None:
    late = datetime(2026, 3, 1, 23, 59, 59, 999_999, tzinfo=UTC)

    assert parse(make_event("r1", end_time=late)).day == date(2026, 3, 1)


def test_without_an_end_time_the_time_of_publication_stands_in() -> None:
    event = make_event("r1")
    event.times.ClearField("end_time")

    entry = parse_event(event.SerializeToString(), published_ms=int(START.timestamp() * 1000))

    assert entry.end_time == START


def test_a_time_outside_the_calendar_is_poison() -> None:
    event = make_event("r1")
    event.times.end_time.CopyFrom(timestamp_pb2.Timestamp(seconds=10**12))

    with pytest.raises(PoisonEvent, match="end_time is out of range"):
        parse(event)


def test_an_id_with_control_characters_is_poison() -> None:
    with pytest.raises(PoisonEvent, match="control characters"):
        parse(make_event("r1\n"))


def test_a_negative_count_of_a_choice_is_poison() -> None:
    event = make_event("r1")
    event.choice_token_counts.append(-1)

    with pytest.raises(PoisonEvent, match="choice_token_counts"):
        parse(event)


def test_a_poison_event_still_tells_its_request_id_where_it_can() -> None:
    assert request_id_of(make_event("r1", tenant="").SerializeToString()) == "r1"
    assert request_id_of(b"\xff\xff") is None
    assert request_id_of(b"") is None


def test_names_of_enums_are_words_and_unknown_numbers_stay_numbers() -> None:
    names = {number: name for name, number in common_pb2.FinishReason.items()}

    assert enum_label(names, "FINISH_REASON_", common_pb2.FINISH_REASON_TOOL_CALLS) == "tool_calls"
    assert enum_label(names, "FINISH_REASON_", 0) == ""
    assert enum_label(names, "FINISH_REASON_", 99) == "99"


@given(raw=st.binary(max_size=200), published_ms=st.integers(0, 2**53))
def test_any_bytes_are_an_entry_or_poison_and_nothing_else(raw: bytes, published_ms: int) -> None:
    try:
        entry = parse_event(raw, published_ms=published_ms)
    except PoisonEvent:
        return
    assert entry.request_id
    assert min(entry.billed.prompt, entry.billed.completion) >= 0
