"""Why the counts of gateway, worker and ledger differ: each cause, and that none is found where they agree."""

from __future__ import annotations

import dataclasses

import pytest

from services.usage.drift import AttemptSide, Cause, Made, RowSide, cause_of, made_of, worker_total

ROW = RowSide("acme", "completed", "", 1, 257, "worker-1", ((10,),), ((10,),), (20,), 20, 20)


def row(**fields: object) -> RowSide:
    return dataclasses.replace(ROW, **fields)  # type: ignore[arg-type]


def told(*ranges: tuple[int, int, int], epoch: int = 257) -> AttemptSide:
    return AttemptSide("acme", epoch, ranges)


WHOLE = told((0, 0, 20))
FOR_PEER = AttemptSide("acme", 257, (), for_peer=True)


@pytest.mark.parametrize(
    ("row_side", "attempts", "cause"),
    [
        (row(), [WHOLE], None),
        (row(delivered=(20, 5)), [told((0, 0, 20), (1, 0, 5))], None),
        # A peer computed the prompt: it counts for nothing that was answered.
        (row(), [FOR_PEER, WHOLE], None),
        (row(), [FOR_PEER], Cause.ATTEMPT_LOST),
        (row(attempt=2, epoch=513), [FOR_PEER, told((0, 8, 20), epoch=513)], Cause.ATTEMPT_LOST),
        (None, [FOR_PEER], None),
        # Refused or cancelled before a worker had it.
        (row(delivered=(0,), worker_instance="", epoch=0, attempt=0), [], None),
        (None, [WHOLE], Cause.MISSING_EVENT),
        (row(row_counts=((11,),)), [WHOLE], Cause.ROW_ALTERED),
        # The only worker died before it told, or the first of two.
        (row(), [], Cause.ATTEMPT_LOST),
        (row(attempt=2, epoch=513), [told((0, 8, 20), epoch=513)], Cause.ATTEMPT_LOST),
        (row(attempt=2, epoch=513), [told((0, 0, 8))], Cause.ATTEMPT_LOST),
        (row(attempt=2, epoch=513), [told((0, 0, 11)), told((0, 8, 20), epoch=513)], Cause.RESUMED),
        (row(terminal_state="failed", error_reason="GATEWAY_LOST", delivered=(16,)), [WHOLE], Cause.GATEWAY_DIED),
        (row(terminal_state="cancelled", delivered=(16,)), [WHOLE], Cause.UNDELIVERED),
        (row(terminal_state="expired", delivered=(0,)), [WHOLE], Cause.UNDELIVERED),
        (row(delivered=(16,)), [WHOLE], Cause.BEYOND_STOP),
        # More was delivered than was ever made; the same made twice by one attempt.
        (row(delivered=(21,)), [WHOLE], Cause.UNEXPLAINED),
        (row(), [told((0, 0, 20), (0, 5, 9))], Cause.UNEXPLAINED),
    ],
)
def test_each_difference_has_its_cause(
    row_side: RowSide | None, attempts: list[AttemptSide], cause: Cause | None
) -> None:
    assert cause_of(row_side, attempts, doubled=False) is cause


def test_a_second_event_that_says_something_else_is_named_before_all_else() -> None:
    assert cause_of(row(row_counts=((11,),)), [WHOLE], doubled=True) is Cause.DUPLICATE


def test_tokens_made_are_told_apart_by_what_became_of_them() -> None:
    attempts = [told((0, 0, 10), (1, 0, 4)), told((0, 8, 12), (1, 6, 9), epoch=513)]

    assert made_of((11, 9), attempts) == Made(twice=2, untold=2, beyond=1)
    assert worker_total(attempts) == 21
    assert worker_total([]) is None
    assert worker_total([FOR_PEER]) is None
