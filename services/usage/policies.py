"""What a tenant or a key may do: the noun, its check, its stored form, and what holds when both have one. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from services.common.admission_types import LengthCap, QuotaLimits
from services.common.errors import InvalidRequest

MAX_MODELS = 64
MAX_TEXT = 256
_MOST = 2**31 - 1
_COUNTS = ("queued_requests", "worker_slots", "worker_blocks")
# Lua counts in doubles: sums of two of these are exact.
_MOST_BUDGET = 2**52


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Limits of one tenant or key; None and empty are no limit of its own.

    `limits` are counted; `weight` is the share against other tenants; `queued_requests` bounds the tenant's requests in
    a queue; `worker_slots` and `worker_blocks` what it holds in a worker; `batch_only` is the priority ceiling;
    `length_caps` go by `model@version`, `model` or `*`.
    """

    limits: QuotaLimits = dataclasses.field(default_factory=QuotaLimits)
    weight: float | None = None
    queued_requests: int | None = None
    worker_slots: int | None = None
    worker_blocks: int | None = None
    batch_only: bool = False
    length_caps: Mapping[str, LengthCap] = dataclasses.field(default_factory=dict)


def check_policy(policy: Policy) -> None:
    """Raise InvalidRequest naming the first field that is out of its range."""
    limits = dataclasses.asdict(policy.limits) | {name: getattr(policy, name) for name in _COUNTS}
    for name, value in limits.items():
        most = _MOST if "request" in name or name in _COUNTS else _MOST_BUDGET
        if value is not None and not 1 <= value <= most:
            raise InvalidRequest(f"{name} must be between 1 and {most}; leave it out for no limit.", param=name)
    if policy.weight is not None and not 0.001 <= policy.weight <= 1_000:
        raise InvalidRequest("weight must be between 0.001 and 1000.", param="weight")
    if len(policy.length_caps) > MAX_MODELS:
        raise InvalidRequest(f"length_caps takes at most {MAX_MODELS} models.", param="length_caps")
    for model, cap in policy.length_caps.items():
        # A key without tools is one that may not have any.
        sizes = ((cap.prompt_tokens, 1), (cap.output_tokens, 1), (cap.choices, 1), (cap.tools, 0))
        if not 1 <= len(model) <= MAX_TEXT or any(s is not None and not least <= s <= _MOST for s, least in sizes):
            message = "length_caps: every model has a name and caps of at least 1, for tools of at least 0."
            raise InvalidRequest(message, param="length_caps")


def check_policy_of_key(policy: Policy) -> None:
    """Raise InvalidRequest for a limit that only tenants have: a worker does not count by key."""
    for name in ("worker_slots", "worker_blocks"):
        if getattr(policy, name) is not None:
            raise InvalidRequest(f"{name} is a limit of tenants, not of keys.", param=name)


def policy_to_json(policy: Policy) -> dict[str, Any]:
    """The stored form: what is not set is left out."""
    limits = {name: value for name, value in dataclasses.asdict(policy.limits).items() if value is not None}
    rest = {name: getattr(policy, name) for name in ("weight", *_COUNTS)}
    fields = limits | {name: value for name, value in rest.items() if value is not None}
    if policy.batch_only:
        fields["batch_only"] = True
    if policy.length_caps:
        fields["length_caps"] = {model: cap.row() for model, cap in policy.length_caps.items()}
    return fields


def policy_from_json(fields: Mapping[str, Any]) -> Policy:
    """What `policy_to_json` stored."""
    names = [field.name for field in dataclasses.fields(QuotaLimits)]
    return Policy(
        limits=QuotaLimits(**{name: fields.get(name) for name in names}),
        **{name: fields.get(name) for name in ("weight", *_COUNTS)},
        batch_only=fields.get("batch_only", False),
        length_caps={model: LengthCap(*cap) for model, cap in fields.get("length_caps", {}).items()},
    )


def stricter(first: int | None, second: int | None) -> int | None:
    """The smaller of two limits of which either may be absent."""
    return min((limit for limit in (first, second) if limit is not None), default=None)


def stricter_caps(tenant: Mapping[str, LengthCap], key: Mapping[str, LengthCap]) -> dict[str, LengthCap]:
    """For every name of either, the stricter of what the two say of that name, its model, or all models."""
    return {name: _stricter_cap(_cap(tenant, name), _cap(key, name)) for name in sorted({*tenant, *key})}


def _cap(caps: Mapping[str, LengthCap], name: str) -> LengthCap:
    found = (caps[n] for n in (name, name.partition("@")[0], "*") if n in caps)
    return next(found, LengthCap())


def _stricter_cap(first: LengthCap, second: LengthCap) -> LengthCap:
    return LengthCap(*map(stricter, dataclasses.astuple(first), dataclasses.astuple(second)))
