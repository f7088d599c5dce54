"""What answers cost us: `millrace usage costs`, `workers`, and their part of `report`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import grpc
import typer
from google.protobuf import duration_pb2, timestamp_pb2
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc

from cli.price import amount, stamp
from cli.tenant import Address
from cli.usage_client import Metadata, call_usage
from cli.usage_shapes import GROUPS, Shape, show_table

NAMES = (
    "requests", "completed", "goodput", "tokens", "prefill_s", "decode_s", "accelerator_cost", "per_million_tokens",
    "per_completed",
)  # fmt: skip
# For people, whose lines are short.
SHORT = {
    "accelerator_cost": "cost",
    "per_million_tokens": "a million tokens",
    "per_completed": "an answer completed",
    "requests_s": "busy s",
    "requests_cost": "busy cost",
}
WORKER_NAMES = ("model", "version", "workers", "requests_s", "idle_s", "busy", "requests_cost", "idle_cost")
Since = Annotated[datetime | None, typer.Option(help="Ended at or after this UTC time.")]
Until = Annotated[datetime | None, typer.Option(help="Ended before this UTC time.")]


def costs(
    group_by: Annotated[list[str] | None, typer.Option("--by", help=GROUPS)] = None,
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    model: Annotated[str, typer.Option(help="Only this model, or model@version.")] = "",
    since: Since = None,
    until: Until = None,
    format: Annotated[Shape, typer.Option(help="table for people, csv or jsonl for programs.")] = Shape.TABLE,
    usage_address: Address = None,
) -> None:
    """Accelerator time of requests, what it cost, and how many answers met their latency targets.

    Costs need `millrace price set <model> --accelerator-hour`. Failed attempts count; idle time is in `workers`.
    """
    name, _, version = model.partition("@")
    request = pb.QueryUsageRequest(
        tenant=tenant,
        model=name,
        version=version,
        start_time=None if since is None else stamp(since),
        end_time=None if until is None else stamp(until),
        group_by=group_by if group_by is not None else ["tenant", "model", "version"],
    )
    _write([*request.group_by, *NAMES], _rows(ask_usage(request, usage_address)), format)


def workers(
    model: Annotated[str, typer.Option(help="Only this model, or model@version.")] = "",
    since: Since = None,
    until: Until = None,
    format: Annotated[Shape, typer.Option(help="table for people, csv or jsonl for programs.")] = Shape.TABLE,
    usage_address: Address = None,
) -> None:
    """How workers' time was spent: on requests, or idle. Both are all of it."""
    name, _, version = model.partition("@")
    request = pb.QueryWorkerTimeRequest(
        model=name,
        version=version,
        start_time=None if since is None else stamp(since),
        end_time=None if until is None else stamp(until),
    )
    _write(list(WORKER_NAMES), _worker_rows(_ask_workers(request, usage_address)), format)


def show_costs(
    tenants: Sequence[str], since: timestamp_pb2.Timestamp, until: timestamp_pb2.Timestamp, usage_address: str | None
) -> None:
    """The report's part: each tenant's models with what they cost us, and the workers with their idle time."""
    rows = []
    for tenant in tenants:
        request = pb.QueryUsageRequest(tenant=tenant, start_time=since, end_time=until, group_by=["tenant", "model"])
        rows += _rows(ask_usage(request, usage_address))
    _show(["tenant", "model", *NAMES], rows, "Cost and goodput: what the answers cost us")
    times = _ask_workers(pb.QueryWorkerTimeRequest(start_time=since, end_time=until), usage_address)
    if times:
        _show(list(WORKER_NAMES), _worker_rows(times), "Workers: all of their time, idle time is in no request's cost")


def ask_usage(request: pb.QueryUsageRequest, usage_address: str | None) -> Sequence[pb.UsageGroup]:
    """The groups of one query."""

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.QueryUsageResponse:
        return await pb_grpc.UsageServiceStub(channel).QueryUsage(request, metadata=metadata)

    return call_usage(usage_address, work).groups


def _ask_workers(request: pb.QueryWorkerTimeRequest, usage_address: str | None) -> Sequence[pb.WorkerTimeGroup]:
    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.QueryWorkerTimeResponse:
        return await pb_grpc.UsageServiceStub(channel).QueryWorkerTime(request, metadata=metadata)

    return call_usage(usage_address, work).groups


def _rows(groups: Sequence[pb.UsageGroup]) -> list[list[str]]:
    rows = []
    for group in groups:
        use, targeted = group.accelerator, group.targeted_request_count
        each, whole, millions = [], [], []
        for cost in use.costs:
            whole.append(f"{amount(cost.micros)} {cost.currency}")
            if cost.HasField("micros_per_million_tokens"):
                millions.append(f"{amount(cost.micros_per_million_tokens)} {cost.currency}")
            if cost.HasField("micros_per_completed_request"):
                each.append(f"{amount(cost.micros_per_completed_request)} {cost.currency}")
        numbers = (
            str(group.request_count),
            str(group.completed_request_count),
            f"{group.targets_met_request_count / targeted:.1%}" if targeted else "",
            str(group.billed.prompt_token_count + group.billed.completion_token_count),
            _seconds(use.prefill_time),
            _seconds(use.decode_time),
        )
        rows.append([*group.keys, *numbers, ", ".join(whole), ", ".join(millions), ", ".join(each)])
    return rows


def _worker_rows(groups: Sequence[pb.WorkerTimeGroup]) -> list[list[str]]:
    rows = []
    for group in groups:
        busy, idle = group.busy.ToNanoseconds(), group.idle.ToNanoseconds()
        share = f"{busy / (busy + idle):.1%}" if busy + idle else ""
        paid = [f"{amount(cost.busy_micros)} {cost.currency}" for cost in group.costs]
        lost = [f"{amount(cost.idle_micros)} {cost.currency}" for cost in group.costs]
        named = (group.model, group.version, str(group.worker_count))
        rows.append([*named, _seconds(group.busy), _seconds(group.idle), share, ", ".join(paid), ", ".join(lost)])
    return rows


def _write(names: Sequence[str], rows: Sequence[Sequence[str]], shape: Shape) -> None:
    if shape is Shape.TABLE:
        _show(names, rows)
    elif shape is Shape.JSONL:
        for row in rows:
            print(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False))
    else:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)


def _show(names: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    left = next(place for place, name in enumerate(names) if name in (NAMES[0], WORKER_NAMES[2]))
    show_table([SHORT.get(name, name.replace("_", " ")) for name in names], rows, left=left, title=title)


def _seconds(duration: duration_pb2.Duration) -> str:
    return f"{duration.ToNanoseconds() / 1e9:.3f}"
