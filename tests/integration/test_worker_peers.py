"""Prefill on one worker, decode on another, over real gRPC: the same answer, nothing left, every refusal typed."""

from __future__ import annotations

import dataclasses

import grpc
import pytest
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2
from millrace.worker.v1 import worker_service_pb2 as pb
from millrace.worker.v1 import worker_service_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.errors import InvalidRequest
from services.common.grpc_client import error_from_rpc, open_channel
from services.worker import wiring
from services.worker.config import WorkerConfig, WorkerRole
from services.worker.engine.outputs import SchedulerOutput
from services.worker.runtime.transfers import grpc_stream
from tests.helpers.peers import Pair, fallbacks, metric, pair_of_workers, peer_config
from tests.helpers.waiting import WAIT_S, until
from tests.helpers.worker import Gate, echo_tokens, entry

PROMPT = list(range(100, 100 + 150))  # nine full blocks of 16 tokens, and six tokens more
SHORT_LEASE_MS = 300
DECODE = peer_config(WorkerRole.DECODE, kv_lease_ms=SHORT_LEASE_MS)


async def answered_alone(pair: Pair, request_id: str, cause: str) -> None:
    """The decoding worker computed the whole of it, for this cause, and both sides are empty."""
    await pair.gateway.finished(request_id)
    assert pair.gateway.of(request_id).tokens[0] == echo_tokens(request_id, 0, 12)
    assert fallbacks(pair.decode) == {cause: 1}
    await pair.assert_nothing_is_held()


async def test_a_prompt_prefilled_by_a_peer_gives_the_same_answer() -> None:
    async with pair_of_workers() as pair:
        canary = pair.decode_stats().prefill_token_total

        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await pair.gateway.finished("r1")

        assert pair.gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 12)
        assert pair.gateway.of("r1").finishes[0].usage.cached_token_count == 0
        assert pair.decode_stats().transfer.imported_block_total == 9
        assert pair.decode_stats().prefill_token_total == canary + 6
        assert fallbacks(pair.decode) == {}
        await pair.assert_nothing_is_held()
        labels = {"transport": "grpc", "outcome": "imported"}
        assert metric(pair.decode, "millrace_transfer_bytes_total", **labels) == 9 * 128
        assert metric(pair.decode, "millrace_transfer_seconds_count", **labels) == 1
        snapshot = pair.decode.app.parts.board.views.view()
        assert snapshot.transfer_rate_byte_count > 0
        assert snapshot.kv_token_byte_count == 8


async def test_each_side_tells_the_ledger_what_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[usage_event_pb2.AttemptEvent] = []

    async def publish(report: bytes) -> None:
        told.extend(usage_event_pb2.WorkerReport.FromString(report).attempts)

    monkeypatch.setattr(wiring, "_publisher", lambda redis, pool: publish)
    async with pair_of_workers() as pair:
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12), epoch=257)
        await pair.gateway.finished("r1")
        await pair.assert_nothing_is_held()
        for side in (pair.prefill, pair.decode):
            await side.app.parts.reporter.flush(last=True)
        here, there = pair.decode.app.instance, pair.prefill.app.instance

    peer, own = sorted(told, key=lambda event: len(event.choices))
    assert (
        (peer.request_id, peer.epoch, peer.tenant) == (own.request_id, own.epoch, own.tenant) == ("r1", 257, "tenant-1")
    )
    assert (peer.worker_instance, peer.asking_worker_instance) == (there, here)
    assert (own.worker_instance, own.asking_worker_instance) == (here, "")
    # Nine blocks there; what follows them here.
    assert (peer.prefill_token_count, own.prefill_token_count) == (144, 6)
    assert peer.prefill_time.ToNanoseconds() > 0


async def test_blocks_come_while_the_rest_is_computed() -> None:
    gate = Gate()

    def hold_the_third_chunk(decision: SchedulerOutput) -> None:
        if any(row.start == 64 for row in decision.scheduled):
            gate.open.clear()
        gate(decision)

    async with pair_of_workers(prefill_steps=hold_the_third_chunk) as pair:
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await until(lambda: pair.decode_stats().transfer.imported_block_total == 4)
        assert gate.held.is_set()
        assert pair.prefill.app.parts.board.views.view().free_slot_count == 31

        gate.open.set()
        await pair.gateway.finished("r1")

        assert pair.gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 12)
        await pair.assert_nothing_is_held()


