"""Values of the admission store: what goes into its scripts and what comes out. No I/O, no decisions."""

from __future__ import annotations

import dataclasses
import enum

from millrace.common.v1 import admission_pb2, common_pb2
from millrace.usage.v1 import usage_event_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """A queue: `<model>/<pool>/<shard>`; the hash tag of all its keys."""

    model: str
    pool: str = "default"
    shard: int = 0

    @property
    def tag(self) -> str:
        return f"{self.model}/{self.pool}/{self.shard}"

    @classmethod
    def from_tag(cls, tag: str) -> Pool:
        """The pool whose `tag` this is. Raises ValueError."""
        model, pool, shard = tag.rsplit("/", 2)
        return cls(model, pool, int(shard))


@dataclasses.dataclass(frozen=True, slots=True)
class QuotaLimits:
    """Limits of one tenant (or key); None is unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    budget_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PoolCaps:
    """Bounds of one pool's queue; over any of them enqueue refuses."""

    requests: int = 4_096
    tokens: int = 16_000_000
    bytes: int = 268_435_456
    tenant_requests: int = 1_024
    predicted_wait_ms: int = 60_000


@dataclasses.dataclass(frozen=True, slots=True)
class Reserve:
    """Ask of `reserve`: `tokens` = prompt + max_tokens × n for rates, `budget_tokens` = prompt + at most 64."""

    tenant: str
    request_id: str
    tokens: int
    budget_tokens: int
    limits: QuotaLimits


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why the store said no. `reason` is a reason of the error table; `retry_after_ms` the measured wait."""

    reason: str
    retry_after_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Queued:
    """Accepted into the queue at `position` (0 = next)."""

    entry_id: str
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """One claimed request. `claim_number` grows with each claim of the request: epoch = claim_number << 8 | try."""

    claim_id: str
    claim_number: int
    remaining_ms: int
    entry: admission_pb2.AdmissionEntry
    # Milliseconds since this attempt was admitted.
    waited_ms: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Ownership:
    """Worker `worker_instance` runs `request_id` under `epoch`."""

    request_id: str
    epoch: int
    worker_instance: str


class RequestPhase(enum.Enum):
    """`state` field of `req:<id>`."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    OWNED = "owned"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True, slots=True)
class RequestRecord:
    """What `req:<id>` says; `terminal_state` is set once finished."""

    request_id: str
    phase: RequestPhase
    epoch: int
    worker_instance: str
    gateway_instance: str
    attempt: int
    terminal_state: common_pb2.TerminalState.ValueType | None
    error_reason: str = ""
    tenant: str = ""
    # The claim that holds it now; empty when none does.
    claim_id: str = ""
    # Serialized UsageEvent (expired, nothing billed) that ends a request whose gateway is gone; empty once finished.
    prebuilt_event: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class Terminal:
    """Ask of `finish`: the terminal state and the event that goes to the usage stream if this caller wins.

    `computed_tokens` trues up the tenant's virtual time. `epoch` fences a superseded worker; 0 is never fenced: the
    gateway that owns the request, and the reaper in its place, pass 0.
    """

    tenant: str
    request_id: str
    epoch: int
    state: common_pb2.TerminalState.ValueType
    computed_tokens: int
    event: usage_event_pb2.UsageEvent


@dataclasses.dataclass(frozen=True, slots=True)
class FinishResult:
    """`won` is true for the one caller whose terminal stands; the rest are the winner's values."""

    won: bool
    state: common_pb2.TerminalState.ValueType
    tenant: str
    computed_tokens: int
    billed_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Unsettled:
    """A terminal whose reservation is still to be settled; an empty tenant means that nothing is known any more."""

    request_id: str
    tenant: str
    computed_tokens: int
    billed_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's entry in the registry, alive while its lease is."""

    instance: str
    address: str
    model: str
    version: str
    pool: Pool
    role: str


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRecord:
    """Hot copy of one API key and its tenant's limits; found by the SHA-256 of the secret."""

    key_id: str
    tenant: str
    project: str
    models: tuple[str, ...]
    weight: float
    limits: QuotaLimits
    expires_at: float | None = None
    revoked: bool = False
