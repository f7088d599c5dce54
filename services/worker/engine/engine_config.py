"""The engine's own settings and typed refusals. Values only; reads no environment. Built by the worker's wiring."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


class EngineError(Exception):
    """EngineError ─┬─ InvalidRequestError: malformed; the same request is refused everywhere.
    ├─ NeverFitsError: larger than this engine can ever hold.
    └─ DuplicateRequestError: the same (request, epoch) is already in hand.
    """


class InvalidRequestError(EngineError):
    """The request breaks a rule that the edge should have enforced. The message is safe to log."""


class NeverFitsError(EngineError):
    """`required` of `unit` are needed, `limit` is the most this request could ever have."""

    def __init__(self, *, unit: str, required: int, limit: int) -> None:
        super().__init__(f"request needs {required} {unit}, at most {limit} can be given")
        self.unit = unit
        self.required = required
        self.limit = limit


class DuplicateRequestError(EngineError):
    """A choice of the same request and epoch is already in the engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may hold. `max_*` None is no cap; `reserved_*` is kept free for the tenant by all others."""

    max_blocks: int | None = None
    reserved_blocks: int = 0
    max_slots: int | None = None
    reserved_slots: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one step and of the queue.

    `max_num_seqs`: choices in the batch. `max_num_batched_tokens`: tokens a step computes, at least `max_num_seqs`.
    `max_prefill_chunk`: tokens one long prefill takes of a step. `aging_seconds`: a BATCH request this old counts as
    INTERACTIVE. `max_bypass_count`: a request that fits nowhere is overtaken this often, then holds admission.
    `step_time_target_s`: prefills share a step with decodes only as far as it should then take no longer; None: freely.
    `tenant_limits` is read anew each time: caps may change while the engine runs, reservations may not.
    `max_draft_count`: proposed tokens a row, 0 turns speculation off; `max_draft_batch`: rows above which it is off.
    """

    model_version: str
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_chunk: int = 512
    step_time_target_s: float | None = None
    aging_seconds: float = 30.0
    max_bypass_count: int = 64
    max_draft_count: int = 0
    max_draft_batch: int = 4
    default_limits: TenantLimits = TenantLimits()
    tenant_limits: Mapping[str, TenantLimits] = dataclasses.field(default_factory=dict)

    def limits_of(self, tenant: str) -> TenantLimits:
        """The tenant's own limits, else the default."""
        return self.tenant_limits.get(tenant, self.default_limits)

    def validate(self, *, num_blocks: int) -> None:
        """Raise ValueError naming every setting that cannot work with a pool of `num_blocks`."""
        problems: list[str] = []
        if self.max_num_seqs < 1:
            problems.append("max_num_seqs must be at least 1")
        if self.max_num_batched_tokens < max(self.max_num_seqs, 2):
            problems.append("max_num_batched_tokens must be at least max_num_seqs and 2")
        if self.max_prefill_chunk < 1:
            problems.append("max_prefill_chunk must be at least 1")
        if self.max_draft_count < 0 or self.max_bypass_count < 0:
            problems.append("max_draft_count and max_bypass_count must not be negative")
        if self.step_time_target_s is not None and not self.step_time_target_s > 0:
            problems.append("step_time_target_s must be above 0")
        if not self.aging_seconds >= 0:
            problems.append("aging_seconds must not be negative")
        if self.default_limits.reserved_blocks or self.default_limits.reserved_slots:
            problems.append("default_limits must reserve nothing: reservations name their tenant")
        if sum(limits.reserved_blocks for limits in self.tenant_limits.values()) >= num_blocks:
            problems.append("reserved_blocks of all tenants must leave a block")
        if sum(limits.reserved_slots for limits in self.tenant_limits.values()) >= self.max_num_seqs:
            problems.append("reserved_slots of all tenants must leave a slot")
        if problems:
            raise ValueError("; ".join(problems))
