"""Why what workers made and what a client was billed for differ: one request, one cause. Pure.

Ruler of one choice:   0 … delivered … top        workers told ranges [start, end); what no range holds was not told,
what two ranges hold was made twice, what lies beyond `delivered` never reached the client.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

GATEWAY_LOST = "GATEWAY_LOST"


class Cause(enum.Enum):
    """As the wire's DriftCause; of several the first that holds."""

    MISSING_EVENT = "missing_event"
    DUPLICATE = "duplicate"
    ROW_ALTERED = "row_altered"
    ATTEMPT_LOST = "attempt_lost"
    UNEXPLAINED = "unexplained"
    GATEWAY_DIED = "gateway_died"
    BEYOND_STOP = "beyond_stop"
    UNDELIVERED = "undelivered"
    RESUMED = "resumed"


@dataclasses.dataclass(frozen=True, slots=True)
class RowSide:
    """What the ledger has of a request. `counts` are (delivered, billed, per choice): of the row and of its event."""

    tenant: str
    terminal_state: str
    error_reason: str
    attempt: int
    epoch: int
    worker_instance: str
    row_counts: tuple[tuple[int, ...], ...]
    event_counts: tuple[tuple[int, ...], ...]
    delivered: tuple[int, ...]
    ledger_token_count: int
    gateway_token_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptSide:
    """What one worker told: ranges (choice, start, end) of output tokens, none of a prompt computed `for_peer`."""

    tenant: str
    epoch: int
    ranges: tuple[tuple[int, int, int], ...]
    for_peer: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """Output tokens of all attempts: made twice, never told, and beyond what was delivered."""

    twice: int = 0
    untold: int = 0
    beyond: int = 0


def cause_of(row: RowSide | None, attempts: Sequence[AttemptSide], *, doubled: bool) -> Cause | None:
    """Why the counts of one request differ; None when they agree. `doubled`: a second event said something else."""
    attempts = own_attempts(attempts)
    if row is None:
        return Cause.MISSING_EVENT if attempts else None
    if doubled:
        return Cause.DUPLICATE
    if row.row_counts != row.event_counts:
        return Cause.ROW_ALTERED
    made = made_of(row.delivered, attempts)
    told = row.epoch in {attempt.epoch for attempt in attempts} and len(attempts) >= row.attempt
    if made.untold or (not attempts and row.worker_instance):
        return Cause.UNEXPLAINED if told else Cause.ATTEMPT_LOST
    if made.beyond:
        if row.error_reason == GATEWAY_LOST:
            return Cause.GATEWAY_DIED
        return Cause.BEYOND_STOP if row.terminal_state == "completed" else Cause.UNDELIVERED
    if made.twice:
        return Cause.RESUMED if len(attempts) > 1 else Cause.UNEXPLAINED
    return None


def own_attempts(attempts: Sequence[AttemptSide]) -> list[AttemptSide]:
    """Those that answered, without prompts computed for them elsewhere."""
    return [attempt for attempt in attempts if not attempt.for_peer]


def made_of(delivered: Sequence[int], attempts: Sequence[AttemptSide]) -> Made:
    """What the attempts made, beside what was delivered of each choice."""
    ranges: dict[int, list[tuple[int, int]]] = {choice: [] for choice in range(len(delivered))}
    for attempt in attempts:
        for choice, start, end in attempt.ranges:
            ranges.setdefault(choice, []).append((start, end))
    twice = untold = beyond = 0
    for choice, spans in ranges.items():
        reached = delivered[choice] if choice < len(delivered) else 0
        top, held = 0, 0
        for start, end in sorted(spans):
            held += max(0, end - max(start, top))
            top = max(top, end)
        twice += sum(end - start for start, end in spans) - held
        untold += max(top, reached) - held
        beyond += max(0, top - reached)
    return Made(twice, untold, beyond)


def worker_total(attempts: Sequence[AttemptSide]) -> int | None:
    """Output tokens that all attempts made; None where no worker told."""
    own = own_attempts(attempts)
    return sum(end - start for each in own for _, start, end in each.ranges) if own else None
