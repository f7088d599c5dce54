"""Reads a request's end off its usage event: which version it was, and what it says about it. Pure."""

from __future__ import annotations

import dataclasses

from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2 as pb

from services.common.admission_types import SHADOW_TENANT
from services.common.routes import Target
from services.usage.canary.observations import Observation

# A pace over fewer tokens is mostly the pace of writing them.
MIN_PACED_TOKENS = 8
# Greedy answers that part later than this are told apart by rounding, not by weights.
COMPARED_TOKENS = 8
# What ends a request through no fault of the version that ran it.
_NOT_ITS_FAULT = frozenset({"DRAINING", "GATEWAY_LOST", "STORE_UNAVAILABLE", "NOT_READY", "POOL_CLOSED", "NO_WORKER"})


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """Which events belong to one step of a rollout: admitted since (unix seconds), by tenants that are not pinned."""

    baseline: Target
    candidate: Target
    since: float
    pinned: frozenset[str] = frozenset()


def observation_of(event: pb.UsageEvent, match: Match) -> Observation | None:
    """What the event says, or None where it is no matter of this step."""
    target = Target(event.model.model, event.model.version)
    if target not in (match.baseline, match.candidate) or event.tenant in match.pinned:
        return None
    if not event.times.HasField("admit_time") or _seconds(event, "admit_time") < match.since:
        return None
    canary = target == match.candidate
    failed = event.terminal_state == common_pb2.TERMINAL_STATE_FAILED and event.error_reason not in _NOT_ITS_FAULT
    if event.tenant == SHADOW_TENANT:
        return _mirrored(event, failed=failed) if canary else None
    completed = event.terminal_state == common_pb2.TERMINAL_STATE_COMPLETED
    tokens = event.delivered.completion_token_count
    unserved = event.terminal_state == common_pb2.TERMINAL_STATE_EXPIRED and not event.times.HasField("start_time")
    return Observation(
        canary=canary,
        ttft_s=_ttft(event),
        tpot_s=_tpot(event),
        failed=failed,
        refused=unserved or (completed and tokens == 0),
        output_tokens=tokens if completed else None,
        cost_tokens=tokens + event.delivered.prompt_token_count if completed else None,
    )


def _mirrored(event: pb.UsageEvent, *, failed: bool) -> Observation:
    report = event.shadow
    compared = report.compared_token_count
    differs = None
    if compared or report.lengths_differ:
        early = report.equal_token_count < min(compared, COMPARED_TOKENS)
        differs = early or (report.lengths_differ and compared < COMPARED_TOKENS)
    return Observation(
        canary=True,
        shadow=True,
        failed=failed,
        differs=differs,
        drift=report.drift_nats if report.HasField("drift_nats") else None,
    )


def _ttft(event: pb.UsageEvent) -> float | None:
    # Batches wait as long as others let them.
    interactive = event.priority_class == common_pb2.PRIORITY_CLASS_INTERACTIVE
    if not interactive:
        return None
    if not event.times.HasField("first_token_time"):
        return None
    return max(0.0, _seconds(event, "first_token_time") - _seconds(event, "admit_time"))


def _tpot(event: pb.UsageEvent) -> float | None:
    tokens = max(event.choice_token_counts, default=0)
    if tokens < MIN_PACED_TOKENS or not event.times.HasField("first_token_time"):
        return None
    # As the gateway got them: the client of an answer that is not streamed gets all of its tokens at once.
    return max(0.0, _seconds(event, "end_time") - _seconds(event, "first_token_time")) / (tokens - 1)


def _seconds(event: pb.UsageEvent, name: str) -> float:
    stamp = getattr(event.times, name)
    return float(stamp.seconds + stamp.nanos / 1e9)
