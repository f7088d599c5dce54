"""Exports: stable columns, exact values, nothing that a spreadsheet runs."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.usage.v1 import usage_service_pb2 as pb

from services.usage.records import COLUMNS, FORMATS, digest_of_record, record_of
from tests.helpers.usage import make_event


def make_row(number: int = 1, user: str = "", **metadata: str) -> pb.LedgerRow:
    event = make_event(f"r{number}", prompt=9, cached=4, completion=3)
    event.user = user
    event.metadata.update(metadata)
    row = pb.LedgerRow(row_id=number, event=event)
    row.insert_time.FromJsonString("2026-03-01T12:00:02Z")
    return row


def as_csv(*rows: pb.LedgerRow) -> list[dict[str, str]]:
    kind = FORMATS["csv"]
    text = kind.head + "".join(kind.line(record_of(row)) for row in rows)
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_the_columns_are_these_and_in_this_order_for_ever() -> None:
    assert COLUMNS[:27] == (
        "row_id", "request_id", "tenant", "project", "key_id", "model", "version", "priority_class", "length_class",
        "terminal_state", "finish_reason", "error_reason", "billed_prompt_tokens", "billed_cached_tokens",
        "billed_completion_tokens", "billed_reasoning_tokens", "delivered_completion_tokens", "admit_time",
        "start_time", "first_token_time", "end_time", "attempt", "worker_instance", "gateway_instance", "user",
        "metadata", "insert_time",
    )  # fmt: skip


def test_a_row_reads_the_same_in_both_formats() -> None:
    row = make_row(7, user="anna", team="blue")

    record = json.loads(FORMATS["jsonl"].line(record_of(row)))
    (fields,) = as_csv(row)

    assert record["billed_cached_tokens"] == 4
    assert record["first_token_time"] == ""
    assert record["end_time"] == "2026-03-01T12:00:00Z"
    assert record["terminal_state"] == "completed"
    assert record["metadata"] == {"team": "blue"}
    assert json.loads(fields["metadata"]) == {"team": "blue"}
    assert {k: v for k, v in fields.items() if k != "metadata"} == {
        k: str(v) for k, v in record.items() if k != "metadata"
    }


def test_text_that_a_spreadsheet_would_run_is_led_by_an_apostrophe() -> None:
    for user in ("=1+1", "+1", "-1", "@x", "\tx", "'quoted"):
        assert as_csv(make_row(user=user))[0]["user"] == "'" + user


def test_a_state_of_a_newer_producer_stays_a_number() -> None:
    row = make_row()
    row.event.terminal_state = 77  # type: ignore[assignment]

    assert as_csv(row)[0]["terminal_state"] == "77"


@settings(deadline=None)
@given(user=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), tag=st.text(max_size=5))
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_any_row_reads_back_as_it_was_from_every_text_format(name: str, user: str, tag: str) -> None:
    record = record_of(make_row(3, user=user, tag=tag.encode(errors="ignore").decode()))
    kind = FORMATS[name]

    line = kind.line(record)

    assert kind.read(line) == record
    assert digest_of_record(kind.read(line)) == digest_of_record(record)
    if name != "csv":
        assert line.count("\n") == 1


def test_a_cloud_event_has_what_the_specification_requires_and_the_tenant_as_its_subject() -> None:
    event = json.loads(FORMATS["cloudevents"].line(record_of(make_row(7))))

    assert {name: event[name] for name in ("specversion", "type", "source", "id", "subject", "time")} == {
        "specversion": "1.0",
        "type": "millrace.request",
        "source": "millrace/gateway",
        "id": "r7",
        "subject": "acme",
        "time": "2026-03-01T12:00:00Z",
    }
    assert event["data"]["billed_completion_tokens"] == 3


def test_an_event_for_lago_is_unique_by_transaction_and_dated_in_seconds() -> None:
    event = json.loads(FORMATS["lago"].line(record_of(make_row(7))))["event"]

    assert (event["transaction_id"], event["external_subscription_id"], event["code"]) == (
        "r7",
        "acme",
        "millrace_request",
    )
    assert event["timestamp"] == "1772366400.000"


@given(left=st.text(max_size=8), right=st.text(max_size=8))
@settings(deadline=None)
def test_records_that_differ_have_different_digests(left: str, right: str) -> None:
    record = record_of(make_row())

    same = digest_of_record(record | {"user": left, "project": right}) == digest_of_record(
        record | {"user": left + right, "project": ""}
    )

    assert same == (right == "")