async def test_only_blocks_that_are_not_cached_are_asked_for() -> None:
    async with pair_of_workers() as pair:
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=2))
        await pair.gateway.finished("r1")
        for number, prompt in enumerate((PROMPT, [*PROMPT[:80], *range(900, 980)])):
            await pair.submit(entry(f"again{number}", prompt=prompt, max_tokens=8))
            await pair.gateway.finished(f"again{number}")
            assert pair.gateway.of(f"again{number}").tokens[0] == echo_tokens(f"again{number}", 0, 8)

        assert pair.decode_stats().transfer.imported_block_total == 9 + 5
        assert pair.gateway.of("again1").finishes[0].usage.cached_token_count == 80
        await pair.assert_nothing_is_held()


async def test_choices_and_a_resumed_answer_take_one_import_each() -> None:
    async with pair_of_workers() as pair:
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=10, choices=3))
        resumed = entry("r2", prompt=PROMPT[::-1], max_tokens=60)
        resumed.prefix.add(choice=0, token_ids=echo_tokens("r2", 0, 50))
        pair.gateway.of("r2").tokens[0] = echo_tokens("r2", 0, 50)
        await pair.submit(resumed)
        await pair.gateway.finished("r1", "r2")

        for choice in range(3):
            assert pair.gateway.of("r1").tokens[choice] == echo_tokens("r1", choice, 10)
        assert pair.gateway.of("r2").tokens[0] == echo_tokens("r2", 0, 60)
        # The second prompt and what was said after it: 200 tokens.
        assert pair.decode_stats().transfer.imported_block_total == 9 + 12
        await pair.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("prefill", "cause"),
    [
        (peer_config(WorkerRole.AGGREGATED), "refused_wrong_role"),
        (dataclasses.replace(peer_config(WorkerRole.PREFILL), model_version="2"), "refused_wrong_version"),
        (peer_config(WorkerRole.PREFILL, block_size=8), "refused_wrong_layout"),
    ],
)
async def test_a_peer_that_cannot_help_says_why_and_the_prompt_is_computed_here(
    prefill: WorkerConfig, cause: str
) -> None:
    async with pair_of_workers(prefill=prefill) as pair:
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))

        await answered_alone(pair, "r1", cause)


async def test_a_draining_peer_refuses_and_ends_what_it_has_in_hand() -> None:
    gate = Gate()
    async with pair_of_workers(prefill_steps=gate) as pair:
        gate.open.clear()
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await until(lambda: pair.prefill.app.parts.board.prefill_count == 1)

        pair.prefill.app.begin_drain(60.0)
        await pair.submit(entry("r2", prompt=PROMPT[::-1], max_tokens=12))
        await answered_alone_while_held(pair, "r2")
        gate.open.set()
        await pair.gateway.finished("r1")

        assert pair.gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 12)
        assert fallbacks(pair.decode) == {"refused_draining": 1}
        await pair.assert_nothing_is_held()


async def answered_alone_while_held(pair: Pair, request_id: str) -> None:
    await pair.gateway.finished(request_id)
    assert pair.gateway.of(request_id).tokens[0] == echo_tokens(request_id, 0, 12)


async def test_a_full_peer_has_no_room() -> None:
    gate = Gate()
    prefill = peer_config(WorkerRole.PREFILL, max_num_seqs=1)
    async with pair_of_workers(prefill=prefill, prefill_steps=gate) as pair:
        gate.open.clear()
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await until(lambda: pair.prefill.app.parts.board.prefill_count == 1)

        await pair.submit(entry("r2", prompt=PROMPT[::-1], max_tokens=12))
        await answered_alone_while_held(pair, "r2")
        assert fallbacks(pair.decode) == {"refused_no_room": 1}

        gate.open.set()
        await pair.gateway.finished("r1")
        await pair.assert_nothing_is_held()


