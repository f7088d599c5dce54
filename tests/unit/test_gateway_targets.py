"""Latency targets: how they are written, which one holds, and what a request must have met."""

from __future__ import annotations

import pytest
from millrace.common.v1 import common_pb2

from services.gateway.config import parse_queue
from services.gateway.targets import Seconds, Target, latency_of, parse_targets

COMPLETED, FAILED = common_pb2.TERMINAL_STATE_COMPLETED, common_pb2.TERMINAL_STATE_FAILED


def test_the_closest_target_holds_and_the_class_counts_more() -> None:
    targets = parse_targets("interactive/short=500:50:10000, */short=1000::, interactive/*=:100:, */*=::60000")

    assert targets.of("interactive", "short") == Target(0.5, 0.05, 10.0)
    assert targets.of("batch", "short") == Target(1.0, None, None)
    assert targets.of("interactive", "long") == Target(None, 0.1, None)
    assert targets.of("batch", "long") == Target(None, None, 60.0)
    assert parse_targets("").of("batch", "long") is None
    assert parse_targets(repr(targets)) == targets


@pytest.mark.parametrize(
    "text",
    ["interactive=500:50:1", "fast/short=1:1:1", "*/huge=1:1:1", "*/*=1:1", "*/*=0:1:1", "*/*=nan:1:1", "*/*=x:1:1",
     "*/*=1:1:1,*/*=2:2:2"],
)  # fmt: skip
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"target|twice"):
        parse_targets(text)


@pytest.mark.parametrize(
    ("state", "seconds", "met"),
    [
        (COMPLETED, Seconds(0.5, 0.05, 10.0), True),
        (COMPLETED, Seconds(0.51, 0.05, 10.0), False),
        (COMPLETED, Seconds(0.5, 0.051, 10.0), False),
        (COMPLETED, Seconds(0.5, 0.05, 10.1), False),
        # One token has no gap, an empty answer no first token.
        (COMPLETED, Seconds(0.5, None, 1.0), True),
        (COMPLETED, Seconds(None, None, 1.0), True),
        (FAILED, Seconds(0.1, 0.01, 1.0), False),
    ],
)
def test_goodput_is_a_completed_request_within_all_its_targets(
    state: common_pb2.TerminalState.ValueType, seconds: Seconds, met: bool
) -> None:
    assert latency_of(state, seconds, Target(0.5, 0.05, 10.0)).targets_met is met


def test_without_a_target_or_with_a_client_that_left_nothing_is_said() -> None:
    seconds = Seconds(0.1, 0.01, 1.0)

    assert not latency_of(COMPLETED, seconds, None).HasField("targets_met")
    left = latency_of(common_pb2.TERMINAL_STATE_CANCELLED, seconds, Target(0.5, 0.05, 10.0))
    assert not left.HasField("targets_met")


def test_the_queue_is_bounded_by_either_number() -> None:
    assert repr(parse_queue("max_wait_ms=5")) == "max_requests=4096,max_wait_ms=5"
    assert parse_queue("max_requests=7,max_wait_ms=5").max_requests == 7
    for text in ("max_requests", "size=3", "max_requests=0", "max_requests=1,max_requests=2"):
        with pytest.raises(ValueError, match=r"max_requests|number|least|positive|above"):
            parse_queue(text)
