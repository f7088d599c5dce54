"""Entries, terminals and a store whose time a test moves."""

from __future__ import annotations

from datetime import UTC, date, datetime

import redis.asyncio as aioredis
from millrace.common.v1 import admission_pb2, common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Pool, PoolCaps, Spent, Terminal

POOL = Pool("echo")
CAPS = PoolCaps()


class StoreTime:
    """Milliseconds that stand still until a test moves them."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self.ms = start_ms

    def __call__(self) -> int:
        return self.ms

    def advance(self, ms: int) -> None:
        self.ms += ms

    @property
    def day(self) -> date:
        """The UTC day."""
        return datetime.fromtimestamp(self.ms / 1000, UTC).date()


async def open_budget(store: AdmissionStore, day: date, tenant: str = "acme", *key_ids: str) -> None:
    """Say, as the usage service does, that the tenant and these keys have spent nothing so far."""
    for key_id in ("", *key_ids):
        await store.raise_spent(tenant, key_id, Spent(day), Spent(day))


def make_store(client: aioredis.Redis, time: StoreTime) -> AdmissionStore:
    return AdmissionStore(client, now_ms=time)


def make_entry(
    request_id: str,
    tenant: str = "acme",
    *,
    prompt: int = 10,
    max_tokens: int = 10,
    weight: float = 1.0,
    batch: bool = False,
    attempt: int = 1,
    gateway: str = "gateway-1",
    version: str = "1",
) -> admission_pb2.AdmissionEntry:
    return admission_pb2.AdmissionEntry(
        request_id=request_id,
        tenant=tenant,
        key_id="key-1",
        model=common_pb2.ModelRef(model="echo", version=version),
        pool=common_pb2.PoolRef(model="echo", pool="default", shard=0),
        priority_class=common_pb2.PRIORITY_CLASS_BATCH if batch else common_pb2.PRIORITY_CLASS_INTERACTIVE,
        length_class=common_pb2.LENGTH_CLASS_SHORT,
        token_ids=range(prompt),
        sampling=common_pb2.SamplingParams(max_token_count=max_tokens, choice_count=1),
        gateway_instance=gateway,
        weight=weight,
        attempt=attempt,
    )


def make_terminal(
    request_id: str,
    tenant: str = "acme",
    *,
    epoch: int = 0,
    state: common_pb2.TerminalState.ValueType = common_pb2.TERMINAL_STATE_COMPLETED,
    computed: int = 15,
    prompt: int = 10,
    completion: int = 5,
    gateway: str = "gateway-1",
) -> Terminal:
    event = usage_event_pb2.UsageEvent(
        request_id=request_id, tenant=tenant, terminal_state=state, epoch=epoch, gateway_instance=gateway
    )
    event.billed.prompt_token_count = prompt
    event.billed.completion_token_count = completion
    return Terminal(tenant, request_id, epoch, state, computed, event)
