"""Messages of the account service from and to what the accounts speak. Pure; checks form, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from google.protobuf import json_format, struct_pb2, timestamp_pb2
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_service_pb2 as pb

from services.common.admission_types import LengthCap, QuotaLimits
from services.common.errors import InvalidRequest
from services.usage.policies import Policy, policy_from_json

# Field of QuotaLimits → field of the message.
_LIMITS = {
    "requests_per_minute": "requests_per_minute",
    "tokens_per_minute": "tokens_per_minute",
    "concurrent_requests": "concurrent_request_count",
    "budget_tokens": "budget_token_count",
    "input_tokens_per_minute": "input_tokens_per_minute",
    "output_tokens_per_minute": "output_tokens_per_minute",
    "daily_budget_tokens": "daily_budget_token_count",
    "monthly_budget_tokens": "monthly_budget_token_count",
    "daily_budget_nanos": "daily_budget_nanos",
    "monthly_budget_nanos": "monthly_budget_nanos",
}
_CAPS = {
    "prompt_tokens": "prompt_token_count",
    "output_tokens": "output_token_count",
    "choices": "choice_count",
    "tools": "tool_count",
}


def time_field(message: Any, name: str) -> datetime | None:
    """A Timestamp field, None where absent. Raises InvalidRequest."""
    if not message.HasField(name):
        return None
    try:
        moment: datetime = getattr(message, name).ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{name} is not between the years 1 and 9999.", param=name) from None
    return moment


def stamp(time: datetime | None) -> timestamp_pb2.Timestamp | None:
    """A Timestamp, None where absent."""
    if time is None:
        return None
    message = timestamp_pb2.Timestamp()
    message.FromDatetime(time)
    return message


def policy_of(limits: pb.Limits, weight: float | None) -> Policy:
    """The policy that limits and weight describe."""
    caps = {
        model: LengthCap(**{ours: _optional(cap, theirs) for ours, theirs in _CAPS.items()})
        for model, cap in limits.length_caps.items()
    }
    return Policy(
        limits=QuotaLimits(**{ours: _optional(limits, theirs) for ours, theirs in _LIMITS.items()}),
        weight=weight,
        queued_requests=_optional(limits, "queued_request_count"),
        worker_slots=_optional(limits, "worker_slot_count"),
        worker_blocks=_optional(limits, "worker_block_count"),
        batch_only=limits.priority_ceiling == common_pb2.PRIORITY_CLASS_BATCH,
        length_caps=caps,
    )


def weight_of(message: Any) -> float | None:
    """The field `weight` as it was written, not as 32 bits hold it; None where absent."""
    return float(f"{message.weight:.6g}") if message.HasField("weight") else None


def tenant_message(row: sa.Row[Any]) -> pb.Tenant:
    """A tenant as it stands."""
    policy = policy_from_json(row.policy)
    return pb.Tenant(
        tenant=row.tenant,
        display_name=row.display_name,
        limits=_limits_message(policy),
        weight=1.0 if policy.weight is None else policy.weight,
        create_time=stamp(row.create_time),
    )


def project_message(row: sa.Row[Any]) -> pb.Project:
    """A project."""
    return pb.Project(
        tenant=row.tenant, project=row.project, display_name=row.display_name, create_time=stamp(row.create_time)
    )


def key_message(row: sa.Row[Any]) -> pb.ApiKey:
    """A key without its secret."""
    policy = policy_from_json(row.policy)
    return pb.ApiKey(
        key_id=row.key_id,
        tenant=row.tenant,
        display_name=row.display_name,
        models=row.models,
        create_time=stamp(row.create_time),
        expire_time=stamp(row.expire_time),
        revoke_time=stamp(row.revoke_time),
        project=row.project,
        limits=_limits_message(policy),
        weight=policy.weight,
        scopes=row.scopes,
    )


def admin_key_message(row: sa.Row[Any]) -> pb.AdminKey:
    """An administrator's key without its secret."""
    return pb.AdminKey(
        key_id=row.key_id,
        name=row.name,
        create_time=stamp(row.create_time),
        expire_time=stamp(row.expire_time),
        revoke_time=stamp(row.revoke_time),
    )


def audit_message(row: sa.Row[Any]) -> pb.AuditRecord:
    """One audit record."""
    return pb.AuditRecord(
        audit_id=row.audit_id,
        time=stamp(row.time),
        actor=row.actor,
        action=row.action,
        tenant=row.tenant,
        subject=row.subject,
        before=None if row.before is None else _struct(row.before),
        after=_struct(row.after),
    )


def _limits_message(policy: Policy) -> pb.Limits:
    limits = pb.Limits(
        **{theirs: getattr(policy.limits, ours) for ours, theirs in _LIMITS.items()},
        queued_request_count=policy.queued_requests,
        worker_slot_count=policy.worker_slots,
        worker_block_count=policy.worker_blocks,
    )
    if policy.batch_only:
        limits.priority_ceiling = common_pb2.PRIORITY_CLASS_BATCH
    for model, cap in policy.length_caps.items():
        limits.length_caps[model].CopyFrom(
            pb.LengthCap(**{theirs: getattr(cap, ours) for ours, theirs in _CAPS.items()})
        )
    return limits


def _struct(fields: Mapping[str, Any]) -> struct_pb2.Struct:
    return json_format.ParseDict(dict(fields), struct_pb2.Struct())


def _optional(message: Any, name: str) -> int | None:
    return getattr(message, name) if message.HasField(name) else None
