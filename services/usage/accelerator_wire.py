"""Accelerator time and its cost as the wire has them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf import duration_pb2
from millrace.usage.v1 import usage_service_pb2 as pb

from services.usage.accelerator import WorkerUse, share_of
from services.usage.prices import MILLION
from services.usage.queries import Group


def accelerator_use(group: Group) -> pb.AcceleratorUse:
    """What the attempts of a group took, with what a million billed tokens and a completed request came to."""
    sums, tokens = group.use.sums, group.billed.prompt + group.billed.completion
    costs = []
    for currency, micros in sorted(group.use.costs.items()):
        cost = pb.AcceleratorCost(currency=currency, micros=micros)
        if tokens:
            cost.micros_per_million_tokens = share_of(micros * MILLION, tokens)
        if group.completed_count:
            cost.micros_per_completed_request = share_of(micros, group.completed_count)
        costs.append(cost)
    return pb.AcceleratorUse(
        prefill_time=_duration(sums["prefill_nanos"]),
        decode_time=_duration(sums["decode_nanos"]),
        prefill_token_count=sums["prefill_tokens"],
        decode_token_count=sums["decode_tokens"],
        accepted_draft_token_count=sums["accepted_draft_tokens"],
        rejected_draft_token_count=sums["rejected_draft_tokens"],
        block_milliseconds=sums["block_milliseconds"],
        costs=costs,
    )


def worker_time_answer(found: Mapping[tuple[str, str], WorkerUse]) -> pb.QueryWorkerTimeResponse:
    """Groups by model and version."""
    return pb.QueryWorkerTimeResponse(
        groups=[
            pb.WorkerTimeGroup(
                model=model,
                version=version,
                worker_count=use.worker_count,
                busy=_duration(use.busy_nanos),
                idle=_duration(use.idle_nanos),
                costs=[
                    pb.WorkerCost(currency=currency, busy_micros=busy, idle_micros=idle)
                    for currency, (busy, idle) in sorted(use.costs.items())
                ],
            )
            for (model, version), use in found.items()
        ]
    )


def _duration(nanos: int) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
