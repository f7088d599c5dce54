"""What `get_usage` asks and gives, as plain values; and their protobuf forms."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence

from millrace.gateway.v1 import usage_sums_pb2 as pb

from millrace_client.values import Usage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Which requests of the key's tenant to sum, from `start` on and before `end` (times with a zone); empty is all.

    `group_by` names tenant, project, key, model, version, day, hour or `metadata.<tag>`; none gives one sum.
    """

    project: str = ""
    key_id: str = ""
    model: str = ""
    version: str = ""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start: datetime.datetime | None = None
    end: datetime.datetime | None = None
    group_by: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What is rated so far, in millionths of one unit of the currency."""

    currency: str
    prompt_micros: int
    cached_micros: int
    completion_micros: int
    reasoning_micros: int


@dataclasses.dataclass(frozen=True, slots=True)
class AcceleratorUse:
    """What all attempts of the requests took, also those that failed."""

    prefill_s: float
    decode_s: float
    prefill_tokens: int
    decode_tokens: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    block_milliseconds: int


@dataclasses.dataclass(frozen=True, slots=True)
class UsageGroup:
    """Sums of one group; `keys` are in the order of `group_by`."""

    keys: tuple[str, ...]
    requests: int
    completed_requests: int
    targeted_requests: int
    targets_met_requests: int
    billed: Usage
    costs: tuple[Cost, ...]
    accelerator: AcceleratorUse


def usage_request(query: UsageQuery) -> pb.GetUsageRequest:
    """The question on the wire. Raises ValueError for a time without a zone."""
    request = pb.GetUsageRequest(
        project=query.project,
        key_id=query.key_id,
        model=query.model,
        version=query.version,
        metadata=query.metadata,
        group_by=query.group_by,
    )
    for time, field in ((query.start, request.start_time), (query.end, request.end_time)):
        if time is not None:
            if time.tzinfo is None:
                raise ValueError("The times of a usage query need a zone.")
            field.FromDatetime(time.astimezone(datetime.UTC))
    return request


def usage_groups(sent: pb.GetUsageResponse) -> list[UsageGroup]:
    """The sums as answered."""
    return [_group(group) for group in sent.groups]


def _group(sent: pb.UsageGroup) -> UsageGroup:
    billed, used = sent.billed, sent.accelerator
    return UsageGroup(
        keys=tuple(sent.keys),
        requests=sent.request_count,
        completed_requests=sent.completed_request_count,
        targeted_requests=sent.targeted_request_count,
        targets_met_requests=sent.targets_met_request_count,
        billed=Usage(
            billed.prompt_token_count,
            billed.cached_token_count,
            billed.completion_token_count,
            billed.reasoning_token_count,
        ),
        costs=tuple(
            Cost(c.currency, c.prompt_micros, c.cached_micros, c.completion_micros, c.reasoning_micros)
            for c in sent.costs
        ),
        accelerator=AcceleratorUse(
            prefill_s=used.prefill_time.ToTimedelta().total_seconds(),
            decode_s=used.decode_time.ToTimedelta().total_seconds(),
            prefill_tokens=used.prefill_token_count,
            decode_tokens=used.decode_token_count,
            accepted_draft_tokens=used.accepted_draft_token_count,
            rejected_draft_tokens=used.rejected_draft_token_count,
            block_milliseconds=used.block_milliseconds,
        ),
    )
