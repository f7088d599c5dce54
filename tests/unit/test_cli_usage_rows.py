"""Exports: stable columns, exact values, nothing that a spreadsheet runs."""

from __future__ import annotations

import csv
import io
import json

from hypothesis import given
from hypothesis import strategies as st
from millrace.usage.v1 import usage_service_pb2 as pb

from cli.usage_rows import COLUMNS, csv_writer, jsonl_writer
from tests.helpers.usage import make_event


def make_row(number: int = 1, user: str = "", **metadata: str) -> pb.LedgerRow:
    event = make_event(f"r{number}", prompt=9, cached=4, completion=3)
    event.user = user
    event.metadata.update(metadata)
    row = pb.LedgerRow(row_id=number, event=event)
    row.insert_time.FromJsonString("2026-03-01T12:00:02Z")
    return row


def as_csv(*rows: pb.LedgerRow) -> list[dict[str, str]]:
    out = io.StringIO()
    write = csv_writer(out)
    for row in rows:
        write(row)
    return list(csv.DictReader(io.StringIO(out.getvalue())))


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
    out = io.StringIO()
    jsonl_writer(out)(row)

    record = json.loads(out.getvalue())
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
    for user in ("=1+1", "+1", "-1", "@x", "\tx"):
        assert as_csv(make_row(user=user))[0]["user"] == "'" + user


def test_a_state_of_a_newer_producer_stays_a_number() -> None:
    row = make_row()
    row.event.terminal_state = 77  # type: ignore[assignment]

    assert as_csv(row)[0]["terminal_state"] == "77"


@given(users=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=5))
def test_any_text_survives_json_lines_with_one_line_a_row(users: list[str]) -> None:
    out = io.StringIO()
    write = jsonl_writer(out)
    for number, user in enumerate(users):
        write(make_row(number, user=user))

    lines = out.getvalue().split("\n")[:-1]
    assert [json.loads(line)["user"] for line in lines] == users