async def test_slots_are_bounded_and_who_gets_none_computes_alone() -> None:
    gate = Gate()
    decode = peer_config(WorkerRole.DECODE, kv_staging_bytes=4 * 128)
    async with pair_of_workers(decode=decode, prefill_steps=gate) as pair:
        gate.open.clear()
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await until(lambda: metric(pair.decode, "millrace_kv_staging_slots", state="leased") == 4)

        await pair.submit(entry("r2", prompt=PROMPT[::-1], max_tokens=12))
        await answered_alone_while_held(pair, "r2")
        assert fallbacks(pair.decode) == {"no_staging": 1}

        # Nine blocks go through four slots.
        gate.open.set()
        await pair.gateway.finished("r1")
        assert pair.gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 12)
        assert pair.decode_stats().transfer.imported_block_total == 9
        await pair.assert_nothing_is_held()


async def test_a_peer_that_is_not_there_costs_no_answer() -> None:
    async with pair_of_workers() as pair:
        pair.link.strike("cut")
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))

        await answered_alone(pair, "r1", "peer_lost")


@pytest.mark.parametrize("fault", ["silence", "cut"])
@pytest.mark.parametrize("blocks", [0, 2])
async def test_a_link_that_breaks_under_way_frees_both_sides(fault: str, blocks: int) -> None:
    gate = Gate()

    def hold(decision: SchedulerOutput) -> None:
        if any(row.key.request_id == "r1" and row.start == 16 * blocks for row in decision.scheduled):
            gate.open.clear()
        gate(decision)

    async with pair_of_workers(decode=DECODE, prefill_steps=hold) as pair:
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await until(lambda: gate.held.is_set() and pair.decode_stats().transfer.imported_block_total == blocks)

        pair.link.strike(fault)
        gate.open.set()

        await answered_alone(pair, "r1", "silent" if fault == "silence" else "peer_lost")


async def test_what_passes_late_changes_nothing() -> None:
    gate = Gate()
    async with pair_of_workers(decode=DECODE, prefill_steps=gate) as pair:
        gate.open.clear()
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await until(gate.held.is_set)
        pair.link.strike("silence")
        await pair.gateway.finished("r1")
        gate.open.set()
        pair.link.heal()

        await pair.submit(entry("r2", prompt=PROMPT[::-1], max_tokens=12))
        await pair.gateway.finished("r2")

        assert pair.gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 12)
        assert pair.gateway.of("r2").tokens[0] == echo_tokens("r2", 0, 12)
        await pair.assert_nothing_is_held()


@pytest.mark.parametrize("chunk", [0, 1])
async def test_a_cancel_stops_the_peer_at_once(chunk: int) -> None:
    gate = Gate()

    def hold(decision: SchedulerOutput) -> None:
        if any(row.key.request_id == "r1" and row.start == 32 * chunk for row in decision.scheduled):
            gate.open.clear()
        gate(decision)

    async with pair_of_workers(prefill_steps=hold) as pair:
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await until(gate.held.is_set)
        steps = gate.steps

        pair.gateway.cancel("r1")
        await pair.gateway.finished("r1")
        await until(lambda: pair.prefill.app.parts.board.prefill_count == 0)
        gate.open.set()
        await pair.assert_nothing_is_held()

        assert pair.gateway.of("r1").finishes[0].reason == common_pb2.FINISH_REASON_CANCELLED
        assert gate.steps - steps <= 1
        assert fallbacks(pair.decode) == {}


async def test_a_deadline_ends_the_wait_for_a_peer() -> None:
    gate = Gate()
    async with pair_of_workers(prefill_steps=gate) as pair:
        gate.open.clear()
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12), remaining_s=1.0)

        # Half of the time is left for doing it here.
        await pair.gateway.finished("r1")
        gate.open.set()
        await answered_alone(pair, "r1", "timeout")


async def test_a_newer_attempt_takes_over_and_the_older_call_ends() -> None:
    gate = Gate()
    async with pair_of_workers(prefill_steps=gate) as pair:
        gate.open.clear()
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await until(gate.held.is_set)

        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12), epoch=512)
        await until(lambda: pair.prefill.app.parts.board.prefill_count == 1)
        gate.open.set()
        await pair.gateway.finished("r1")

        assert pair.gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 12)
        await pair.assert_nothing_is_held()


async def test_a_peer_whose_engine_breaks_says_so() -> None:
    armed: list[bool] = []

    def explode(_: SchedulerOutput) -> None:
        if armed:
            raise RuntimeError("device lost")

    async with pair_of_workers(prefill_steps=explode) as pair:
        armed.append(True)
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await pair.gateway.finished("r1")

        assert pair.gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 12)
        assert fallbacks(pair.decode) == {"refused_failed": 1}


