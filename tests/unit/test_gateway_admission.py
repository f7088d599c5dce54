"""Admission with a store that refuses, breaks or hangs: all or nothing, and what an entry says."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from millrace.common.v1 import admission_pb2, common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb

from services.common.admission_types import (
    FinishResult,
    KeyRecord,
    Pool,
    PoolCaps,
    Queued,
    QuotaLimits,
    Refusal,
    Reserve,
    Terminal,
)
from services.common.block_hash import chain_hashes, pack_tokens, root_hash, truncated
from services.common.clock import SystemClock
from services.common.errors import Draining, MillraceError, NoWorker, QueueFull, RateLimited, StoreUnavailable
from services.common.metrics import Metrics
from services.gateway import admission
from services.gateway.admission import AdmissionGenerator
from services.gateway.echo_tokenizer import EchoTokenizer
from services.gateway.entries import AdmissionSettings
from services.gateway.generation import ServedModel, ValidRequest
from services.gateway.live_requests import LiveTable
from services.gateway.model_directory import WorkerDirectory
from services.gateway.outbox import Outbox
from services.gateway.publisher import UsagePublisher
from services.gateway.store_effects import StoreEffects
from services.gateway.targets import LatencyTargets
from services.gateway.worker_pool import WorkerPool
from tests.helpers.waiting import until

KEY = KeyRecord("key-1", "acme", "web", (), 2.0, QuotaLimits())


class FakeStore:
    """The gateway's part of the admission store, scripted."""

    def __init__(self) -> None:
        self.reserved: dict[str, Reserve] = {}
        self.entries: dict[str, admission_pb2.AdmissionEntry] = {}
        self.remaining_ms: list[int] = []
        self.caps: list[PoolCaps] = []
        self.terminals: list[Terminal] = []
        self.settled: list[tuple[str, int, int]] = []
        self.refuse_reserve: Refusal | None = None
        self.refuse_enqueue: Refusal | None = None
        self.on_enqueue: Callable[[], None] = lambda: None
        self.gate = asyncio.Event()
        self.gate.set()

    async def reserve(self, ask: Reserve) -> Refusal | None:
        if self.refuse_reserve is None:
            self.reserved[ask.request_id] = ask
        return self.refuse_reserve

    async def release(self, tenant: str, request_id: str) -> None:
        self.reserved.pop(request_id, None)

    async def settle(self, tenant: str, request_id: str, computed_tokens: int, billed_tokens: int) -> None:
        self.settled.append((request_id, computed_tokens, billed_tokens))
        self.reserved.pop(request_id, None)

    async def enqueue(
        self, pool: Pool, entry: admission_pb2.AdmissionEntry, caps: PoolCaps, **options: int
    ) -> Queued | Refusal:
        self.caps.append(caps)
        await self.gate.wait()
        if self.refuse_enqueue is not None:
            return self.refuse_enqueue
        self.entries[entry.request_id] = entry
        self.remaining_ms.append(options["remaining_ms"])
        self.on_enqueue()
        return Queued("1-1", 4)

    async def finish(self, pool: Pool, terminals: list[Terminal]) -> list[FinishResult]:
        self.terminals += terminals
        return [FinishResult(True, t.state, t.tenant, t.computed_tokens, 0) for t in terminals]

    async def clear_unsettled(self, pool: Pool, request_ids: list[str]) -> None:
        return

    async def uptime(self) -> tuple[int, str]:
        return 100, "run/master"


class Everything:
    """Workers that serve, a ledger that confirms, and nobody to cancel elsewhere."""

    serving = True

    def serves(self, model: str, version: str) -> bool:
        return self.serving

    async def committed(self, pool: Pool, request_ids: list[str]) -> list[str]:
        return list(request_ids)

    async def send(self, gateway_instance: str, tenant: str, request_id: str) -> bool:
        return False


