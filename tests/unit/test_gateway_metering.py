"""The table of what is billed (PROTOCOL §7), row by row."""

from __future__ import annotations

import pytest
from millrace.common.v1 import admission_pb2, common_pb2

from services.gateway.metering import ClientLabels, Counts, Ending, Marks, billed_usage, length_class, usage_event

COMPLETED, CANCELLED = common_pb2.TERMINAL_STATE_COMPLETED, common_pb2.TERMINAL_STATE_CANCELLED
FAILED, EXPIRED = common_pb2.TERMINAL_STATE_FAILED, common_pb2.TERMINAL_STATE_EXPIRED
REJECTED = common_pb2.TERMINAL_STATE_REJECTED


def make_counts(*delivered: int, started: bool = True, received: int = 20) -> Counts:
    return Counts(
        prompt=100, cached=32, delivered=delivered, received=tuple(received for _ in delivered), started=started
    )


@pytest.mark.parametrize(
    ("state", "counts", "prompt", "completion"),
    [
        (COMPLETED, make_counts(7, 5), 100, 12),
        (COMPLETED, make_counts(0), 100, 0),
        (CANCELLED, make_counts(0, started=False, received=0), 0, 0),
        (CANCELLED, make_counts(0), 100, 0),
        (CANCELLED, make_counts(3), 100, 3),
        (EXPIRED, make_counts(0, started=False, received=0), 0, 0),
        (EXPIRED, make_counts(0), 100, 0),
        (EXPIRED, make_counts(3), 100, 3),
        (FAILED, make_counts(0), 0, 0),
        (FAILED, make_counts(0, started=False, received=0), 0, 0),
        (FAILED, make_counts(3), 100, 3),
        (REJECTED, make_counts(3), 0, 0),
    ],
)
def test_what_is_billed(
    state: common_pb2.TerminalState.ValueType, counts: Counts, prompt: int, completion: int
) -> None:
    billed = billed_usage(state, counts)

    assert (billed.prompt_token_count, billed.completion_token_count) == (prompt, completion)
    assert billed.cached_token_count == (32 if prompt else 0)


def test_cached_tokens_never_exceed_the_prompt() -> None:
    counts = Counts(prompt=10, cached=64, delivered=(1,), received=(1,), started=True)

    assert billed_usage(COMPLETED, counts).cached_token_count == 10


def test_quotas_settle_on_what_was_computed() -> None:
    assert make_counts(3).computed == 120
    assert make_counts(0, started=False, received=0).computed == 0


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (256, 256, common_pb2.LENGTH_CLASS_SHORT),
        (257, 256, common_pb2.LENGTH_CLASS_MEDIUM),
        (4_000, 96, common_pb2.LENGTH_CLASS_MEDIUM),
        (4_000, 97, common_pb2.LENGTH_CLASS_LONG),
    ],
)
def test_length_classes_at_their_edges(prompt: int, output: int, expected: int) -> None:
    assert length_class(prompt, output) == expected


def test_the_event_carries_who_what_and_when() -> None:
    entry = admission_pb2.AdmissionEntry(
        request_id="r", tenant="acme", key_id="k", project="p", traceparent="00-1", gateway_instance="g", attempt=1
    )
    ending = Ending(FAILED, common_pb2.FINISH_REASON_ERROR, "WORKER_LOST", 2, 513, "worker-a")
    marks = Marks(admit=10.0, submit=10.5, start=11.0, first_token=11.25, end=12.0)

    event = usage_event(entry, ending, make_counts(3, 4), marks, ClientLabels("me", {"a": "b"}))

    assert (event.tenant, event.key_id, event.project, event.user) == ("acme", "k", "p", "me")
    assert event.metadata == {"a": "b"}
    assert (event.attempt, event.epoch, event.worker_instance) == (2, 513, "worker-a")
    assert event.error_reason == "WORKER_LOST"
    assert event.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED, "only a completed request has one"
    assert list(event.choice_token_counts) == [3, 4]
    assert event.times.first_token_time.ToMilliseconds() == 11_250
    assert not event.times.HasField("claim_time")
