"""Prefill in one engine, decode in another: waiting, arrival, failure, endings in between, what is kept for whom."""

from __future__ import annotations

import pytest

from services.worker.engine.kv_blocks import KVBlock
from services.worker.engine.kv_transfer import ImportOutcome, RemotePrefill
from services.worker.engine.request import FinishReason, KVRole, RequestKey, SamplingParams
from tests.helpers.engine import EngineRig, assert_engine_empty, echoes, make_request, make_spec, prompt

LENGTH = 22  # five full blocks of four tokens and two tokens more


def prefilled(*, length: int = LENGTH) -> list[KVBlock]:
    """The prompt's full blocks as another engine exports them."""
    peer = EngineRig()
    peer.add(make_request("a", prompt(length), max_tokens=1, kv_role=KVRole.EXPORT))
    peer.run()
    blocks = peer.engine.exported_kv("a", 1, start=0)
    assert peer.engine.stats(peer.now).held_block_count == len(blocks)
    assert peer.engine.release_kv("a", 1)
    assert_engine_empty(peer)
    return blocks


def waiting(rig: EngineRig, *, length: int = LENGTH, **fields: object) -> RemotePrefill:
    """Add a request that waits for its peer."""
    rig.add(make_request("a", prompt(length), max_tokens=6, kv_role=KVRole.IMPORT, **fields))
    rig.step()
    (prefill,) = rig.engine.take_remote_prefills()
    return prefill


def test_imported_blocks_leave_the_rest_of_the_prompt_to_compute() -> None:
    rig = EngineRig()
    prefill = waiting(rig)
    rig.step(3)
    assert rig.token_ids("a") == []
    assert rig.engine.stats(rig.now).held_block_count == 6
    assert rig.engine.stats(rig.now).steps_without_progress == 0
    blocks = prefilled()
    assert (prefill.start, prefill.full_hashes) == (0, tuple(block.full_hash for block in blocks))

    assert rig.engine.kv_received("a", 1, blocks) is ImportOutcome.READY
    rig.run()

    assert rig.token_ids("a") == echoes("a", 6)
    assert rig.computed_tokens("a") == 2 + 5
    assert rig.outputs[RequestKey("a", 0, 1)][0].cached_token_count == 0
    assert rig.engine.stats(rig.now).transfer.imported_block_total == 5
    assert_engine_empty(rig)


def test_local_hits_are_not_asked_for() -> None:
    rig = EngineRig()
    rig.add(make_request("warm", prompt(8), max_tokens=1))
    rig.run()

    prefill = waiting(rig)
    rig.engine.kv_received("a", 1, prefilled()[2:])
    rig.run()

    assert (prefill.start, len(prefill.full_hashes)) == (8, 3)
    assert rig.token_ids("a") == echoes("a", 6)
    assert_engine_empty(rig)


@pytest.mark.parametrize("length", [3, 4, 5, 20])
def test_block_edges(length: int) -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(length), max_tokens=6, kv_role=KVRole.IMPORT))
    rig.step()
    for prefill in rig.engine.take_remote_prefills():
        assert len(prefill.full_hashes) == length // 4
        rig.engine.kv_received("a", 1, prefilled(length=length))
    rig.run()

    assert rig.token_ids("a") == echoes("a", 6)
    assert_engine_empty(rig)


@pytest.mark.parametrize(("kept", "computed"), [(0, LENGTH), (2, LENGTH - 8)])
def test_a_spoilt_block_and_those_after_it_are_computed_here(kept: int, computed: int) -> None:
    rig = EngineRig()
    waiting(rig)
    blocks = prefilled()
    blocks[kept] = blocks[kept]._replace(payload=blocks[kept + 1].payload)

    assert rig.engine.kv_received("a", 1, blocks) is ImportOutcome.SPOILT
    rig.run()

    assert rig.token_ids("a") == echoes("a", 6)
    assert rig.computed_tokens("a") == computed + 5
    assert rig.engine.stats(rig.now).transfer.refused_block_total == 5 - kept
    assert_engine_empty(rig)


def test_blocks_come_in_parts_and_each_can_be_hit_at_once() -> None:
    rig = EngineRig()
    waiting(rig)
    blocks = prefilled()

    assert rig.engine.kv_received("a", 1, blocks[:2]) is ImportOutcome.WAITING
    rig.add(make_request("short", prompt(10), max_tokens=2))
    rig.step(3)
    assert rig.token_ids("a") == []
    assert rig.outputs[RequestKey("short", 0, 1)][0].cached_token_count == 8
    assert rig.engine.kv_received("a", 1, []) is ImportOutcome.WAITING
    assert rig.engine.kv_received("a", 1, blocks[2:]) is ImportOutcome.READY
    rig.run()

    assert rig.token_ids("a") == echoes("a", 6)
    assert rig.computed_tokens("a") == 2 + 5
    assert_engine_empty(rig)


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_parts_that_came_stand_when_the_rest_does_not_come(is_spoilt: bool) -> None:
    rig = EngineRig()
    waiting(rig)
    blocks = prefilled()

    rig.engine.kv_received("a", 1, blocks[:3])
    if is_spoilt:
        assert rig.engine.kv_received("a", 1, blocks[:1]) is ImportOutcome.SPOILT
    else:
        assert rig.engine.kv_failed("a", 1)
    rig.run()

    assert rig.token_ids("a") == echoes("a", 6)
    assert rig.computed_tokens("a") == LENGTH - 12 + 5
    assert_engine_empty(rig)


def test_another_tenants_blocks_are_refused() -> None:
    rig = EngineRig()
    waiting(rig, tenant="other")

    rig.engine.kv_received("a", 1, prefilled())
    rig.run()

    assert rig.engine.stats(rig.now).transfer.imported_block_total == 0
    assert rig.token_ids("a") == echoes("a", 6)
    assert_engine_empty(rig)


