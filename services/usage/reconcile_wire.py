"""Drifts and their totals as the wire has them. Pure."""

from __future__ import annotations

from millrace.usage.v1 import usage_service_pb2 as pb

from services.usage.drift import Cause
from services.usage.reconcile import Drift, Totals


def drift_message(drift: Drift) -> pb.Drift:
    """One request; a side that knows nothing of it has no count."""
    message = pb.Drift(
        request_id=drift.request_id,
        tenant=drift.tenant,
        cause=cause_number(drift.cause),
        attempt_count=drift.attempt_count,
    )
    if drift.gateway is not None:
        message.gateway_token_count = drift.gateway
    if drift.worker is not None:
        message.worker_token_count = drift.worker
    if drift.ledger is not None:
        message.ledger_token_count = drift.ledger
    return message


def totals_message(totals: Totals) -> pb.ReconcileTotals:
    """The sums of one comparison."""
    return pb.ReconcileTotals(
        request_count=totals.request_count,
        gateway_token_count=totals.gateway,
        worker_token_count=totals.worker,
        ledger_token_count=totals.ledger,
        counts=[
            pb.DriftCount(cause=cause_number(cause), request_count=count)
            for cause, count in sorted(totals.causes.items(), key=lambda item: item[0].value)
        ],
    )


def cause_number(cause: Cause) -> pb.DriftCause.ValueType:
    """The wire's number of a cause."""
    return pb.DriftCause.Value(f"DRIFT_CAUSE_{cause.name}")
