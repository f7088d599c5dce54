"""Prefill on one worker, decode on another, with blocks that the peer writes by itself: slots, quarantine, fences."""

from __future__ import annotations

import itertools

import pytest

from services.worker import remote_prefill
from services.worker.config import WorkerRole
from services.worker.engine.outputs import SchedulerOutput
from services.worker.kv_transport import TransferError
from services.worker.runtime.transfers.nixl import NixlTransfer, nixl_module
from tests.helpers.peers import Pair, fallbacks, metric, pair_of_workers, peer_config
from tests.helpers.waiting import until
from tests.helpers.worker import Gate, echo_tokens, entry

pytestmark = pytest.mark.skipif(nixl_module() is None, reason="the extra `transfer` is not installed")
PROMPT = list(range(100, 100 + 150))
PREFILL = peer_config(WorkerRole.PREFILL, kv_transfer="nixl")
DECODE = peer_config(WorkerRole.DECODE, kv_transfer="nixl", kv_lease_ms=300)


def hold_second_chunk(gate: Gate) -> object:
    def hold(decision: SchedulerOutput) -> None:
        if any(row.key.request_id == "r1" and row.start == 32 for row in decision.scheduled):
            gate.open.clear()
        gate(decision)

    return hold


async def answered(pair: Pair, request_id: str, prompt: list[int]) -> None:
    await pair.submit(entry(request_id, prompt=prompt, max_tokens=12))
    await pair.gateway.finished(request_id)
    assert pair.gateway.of(request_id).tokens[0] == echo_tokens(request_id, 0, 12)


async def test_blocks_that_a_peer_wrote_give_the_same_answer() -> None:
    async with pair_of_workers(prefill=PREFILL, decode=DECODE) as pair:
        await answered(pair, "r1", PROMPT)
        await answered(pair, "r2", PROMPT[::-1])

        assert pair.decode_stats().transfer.imported_block_total == 18
        assert fallbacks(pair.decode) == {}
        await pair.assert_nothing_is_held()
        labels = {"transport": "nixl", "outcome": "imported"}
        assert metric(pair.decode, "millrace_transfer_bytes_total", **labels) == 18 * 128


async def test_a_peer_without_nixl_streams_its_blocks() -> None:
    async with pair_of_workers(decode=DECODE) as pair:
        await answered(pair, "r1", PROMPT)

        assert pair.decode_stats().transfer.imported_block_total == 9
        await pair.assert_nothing_is_held()
        assert metric(pair.decode, "millrace_transfer_seconds_count", transport="grpc", outcome="imported") == 1


async def test_a_cancelled_request_frees_its_slots_once_the_peer_has_said_so() -> None:
    gate = Gate()
    hold = hold_second_chunk(gate)
    async with pair_of_workers(prefill=PREFILL, decode=DECODE, prefill_steps=hold) as pair:  # type: ignore[arg-type]
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await until(gate.held.is_set)

        pair.gateway.cancel("r1")
        await until(lambda: pair.prefill.app.parts.board.prefill_count == 0)
        gate.open.set()
        await pair.assert_nothing_is_held()

        assert metric(pair.decode, "millrace_transfer_seconds_count", transport="nixl", outcome="cancelled") == 1
        assert pair.decode.app.parts.peers.remotes.staging.is_closed is False


@pytest.mark.parametrize("failures", [0, 1])
async def test_slots_of_a_silent_peer_are_quarantined_until_it_is_cut_off(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, tries = NixlTransfer.fence, itertools.count()

    async def fence_at_last(transfer: NixlTransfer) -> None:
        if next(tries) < failures:
            raise TransferError("the agent does not start")
        await fence(transfer)

    monkeypatch.setattr(NixlTransfer, "fence", fence_at_last)
    monkeypatch.setattr(remote_prefill, "FENCE_RETRY_S", 0.01)
    gate = Gate()
    hold = hold_second_chunk(gate)
    async with pair_of_workers(prefill=PREFILL, decode=DECODE, prefill_steps=hold) as pair:  # type: ignore[arg-type]
        await pair.submit(entry("r1", prompt=PROMPT, max_tokens=12))
        await until(lambda: gate.held.is_set() and pair.decode_stats().transfer.imported_block_total == 2)
        pair.link.strike("silence")
        await pair.gateway.finished("r1")
        await until(lambda: metric(pair.decode, "millrace_kv_staging_slots", state="quarantined") > 0)

        # What the peer still writes meets a closed agent; who comes next finds clean slots.
        gate.open.set()
        await pair.assert_nothing_is_held()
        pair.link.heal()
        await answered(pair, "r2", PROMPT[::-1])

        assert pair.gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 12)
        assert pair.gateway.of("r2").tokens[0] == echo_tokens("r2", 0, 12)
        # The one who comes next may find the link still slow, never wrong.
        assert set(fallbacks(pair.decode)) == {"silent"}
        assert next(tries) > failures
        await pair.assert_nothing_is_held()
