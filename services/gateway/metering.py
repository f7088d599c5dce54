"""What one request is billed: the table of PROTOCOL §7 and the usage event. Pure; called when a request ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from google.protobuf import timestamp_pb2
from millrace.common.v1 import admission_pb2, common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_types import SHADOW_TENANT

_SHORT_TOKENS = 512
_MEDIUM_TOKENS = 4_096


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """What happened to the tokens of one request. `delivered` and `received` are per choice.

    `reasoning` is how many delivered tokens, of all choices, are reasoning.
    """

    prompt: int
    cached: int
    delivered: tuple[int, ...]
    received: tuple[int, ...]
    started: bool
    reasoning: int = 0

    @property
    def delivered_total(self) -> int:
        return sum(self.delivered)

    @property
    def computed(self) -> int:
        """Prompt once prefill started, and every token that came: what quotas settle on."""
        return (self.prompt if self.started else 0) + sum(self.received)


@dataclasses.dataclass(slots=True)
class Marks:
    """Unix seconds of what happened; None until it does. `claim`: of the first attempt that ran, by its router."""

    admit: float
    claim: float | None = None
    submit: float | None = None
    start: float | None = None
    first_token: float | None = None
    end: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ClientLabels:
    """What the client wants to find again in its usage."""

    user: str = ""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended, and by whose hands."""

    state: common_pb2.TerminalState.ValueType
    finish_reason: common_pb2.FinishReason.ValueType
    error_reason: str
    attempt: int
    epoch: int
    worker_instance: str


def length_class(prompt_tokens: int, max_tokens: int) -> common_pb2.LengthClass.ValueType:
    """Class by prompt plus requested output."""
    total = prompt_tokens + max_tokens
    if total <= _SHORT_TOKENS:
        return common_pb2.LENGTH_CLASS_SHORT
    return common_pb2.LENGTH_CLASS_MEDIUM if total <= _MEDIUM_TOKENS else common_pb2.LENGTH_CLASS_LONG


def billed_usage(state: common_pb2.TerminalState.ValueType, counts: Counts) -> common_pb2.TokenUsage:
    """What is charged. Retries, resumes and preemption never add, because counts are by index."""
    started = counts.started or any(counts.received)
    pays_prompt = {
        common_pb2.TERMINAL_STATE_COMPLETED: True,
        common_pb2.TERMINAL_STATE_CANCELLED: started,
        common_pb2.TERMINAL_STATE_EXPIRED: started,
        common_pb2.TERMINAL_STATE_FAILED: counts.delivered_total > 0,
    }.get(state, False)
    return _usage(counts) if pays_prompt else common_pb2.TokenUsage()


def delivered_usage(counts: Counts) -> common_pb2.TokenUsage:
    """What reached the client's transport; the prompt counts once it was worked on."""
    return _usage(counts) if counts.started or counts.delivered_total else common_pb2.TokenUsage()


def usage_event(
    entry: admission_pb2.AdmissionEntry, ending: Ending, counts: Counts, marks: Marks, labels: ClientLabels
) -> usage_event_pb2.UsageEvent:
    """The event of one request."""
    event = usage_event_pb2.UsageEvent(
        request_id=entry.request_id,
        tenant=entry.tenant,
        project=entry.project,
        key_id=entry.key_id,
        model=entry.model,
        pool=entry.pool,
        priority_class=entry.priority_class,
        length_class=entry.length_class,
        terminal_state=ending.state,
        error_reason=ending.error_reason,
        delivered=delivered_usage(counts),
        billed=common_pb2.TokenUsage() if entry.tenant == SHADOW_TENANT else billed_usage(ending.state, counts),
        attempt=ending.attempt,
        epoch=ending.epoch,
        worker_instance=ending.worker_instance,
        gateway_instance=entry.gateway_instance,
        user=labels.user,
        metadata=labels.metadata,
        traceparent=entry.traceparent,
        choice_token_counts=counts.delivered,
        times=_times(marks),
    )
    if ending.state == common_pb2.TERMINAL_STATE_COMPLETED:
        event.finish_reason = ending.finish_reason
    return event


def _usage(counts: Counts) -> common_pb2.TokenUsage:
    return common_pb2.TokenUsage(
        prompt_token_count=counts.prompt,
        cached_token_count=min(counts.cached, counts.prompt),
        completion_token_count=counts.delivered_total,
        reasoning_token_count=min(counts.reasoning, counts.delivered_total),
    )


def _times(marks: Marks) -> common_pb2.RequestTimes:
    def stamp(seconds: float | None) -> timestamp_pb2.Timestamp | None:
        if seconds is None:
            return None
        return timestamp_pb2.Timestamp(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))

    return common_pb2.RequestTimes(
        admit_time=stamp(marks.admit),
        claim_time=stamp(marks.claim),
        submit_time=stamp(marks.submit),
        start_time=stamp(marks.start),
        first_token_time=stamp(marks.first_token),
        end_time=stamp(marks.end),
    )