async def test_a_spoilt_block_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = grpc_stream._StreamSender.send

    async def spoil(self: grpc_stream._StreamSender, blocks: list) -> None:  # type: ignore[type-arg]
        slot, block = blocks[-1]
        blocks[-1] = (slot, block._replace(payload=bytes(len(block.payload))))
        await whole(self, blocks)

    monkeypatch.setattr(grpc_stream._StreamSender, "send", spoil)
    async with pair_of_workers() as pair:
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))

        await answered_alone(pair, "r1", "spoilt")
        assert pair.decode_stats().transfer.refused_block_total >= 1


async def test_one_trace_shows_both_workers(spans: InMemorySpanExporter) -> None:
    work = entry("r1", prompt=PROMPT, max_tokens=12)
    work.traceparent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    async with pair_of_workers() as pair:
        await pair.submit(work)
        await pair.gateway.finished("r1")
        await pair.assert_nothing_is_held()

    named = {span.name: span for span in spans.get_finished_spans() if span.name.startswith("worker.")}
    assert set(named) == {"worker.transfer", "worker.peer_prefill", "worker.prefill", "worker.decode"}
    assert {span.context.trace_id for span in named.values() if span.context} == {0x0123456789ABCDEF0123456789ABCDEF}
    parent, child = named["worker.transfer"].context, named["worker.peer_prefill"].parent
    assert parent is not None
    assert child is not None
    assert child.span_id == parent.span_id


def start_message(pair: Pair) -> pb.PrefillStart:
    """A good one."""
    identity = pair.prefill.app.parts.identity
    start = pb.PrefillStart(
        request_id="r1",
        epoch=256,
        worker_instance="worker",
        model=identity.model,
        tenant="tenant-1",
        priority_class=common_pb2.PRIORITY_CLASS_INTERACTIVE,
        cache_salt=b"salt",
        token_ids=bytes(4 * 32),
        layout=pb.KVLayout(dtype="uint64", shape=[16], value_byte_count=8, block_size=16),
        slots=[0, 1],
    )
    start.lease.FromSeconds(3)
    return start


async def first_answers(pair: Pair, message: pb.PrefillRequest) -> list[pb.PrefillResponse]:
    async with open_channel(pair.prefill.app.address) as channel:
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        call = stub.Prefill(iter([message]), timeout=WAIT_S)
        return [answer async for answer in call]


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"token_ids": bytes(4 * 31)}, pb.PREFILL_REFUSAL_INVALID),
        ({"token_ids": b"abc"}, pb.PREFILL_REFUSAL_INVALID),
        ({"token_ids": b""}, pb.PREFILL_REFUSAL_INVALID),
        ({"token_ids": b"\xff\xff\xff\x7f" * 32}, pb.PREFILL_REFUSAL_INVALID),
        ({"cache_salt": b""}, pb.PREFILL_REFUSAL_INVALID),
        ({"held_block_count": 2}, pb.PREFILL_REFUSAL_INVALID),
        ({"held_block_count": -1}, pb.PREFILL_REFUSAL_INVALID),
        ({"request_id": ""}, pb.PREFILL_REFUSAL_INVALID),
        ({"weight": float("nan")}, pb.PREFILL_REFUSAL_INVALID),
        ({"priority_class": 0}, pb.PREFILL_REFUSAL_INVALID),
    ],
)
async def test_what_makes_no_sense_is_refused_and_leaves_nothing(changes: dict[str, object], refusal: int) -> None:
    async with pair_of_workers() as pair:
        start = start_message(pair)
        for field, value in changes.items():
            setattr(start, field, value)

        (answer,) = await first_answers(pair, pb.PrefillRequest(start=start))

        assert answer.refused.refusal == refusal
        assert pair.prefill.app.parts.board.prefill_count == 0


async def test_a_call_without_a_start_is_an_invalid_request() -> None:
    async with pair_of_workers() as pair:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await first_answers(pair, pb.PrefillRequest(renew=pb.PrefillRenew()))

        assert isinstance(error_from_rpc(refused.value), InvalidRequest)