def test_a_peer_that_fails_leaves_the_prompt_to_compute_here() -> None:
    rig = EngineRig()
    waiting(rig)

    assert rig.engine.kv_failed("a", 1)
    rig.run()

    assert rig.token_ids("a") == echoes("a", 6)
    assert rig.engine.take_remote_prefills() == []
    assert_engine_empty(rig)


@pytest.mark.parametrize("has_arrived", [False, True])
@pytest.mark.parametrize("ending", [FinishReason.CANCELLED, FinishReason.EXPIRED, FinishReason.ERROR])
def test_an_end_while_waiting_frees_everything_within_a_step(ending: FinishReason, has_arrived: bool) -> None:
    rig = EngineRig(max_num_seqs=1)
    waiting(rig, deadline=0.05 if ending is FinishReason.EXPIRED else None)
    rig.add(make_request("b", prompt(4, seed=1), max_tokens=100))
    rig.step()
    if has_arrived:
        # The only slot is taken: the blocks are there and the request still waits.
        rig.engine.kv_received("a", 1, prefilled())

    if ending is FinishReason.CANCELLED:
        rig.engine.abort("a")
        rig.engine.abort("b")
    if ending is FinishReason.ERROR:
        for output in rig.engine.fail_all("device lost"):
            rig.outputs.setdefault(output.key, []).append(output)
    rig.step(seconds=0.06)
    rig.engine.abort("b")
    rig.step()

    assert rig.finish("a") is ending
    assert_engine_empty(rig)
    assert rig.engine.kv_received("a", 1, prefilled()) is ImportOutcome.ORPHAN
    assert not rig.engine.kv_failed("a", 1)
    assert rig.engine.stats(rig.now).transfer.orphan_total == 2
    assert rig.engine.stats(rig.now).transfer.orphan_block_total == 5


def test_a_request_that_ended_before_its_peer_was_asked_is_not_asked_for() -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(LENGTH), kv_role=KVRole.IMPORT))
    rig.step()
    rig.engine.abort("a")
    rig.step()

    assert rig.engine.take_remote_prefills() == []
    assert_engine_empty(rig)


def test_a_stale_epoch_is_an_orphan() -> None:
    rig = EngineRig()
    waiting(rig)

    assert rig.engine.kv_received("a", 0, prefilled()) is ImportOutcome.ORPHAN
    rig.engine.kv_failed("a", 1)
    rig.run()

    assert rig.engine.stats(rig.now).transfer.orphan_total == 1
    assert_engine_empty(rig)


def test_others_go_on_and_wait_for_a_prefix_that_is_on_its_way() -> None:
    rig = EngineRig()
    waiting(rig)
    rig.add(make_request("same", prompt(LENGTH), max_tokens=2))
    rig.add(make_request("other", prompt(8, seed=3), max_tokens=2))
    rig.step(4)
    assert rig.token_ids("other") == echoes("other", 2)
    assert rig.token_ids("same") == []

    rig.engine.kv_received("a", 1, prefilled())
    rig.run()

    assert rig.outputs[RequestKey("same", 0, 1)][0].cached_token_count == 20
    assert rig.token_ids("same") == echoes("same", 2)
    assert_engine_empty(rig)


def test_three_choices_take_one_import() -> None:
    rig = EngineRig()
    waiting(rig, choices=make_request("x", n=3).choices)

    rig.engine.kv_received("a", 1, prefilled())
    rig.run()

    for choice in range(3):
        assert rig.token_ids("a", choice=choice) == echoes("a", 6, choice=choice)
    assert rig.engine.stats(rig.now).transfer.imported_block_total == 5
    assert_engine_empty(rig)


def test_prompt_logprobs_are_computed_here() -> None:
    rig = EngineRig()
    sampling = SamplingParams(max_tokens=2, seed=1, prompt_logprob_count=0)
    rig.add(make_request("a", prompt(LENGTH), sampling=sampling, kv_role=KVRole.IMPORT))
    rig.run()

    assert sum(len(output.prompt_logprobs) for output in rig.outputs[RequestKey("a", 0, 1)]) == LENGTH - 1
    assert_engine_empty(rig)


def test_blocks_are_exported_chunk_by_chunk_and_kept_until_released() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=8), max_prefill_chunk=8)
    rig.add(make_request("a", prompt(LENGTH), max_tokens=1, kv_role=KVRole.EXPORT))
    seen: list[KVBlock] = []
    sizes: list[int] = []
    while rig.engine.has_work():
        rig.step()
        fresh = rig.engine.exported_kv("a", 1, start=len(seen))
        assert rig.engine.exported_kv("a", 1, start=len(seen), limit=1) == fresh[:1]
        sizes.append(len(fresh))
        seen += fresh
    assert sizes[:3] == [2, 2, 1]
    assert seen == prefilled()
    # Three of eight blocks are left: what needs more waits for the peer, not for ever.
    rig.add(make_request("b", prompt(20, seed=1), max_tokens=2))
    rig.step(3)
    assert rig.token_ids("b") == []
    assert rig.engine.exported_kv("a", 1, start=0) == seen

    assert rig.engine.release_kv("a", 1)
    rig.run()

    assert not rig.engine.release_kv("a", 1)
    assert rig.engine.exported_kv("a", 1, start=0) == []
    assert rig.token_ids("b") == echoes("b", 2)
    assert_engine_empty(rig)


def test_a_device_fault_ends_what_is_kept_for_peers() -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(LENGTH), max_tokens=1, kv_role=KVRole.EXPORT))
    rig.run()

    rig.engine.fail_all("device lost")

    assert rig.engine.exported_kv("a", 1, start=0) == []
    assert_engine_empty(rig)
