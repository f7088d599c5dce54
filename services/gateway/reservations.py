"""What a request asks of its tenant's and its key's limits. Pure; called at admission and to renew a budget's lease."""

from __future__ import annotations

from millrace.common.v1 import admission_pb2, common_pb2

from services.common.admission_types import KeyRecord, Pool, QuotaLimits, Refusal, Reserve
from services.common.errors import MillraceError, error_of
from services.gateway.requests import BUDGET_LEASE_TOKENS

_TEXTS = {
    "QUEUE_SHARE": "Too many requests of this tenant are queued.",
    "QUEUE_FULL": "The queue of this model is full.",
    "STORE_UNAVAILABLE": "What this budget has spent is being read again.",
}
_NAMES = {
    "requests_per_minute": "limit of requests per minute",
    "tokens_per_minute": "limit of tokens per minute",
    "input_tokens_per_minute": "limit of input tokens per minute",
    "output_tokens_per_minute": "limit of output tokens per minute",
    "concurrent_requests": "limit of concurrent requests",
    "budget_tokens": "token budget",
    "daily_budget_tokens": "token budget of the day",
    "monthly_budget_tokens": "token budget of the month",
    "daily_budget_nanos": "budget of the day",
    "monthly_budget_nanos": "budget of the month",
}


def first_lease(entry: admission_pb2.AdmissionEntry) -> int:
    """Completion tokens that a budget lends at admission."""
    return min(BUDGET_LEASE_TOKENS, _most(entry))


def reservation(key: KeyRecord, entry: admission_pb2.AdmissionEntry, leased: int) -> Reserve:
    """Rates for all that may come, budgets for the prompt and `leased` completion tokens."""
    prompt = len(entry.token_ids)
    return Reserve(
        tenant=key.tenant,
        request_id=entry.request_id,
        prompt_tokens=prompt,
        output_tokens=_most(entry),
        lease_tokens=prompt + leased,
        limits=key.limits,
        key_id=key.key_id if key.key_limits != QuotaLimits() else "",
        key_limits=key.key_limits,
        prices=_prices(key, entry),
        where=(Pool(entry.pool.model, entry.pool.pool, entry.pool.shard), entry.gateway_instance),
    )


def has_budget(key: KeyRecord) -> bool:
    """Whether streams of this key must lease their tokens."""
    return key.limits.has_budget or key.key_limits.has_budget


def refused(refusal: Refusal) -> MillraceError:
    """The error that tells the client which limit said no, and how long to wait where waiting helps."""
    text = _TEXTS.get(refusal.reason, "The request was refused.")
    if refusal.limit in _NAMES and refusal.reason not in _TEXTS:
        whose = "key" if refusal.of_key else "tenant"
        ends = "is used up" if "budget" in refusal.limit else "is reached"
        text = f"The {_NAMES[refusal.limit]} of this {whose} {ends}."
    error = error_of(refusal.reason, text)
    if refusal.retry_after_ms > 0:
        error.retry_after_s = max(1.0, refusal.retry_after_ms / 1000)
    return error


def _prices(key: KeyRecord, entry: admission_pb2.AdmissionEntry) -> tuple[int, int]:
    """Of the version before its model, of the class before both."""
    model = entry.model
    names = [f"{model.model}@{model.version}", model.model]
    if entry.priority_class == common_pb2.PRIORITY_CLASS_BATCH:
        names = [name + of_class for name in names for of_class in (" batch", "")]
    return next((key.prices[name] for name in names if name in key.prices), (0, 0))


def _most(entry: admission_pb2.AdmissionEntry) -> int:
    return entry.sampling.max_token_count * max(1, entry.sampling.choice_count)