class Rig:
    def __init__(self, folder: Path) -> None:
        clock = SystemClock()
        self.store = FakeStore()
        self.others = Everything()
        self.metrics = Metrics()
        self.table = LiveTable(clock)
        self.outbox = Outbox(folder, "gateway-1", max_bytes=1 << 20, clock=clock)
        self.outbox.open()
        store: object = self.store
        self.publisher = UsagePublisher(store, self.outbox, self.others, clock)  # type: ignore[arg-type]
        self.pool = WorkerPool("gateway-1", self.table, clock)
        settings = AdmissionSettings("gateway-1", b"platform secret", PoolCaps(), LatencyTargets())
        parts = (store, self.table, self.pool, WorkerDirectory(), self.publisher, settings)
        self.effects = StoreEffects(*parts)  # type: ignore[arg-type]
        self.table.effects = self.effects
        self.closed: MillraceError | None = None
        self.generator = AdmissionGenerator(
            store,  # type: ignore[arg-type]
            self.table,
            self.others,
            self.others,
            settings,
            self.metrics,
            gate=lambda: self.closed,
        )
        self.publisher.start()

    async def close(self) -> None:
        await self.generator.close()
        await self.effects.close()
        await self.publisher.close()
        await self.outbox.close()

    def refusals(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("millrace_refusals_total", {"reason": reason}) or 0.0


@pytest.fixture
async def rig(tmp_path: Path):  # type: ignore[no-untyped-def]  # noqa: ANN201
    rig = Rig(tmp_path)
    yield rig
    await rig.close()


def make_request(*, prompt: int = 40, max_tokens: int = 100, choices: int = 2) -> ValidRequest:
    card = pb.ModelCard(
        model=common_pb2.ModelRef(model="echo", version="1", manifest_digest=b"\x01" * 32),
        max_model_len=512,
        vocab_size=512,
        block_size=16,
        tokenizer_digest=b"\x02" * 32,
    )
    return ValidRequest(
        model=ServedModel(Pool("echo"), card, EchoTokenizer(512), None),
        prompt_token_ids=array("I", range(prompt)),
        sampling=common_pb2.SamplingParams(choice_count=choices, max_token_count=max_tokens, seed=1),
        stop=(),
        priority_class=common_pb2.PRIORITY_CLASS_INTERACTIVE,
        resume_policy=common_pb2.RESUME_POLICY_RESUME,
        timeout_s=30.0,
    )


async def test_the_entry_says_all_that_a_router_and_a_worker_need(rig: Rig) -> None:
    generation = await rig.generator.start(KEY, make_request())

    entry = rig.store.entries[generation.request_id]
    assert generation.queue_position == 4
    assert (entry.tenant, entry.key_id, entry.project, entry.weight) == ("acme", "key-1", "web", 2.0)
    assert list(entry.token_ids) == list(range(40))
    assert (entry.attempt, entry.gateway_instance) == (1, "gateway-1")
    assert entry.length_class == common_pb2.LENGTH_CLASS_SHORT
    root = root_hash(
        model_version=f"echo@1:{(bytes([1]) * 32).hex()}", adapter_digest=b"", tenant_salt=entry.cache_salt
    )
    expected = [truncated(h) for h in chain_hashes(root, pack_tokens(range(40)), block_size=16)]
    assert list(entry.block_hashes) == expected
    assert len(expected) == 2
    assert 29_000 < rig.store.remaining_ms[0] <= 30_000
    ask = rig.store.reserved[generation.request_id]
    assert (ask.prompt_tokens, ask.output_tokens, ask.lease_tokens) == (40, 200, 104)


async def test_the_cache_salt_is_of_the_tenant_and_of_the_platform(rig: Rig) -> None:
    salts = {}
    for tenant in ("acme", "acme", "other"):
        generation = await rig.generator.start(dataclasses.replace(KEY, tenant=tenant), make_request())
        salts.setdefault(tenant, set()).add(rig.store.entries[generation.request_id].cache_salt)

    assert [len(found) for found in salts.values()] == [1, 1]
    assert salts["acme"] != salts["other"]
    assert all(len(salt) == 32 for found in salts.values() for salt in found)


async def test_a_refused_reservation_is_the_error_of_its_reason(rig: Rig) -> None:
    rig.store.refuse_reserve = Refusal("REQUESTS_PER_MINUTE", 12_500)

    with pytest.raises(RateLimited) as refused:
        await rig.generator.start(KEY, make_request())

    assert refused.value.retry_after_s == 12.5
    assert rig.refusals("REQUESTS_PER_MINUTE") == 1
    assert len(rig.table) == 0
    assert rig.store.entries == {}


async def test_a_full_queue_gives_the_reservation_back(rig: Rig) -> None:
    rig.store.refuse_enqueue = Refusal("QUEUE_FULL", 2_000)

    with pytest.raises(QueueFull):
        await rig.generator.start(KEY, make_request())

    assert rig.store.reserved == {}
    assert len(rig.table) == 0
    assert rig.store.terminals == [], "what was never admitted has no terminal"


@pytest.mark.parametrize("error", [StoreUnavailable("away"), asyncio.CancelledError()])
async def test_an_admission_whose_outcome_is_unknown_is_ended_behind_the_callers_back(
    rig: Rig, error: BaseException
) -> None:
    def broken() -> None:
        raise error

    rig.store.on_enqueue = broken

    with pytest.raises(type(error)):
        await rig.generator.start(KEY, make_request())
    await until(lambda: rig.store.settled)

    (terminal,) = rig.store.terminals
    assert terminal.event.billed == common_pb2.TokenUsage()
    assert terminal.state in (common_pb2.TERMINAL_STATE_FAILED, common_pb2.TERMINAL_STATE_CANCELLED)
    assert rig.store.reserved == {}
    assert len(rig.table) == 0


async def test_a_client_that_leaves_while_it_is_admitted_leaves_nothing(rig: Rig) -> None:
    rig.store.gate.clear()
    starting = asyncio.create_task(rig.generator.start(KEY, make_request()))
    await until(lambda: rig.store.caps)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await until(lambda: rig.store.settled)

    assert rig.store.reserved == {}
    assert len(rig.table) == 0


async def test_a_store_that_hangs_is_away(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "STORE_PATIENCE_S", 0.05)
    rig.store.gate.clear()

    with pytest.raises(StoreUnavailable):
        await rig.generator.start(KEY, make_request())
    await until(lambda: rig.store.settled)

    assert len(rig.table) == 0


class LateLoop(asyncio.Event):
    """Holds the loop up in each of some turns for longer than a store may take to answer, then opens."""

    async def wait(self) -> Literal[True]:
        for _ in range(5):
            time.sleep(2 * admission.STORE_PATIENCE_S)  # noqa: ASYNC251 - a loop that is busy
            await asyncio.sleep(0)
        return True


async def test_a_loop_that_is_late_does_not_make_the_store_away(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "STORE_PATIENCE_S", 0.01)
    rig.store.gate = LateLoop()

    await rig.generator.start(KEY, make_request())

    assert len(rig.table) == 1


async def test_a_closed_gateway_and_an_empty_pool_refuse_before_anything_is_reserved(rig: Rig) -> None:
    rig.others.serving = False
    with pytest.raises(NoWorker):
        await rig.generator.start(KEY, make_request())
    rig.closed = Draining("bye")
    with pytest.raises(Draining):
        await rig.generator.start(KEY, make_request())

    assert rig.store.reserved == {}
    assert (rig.refusals("NO_WORKER"), rig.refusals("DRAINING")) == (1, 1)


async def test_what_a_key_may_do_bounds_its_requests(rig: Rig) -> None:
    key = dataclasses.replace(
        KEY,
        batch_only=True,
        queued_requests=7,
        worker_slots=3,
        worker_blocks=5,
        limits=QuotaLimits(monthly_budget_nanos=10**9),
        key_limits=QuotaLimits(input_tokens_per_minute=90),
        prices={"echo": (3, 5), "other": (1, 1)},
    )

    generation = await rig.generator.start(key, make_request())
    await rig.generator.start(dataclasses.replace(key, queued_requests=10**6, key_limits=QuotaLimits()), make_request())

    entry = rig.store.entries[generation.request_id]
    assert entry.priority_class == common_pb2.PRIORITY_CLASS_BATCH
    assert [caps.tenant_requests for caps in rig.store.caps] == [7, PoolCaps().tenant_requests]
    assert (entry.tenant_slot_cap, entry.tenant_block_cap) == (3, 5)
    assert (rig.store.caps[0].worker_slots, rig.store.caps[0].worker_tokens) == (3, 5 * 16)
    first, second = rig.store.reserved.values()
    assert (first.key_id, first.key_limits, first.prices) == ("key-1", key.key_limits, (3, 5))
    assert second.key_id == "", "a key without limits of its own costs nothing"
    live = rig.table.get(generation.request_id)
    assert live is not None
    assert live.core.limits.budget_tokens == 64


@pytest.mark.parametrize(
    ("refusal", "text", "wait"),
    [
        (
            Refusal("REQUESTS_PER_MINUTE", 1_500, "requests_per_minute"),
            "limit of requests per minute of this tenant",
            1.5,
        ),
        (
            Refusal("TOKENS_PER_MINUTE", 1, "output_tokens_per_minute", True),
            "output tokens per minute of this key",
            1.0,
        ),
        (Refusal("BUDGET_EXHAUSTED", 0, "budget_tokens"), "token budget of this tenant is used up", None),
        (Refusal("BUDGET_EXHAUSTED", 90_000, "daily_budget_nanos", True), "budget of the day of this key", 90.0),
        (Refusal("STORE_UNAVAILABLE", 1_000, "budget_tokens"), "is being read again", 1.0),
    ],
)
async def test_a_refusal_names_the_limit_whose_it_is_and_the_wait(
    rig: Rig, refusal: Refusal, text: str, wait: float | None
) -> None:
    rig.store.refuse_reserve = refusal

    with pytest.raises(MillraceError) as refused:
        await rig.generator.start(KEY, make_request())

    assert refused.value.row.reason == refusal.reason
    assert text in refused.value.message
    assert refused.value.retry_after_s == wait


@pytest.mark.parametrize(
    ("prices", "batch", "expected"),
    [
        ({"echo": (3, 5), "echo batch": (1, 2)}, False, (3, 5)),
        ({"echo": (3, 5), "echo batch": (1, 2)}, True, (1, 2)),
        ({"echo": (3, 5), "echo@1": (7, 8), "echo batch": (1, 2)}, True, (7, 8)),
        ({"echo": (3, 5), "echo@1 batch": (0, 0), "echo@1": (7, 8)}, True, (0, 0)),
        ({"other": (3, 5)}, False, (0, 0)),
    ],
)
async def test_a_request_is_held_at_the_price_of_its_version_and_class(
    rig: Rig, prices: dict[str, tuple[int, int]], batch: bool, expected: tuple[int, int]
) -> None:
    key = dataclasses.replace(KEY, prices=prices, batch_only=batch)

    await rig.generator.start(key, make_request())

    (ask,) = rig.store.reserved.values()
    assert ask.prices == expected
