"""`millrace usage reconcile`: what gateways, workers and the ledger say of the same requests."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Annotated

import grpc
import typer
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc
from rich.console import Console
from rich.table import Table

from cli.price import stamp
from cli.tenant import Address
from cli.usage_client import Metadata, call_usage

# Workers tell of an attempt within seconds of its end.
SETTLED = timedelta(minutes=1)
CAUSES = {
    pb.DRIFT_CAUSE_GATEWAY_DIED: "gateway died",
    pb.DRIFT_CAUSE_ATTEMPT_LOST: "attempt lost",
    pb.DRIFT_CAUSE_RESUMED: "resumed",
    pb.DRIFT_CAUSE_UNDELIVERED: "undelivered",
    pb.DRIFT_CAUSE_BEYOND_STOP: "beyond stop",
    pb.DRIFT_CAUSE_MISSING_EVENT: "missing event",
    pb.DRIFT_CAUSE_DUPLICATE: "duplicate",
    pb.DRIFT_CAUSE_ROW_ALTERED: "row altered",
    pb.DRIFT_CAUSE_UNEXPLAINED: "unexplained",
}
WRONG = (
    pb.DRIFT_CAUSE_MISSING_EVENT,
    pb.DRIFT_CAUSE_DUPLICATE,
    pb.DRIFT_CAUSE_ROW_ALTERED,
    pb.DRIFT_CAUSE_UNEXPLAINED,
)


def reconcile(
    since: Annotated[datetime | None, typer.Option(help="Ended at or after this UTC time; a day ago unless given.")]
    = None,
    until: Annotated[datetime | None, typer.Option(help="Ended before this UTC time; a minute ago unless given.")]
    = None,
    tenant: Annotated[str, typer.Option(help="Only this tenant.")] = "",
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One request that differs a line, and nothing else.")] = False,
    usage_address: Address = None,
) -> None:  # fmt: skip
    """Compare gateways, workers and ledger request by request, and say why counts differ.

    Exit code 1 when something is wrong: a request without a row, two events that disagree, a row that was altered, or
    a difference without a cause. Work that was lost with a process, made twice or not delivered is no error.
    """
    end = until if until is not None else datetime.now(UTC) - SETTLED
    start = since if since is not None else end - timedelta(days=1)
    request = pb.ReconcileRequest(tenant=tenant, start_time=stamp(start), end_time=stamp(end))

    async def work(channel: grpc.aio.Channel, metadata: Metadata) -> pb.ReconcileTotals:
        totals = pb.ReconcileTotals()
        async for page in pb_grpc.UsageServiceStub(channel).Reconcile(request, metadata=metadata):
            for drift in page.drifts:
                _show(drift, jsonl)
            totals = page.totals
        return totals

    totals = call_usage(usage_address, work)
    if not jsonl:
        Console(highlight=False).print(_table(totals))
    if any(count.cause in WRONG for count in totals.counts):
        raise typer.Exit(1)


def _show(drift: pb.Drift, jsonl: bool) -> None:
    counts = {
        "gateway": drift.gateway_token_count if drift.HasField("gateway_token_count") else None,
        "worker": drift.worker_token_count if drift.HasField("worker_token_count") else None,
        "ledger": drift.ledger_token_count if drift.HasField("ledger_token_count") else None,
    }
    if jsonl:
        named = {"request_id": drift.request_id, "tenant": drift.tenant, "cause": CAUSES.get(drift.cause, "")}
        print(json.dumps({**named, **counts, "attempts": drift.attempt_count}))
        return
    shown = ", ".join(f"{name} {'–' if count is None else count}" for name, count in counts.items())
    print(f"{drift.request_id}  {CAUSES.get(drift.cause, '')}: {shown}; {drift.attempt_count} attempts told")


def _table(totals: pb.ReconcileTotals) -> Table:
    table = Table("", "requests", "gateway tokens", "worker tokens", "ledger tokens")
    sums = (totals.gateway_token_count, totals.worker_token_count, totals.ledger_token_count)
    table.add_row("all", f"{totals.request_count:,}", *(f"{count:,}" for count in sums))
    for count in totals.counts:
        table.add_row(CAUSES.get(count.cause, "?"), f"{count.request_count:,}", "", "", "")
    return table
