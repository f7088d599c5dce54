"""Values of the admission store: what goes into its scripts and what comes out. No I/O, no decisions."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Mapping, Sequence
from typing import cast

from millrace.common.v1 import admission_pb2, common_pb2
from millrace.usage.v1 import usage_event_pb2

# With so many dead workers behind it a request runs apart from others like it.
SUSPECT_DEATHS = 2
# Mirrored requests run under this tenant, which is never billed and which nobody can make.
SHADOW_TENANT = "millrace-shadow"


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
    """Limits of one tenant or key; None is unlimited. Days and months are UTC; nanos are 10⁻⁹ of the currency unit.

    The scripts take the fields in this order.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    budget_tokens: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    daily_budget_tokens: int | None = None
    monthly_budget_tokens: int | None = None
    daily_budget_nanos: int | None = None
    monthly_budget_nanos: int | None = None

    @property
    def has_budget(self) -> bool:
        """Whether anything but rates and concurrency is limited."""
        budgets = (self.daily_budget_tokens, self.monthly_budget_tokens)
        return self.has_money_budget or any(limit is not None for limit in (self.budget_tokens, *budgets))

    @property
    def has_money_budget(self) -> bool:
        """Whether what a token costs matters."""
        return self.daily_budget_nanos is not None or self.monthly_budget_nanos is not None


@dataclasses.dataclass(frozen=True, slots=True)
class PoolCaps:
    """Bounds of one pool's queue; over any of them enqueue refuses.

    `worker_slots` and `worker_tokens` refuse nothing: the tenant's requests beyond so many a worker wait in the queue.
    """

    requests: int = 4_096
    tokens: int = 16_000_000
    bytes: int = 268_435_456
    tenant_requests: int = 1_024
    predicted_wait_ms: int = 60_000
    worker_slots: int | None = None
    worker_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Reserve:
    """What a request may use: `output_tokens` = max_tokens × n of rates, `lease_tokens` = prompt + ≤ 64 of budgets.

    `prices` are nanos per token of input and of output. Without a `key_id` only the tenant's limits count. `where` is
    the pool and the gateway instance that run the request.
    """

    tenant: str
    request_id: str
    prompt_tokens: int
    output_tokens: int
    lease_tokens: int
    limits: QuotaLimits
    key_id: str = ""
    key_limits: QuotaLimits = QuotaLimits()
    prices: tuple[int, int] = (0, 0)
    where: tuple[Pool, str] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Spent:
    """Tokens and nanos that the ledger says were billed: ever, in the UTC day and in the month of `day`."""

    day: datetime.date
    total_tokens: int = 0
    day_tokens: int = 0
    day_nanos: int = 0
    month_tokens: int = 0
    month_nanos: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why the store said no. `reason` is of the error table; `retry_after_ms` the measured wait, 0 if none helps.

    `limit` is the field of QuotaLimits that is reached, `of_key` whether it is the key's own or the tenant's.
    """

    reason: str
    retry_after_ms: int
    limit: str = ""
    of_key: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Queued:
    """Accepted into the queue at `position` (0 = next)."""

    entry_id: str
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Claimed:
    """One claimed request. `claim_number` grows with each claim of the request: epoch = claim_number << 8 | try.
    `entry_bytes` is `entry` on the wire: they change together. `waited_ms` counts from this attempt's admission."""

    claim_id: str
    claim_number: int
    remaining_ms: int
    entry: admission_pb2.AdmissionEntry
    entry_bytes: bytes
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
    # Out of the queue with its version; its gateway chooses and tokenises again.
    CLOSED = "closed"


def first_epoch(attempt: int) -> int:
    """No epoch of this attempt is below, none of an earlier one is above (scripts/enqueue.lua)."""
    return (attempt - 1) * 65_536 << 8


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


def record_of(request_id: str, row: Sequence[bytes | None]) -> RequestRecord | None:
    """A request's record from its fields in the store, in the order that the store reads them."""
    if row[0] is None:
        return None
    text = [(value or b"").decode() for value in row[:9]]
    return RequestRecord(
        request_id=request_id,
        phase=RequestPhase(text[0]),
        epoch=int(text[1] or 0),
        worker_instance=text[2],
        gateway_instance=text[3],
        attempt=int(text[4] or 0),
        terminal_state=cast("common_pb2.TerminalState.ValueType", int(text[5])) if text[5] else None,
        error_reason=text[6],
        tenant=text[7],
        claim_id=text[8],
        prebuilt_event=row[9] or b"",
    )


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
    """A worker's entry in the registry, alive while its lease is. `digest` is its manifest's, in hex."""

    instance: str
    address: str
    model: str
    version: str
    pool: Pool
    role: str
    digest: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class LengthCap:
    """Most of one request: tokens of its prompt and of each choice, choices, tools; None is the limit of all."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    choices: int | None = None
    tools: int | None = None

    def row(self) -> list[int | None]:
        """Its stored form: the values in order, without the absent ones at the end."""
        values = list(dataclasses.astuple(self))
        while values and values[-1] is None:
            values.pop()
        return values


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRecord:
    """Hot copy of one API key with what holds for it; found by the SHA-256 of the secret.

    `limits` are the tenant's, shared by its keys, `key_limits` the key's own; both hold. All else is the stricter of
    the two: `length_caps` by model name, `*` for the rest; `queued_requests` bounds what the tenant may have in a queue
    when a request of this key comes; `worker_slots` and `worker_blocks` what it may hold in one worker; `prices`,
    where money is limited, are nanos per token of input and output by `model` or `model@version`, also with ` batch`
    behind it.
    """

    key_id: str
    tenant: str
    project: str
    models: tuple[str, ...]
    weight: float
    limits: QuotaLimits
    expires_at: float | None = None
    revoked: bool = False
    key_limits: QuotaLimits = QuotaLimits()
    scopes: tuple[str, ...] = ("inference",)
    batch_only: bool = False
    queued_requests: int | None = None
    worker_slots: int | None = None
    worker_blocks: int | None = None
    length_caps: Mapping[str, LengthCap] = dataclasses.field(default_factory=dict)
    prices: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
