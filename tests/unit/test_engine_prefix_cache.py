"""The prefix cache: what hits, what must not, copy-on-write, and waiting for what another request computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from services.common.block_hash import chain_hashes, pack_tokens, root_hash
from services.worker.engine.engine_config import EngineConfig, TenantLimits
from services.worker.engine.isolation_check import check_isolation
from services.worker.engine.kv_cache_manager import KVCacheManager
from services.worker.engine.request import Choice, RequestKey, SamplingParams
from tests.helpers.engine import (
    EngineRig,
    PriorityClass,
    assert_engine_empty,
    echoes,
    make_request,
    make_spec,
    prompt,
    tokens,
)


def warm(rig: EngineRig, length: int, **fields: Any) -> None:
    """Leave a prompt of this length in the cache."""
    rig.add(make_request("warm", prompt(length), max_tokens=1, **fields))
    rig.run()


def cached_tokens(rig: EngineRig, request_id: str, *, choice: int = 0) -> int:
    return rig.outputs[RequestKey(request_id, choice, 1)][0].cached_token_count


@pytest.mark.parametrize(
    ("length", "cached"), [(3, 0), (4, 3), (5, 4), (11, 8), (12, 11), (13, 12), (16, 15), (17, 16)]
)
def test_equal_prompts_hit_in_whole_blocks_and_a_whole_prompt_but_its_last_token(length: int, cached: int) -> None:
    rig = EngineRig()
    warm(rig, length)
    rig.add(make_request("a", prompt(length), max_tokens=6))
    rig.run()

    assert cached_tokens(rig, "a") == cached
    assert rig.computed_tokens("a") == length - cached + 5
    assert rig.token_ids("a") == echoes("a", 6)
    assert_engine_empty(rig)


def test_the_last_block_of_a_whole_hit_is_copied_and_the_original_is_left_alone() -> None:
    rig = EngineRig()
    warm(rig, 12)
    rig.add(make_request("a", prompt(12), max_tokens=4))
    rig.step()

    ((source, destination),) = rig.last.block_copies
    (row,) = rig.last.scheduled
    assert row.block_table[2] == destination
    assert source not in row.block_table
    assert (row.start, len(row.token_ids)) == (11, 1)
    rig.run()
    assert rig.engine.stats(rig.now).block_copy_total == 1
    assert_engine_empty(rig)


def test_a_batch_of_hit_and_miss_gives_each_row_its_own_blocks() -> None:
    rig = EngineRig()
    warm(rig, 16)
    rig.add(make_request("hit", prompt(20), max_tokens=8))
    rig.add(make_request("miss", prompt(20, seed=1), max_tokens=8))
    rig.step()

    hit, miss = rig.last.scheduled
    assert (hit.start, miss.start) == (16, 0)
    assert not set(hit.block_table) & set(miss.block_table)
    assert len(set(miss.block_table)) == 5
    rig.run()
    assert rig.token_ids("hit") == echoes("hit", 8)
    assert rig.token_ids("miss") == echoes("miss", 8)
    assert_engine_empty(rig)


def test_hits_survive_a_stop_an_abort_and_a_preemption() -> None:
    rig = EngineRig(max_num_seqs=1, aging_seconds=1e9)
    rig.add(make_request("stopped", prompt(16), max_tokens=50))
    rig.step(3)
    rig.engine.abort("stopped")
    rig.add(make_request("batch", prompt(16), max_tokens=20, priority_class=PriorityClass.BATCH))
    rig.step(3)
    rig.add(make_request("urgent", prompt(16), max_tokens=4))
    rig.run()

    assert cached_tokens(rig, "batch") == cached_tokens(rig, "urgent") == 15
    assert rig.engine.stats(rig.now).preemption_total == 1
    assert rig.token_ids("batch") == echoes("batch", 20)
    assert_engine_empty(rig)


def test_output_tokens_are_published_once_computed_and_hit_by_the_next_turn() -> None:
    rig = EngineRig()
    rig.add(make_request("turn1", prompt(10), max_tokens=15))
    rig.run()
    history = tokens(*prompt(10).tolist(), *echoes("turn1", 15), 1, 2, 3)
    rig.add(make_request("turn2", history, max_tokens=3))
    rig.run()

    # 24 of the 25 tokens were computed, the newest never was: six whole blocks.
    assert cached_tokens(rig, "turn2") == 24
    assert_engine_empty(rig)


def test_a_block_that_filled_up_by_decoding_is_hit_under_its_own_tokens_only() -> None:
    """A 15-token prompt whose block of 16 is completed by an output token, and other histories beside it."""
    rig = EngineRig(spec=make_spec(block_size=16))
    rig.add(make_request("a", prompt(15), max_tokens=3))
    rig.run()
    own, other = echoes("a", 1)[0], (echoes("a", 1)[0] + 1) % 1000
    same = tokens(*prompt(15).tolist(), own, 7)
    different = tokens(*prompt(15).tolist(), other, 7)

    rig.add(make_request("different", different, max_tokens=4))
    rig.add(make_request("same", same, max_tokens=4))
    rig.run()

    assert cached_tokens(rig, "different") == 0
    assert cached_tokens(rig, "same") == 16
    assert_engine_empty(rig)


def test_a_chunk_that_starts_behind_a_hit_is_as_right_as_a_whole_one() -> None:
    rig = EngineRig(max_prefill_chunk=5)
    warm(rig, 8)
    rig.add(make_request("a", prompt(30), max_tokens=5))
    rig.run()

    assert cached_tokens(rig, "a") == 8
    assert rig.token_ids("a") == echoes("a", 5)
    assert_engine_empty(rig)


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "b"},
        {"tenant": "a", "adapter_digest": b"digest of an adapter"},
        {"tenant": "a", "cache_salt": b""},
    ],
)
def test_equal_prompts_of_another_tenant_or_adapter_never_hit(other: dict[str, Any]) -> None:
    rig = EngineRig()
    warm(rig, 16, tenant="a")
    rig.add(make_request("foreign", prompt(16), **other))
    rig.add(make_request("own", prompt(16), tenant="a"))
    rig.run()

    assert cached_tokens(rig, "foreign") == 0
    assert cached_tokens(rig, "own") == 15
    assert_engine_empty(rig)


def test_an_adapter_reloaded_with_new_content_under_its_old_name_does_not_hit() -> None:
    rig = EngineRig()
    warm(rig, 16, adapter_digest=b"content 1")
    rig.add(make_request("same", prompt(16), adapter_digest=b"content 1"))
    rig.add(make_request("reloaded", prompt(16), adapter_digest=b"content 2"))
    rig.run()

    assert (cached_tokens(rig, "same"), cached_tokens(rig, "reloaded")) == (15, 0)
    assert_engine_empty(rig)


def test_without_a_tenant_salt_nothing_is_shared_between_requests() -> None:
    rig = EngineRig()
    warm(rig, 16, cache_salt=b"")
    rig.add(make_request("a", prompt(16), cache_salt=b""))
    rig.run()

    assert cached_tokens(rig, "a") == 0
    assert rig.engine.stats(rig.now).cached_block_count == 0
    assert_engine_empty(rig)


def test_the_isolation_self_test_passes_and_fails_when_salts_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model_version="m")
    check_isolation(config)

    honest = KVCacheManager.root_of
    monkeypatch.setattr(
        KVCacheManager,
        "root_of",
        lambda self, *, adapter_digest, cache_salt: honest(self, adapter_digest=adapter_digest, cache_salt=b"same"),
    )
    with pytest.raises(RuntimeError, match="apart"):
        check_isolation(config)


def test_an_evicted_block_is_no_hit_and_the_oldest_tail_goes_first() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=8))
    warm(rig, 16)
    rig.add(make_request("other", prompt(20, seed=1), max_tokens=5))
    rig.run()
    rig.add(make_request("a", prompt(16), max_tokens=1))
    rig.run()

    # The other took six blocks: four that were never used, and the last two of the four cached ones.
    assert cached_tokens(rig, "a") == 8
    assert rig.token_ids("a") == echoes("a", 1)
    assert_engine_empty(rig)


def test_a_whole_hit_in_a_pool_too_small_for_a_copy_recomputes_its_last_block() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=4))
    warm(rig, 16)
    rig.add(make_request("a", prompt(16), max_tokens=1))
    rig.run()

    assert cached_tokens(rig, "a") == 12
    assert rig.engine.stats(rig.now).block_copy_total == 0
    assert_engine_empty(rig)


def test_prompt_logprobs_are_complete_on_a_warm_cache_and_given_once() -> None:
    rig = EngineRig(max_prefill_chunk=6)
    warm(rig, 16)
    sampling = SamplingParams(max_tokens=3, seed=1, prompt_logprob_count=0)
    rig.add(make_request("a", prompt(16), sampling=sampling, n=2))
    rig.run()

    given = [entry.token_id for out in rig.outputs[RequestKey("a", 0, 1)] for entry in out.prompt_logprobs]
    assert given == prompt(16)[1:].tolist()
    assert not any(out.prompt_logprobs for out in rig.outputs[RequestKey("a", 1, 1)])
    assert_engine_empty(rig)


def test_prompt_logprobs_are_not_given_twice_after_a_preemption() -> None:
    rig = EngineRig(max_prefill_chunk=6, max_num_seqs=1)
    sampling = SamplingParams(max_tokens=3, seed=1, prompt_logprob_count=0)
    rig.add(make_request("a", prompt(20), sampling=sampling, priority_class=PriorityClass.BATCH))
    rig.step(2)
    rig.add(make_request("urgent", prompt(8, seed=1), max_tokens=3))
    rig.run()

    assert rig.engine.stats(rig.now).preemption_total == 1
    given = [entry.token_id for out in rig.outputs[RequestKey("a", 0, 1)] for entry in out.prompt_logprobs]
    assert given == prompt(20)[1:].tolist()
    assert_engine_empty(rig)


@pytest.mark.parametrize("length", [3, 4, 5, 8, 10, 40])
@pytest.mark.parametrize("salt", [b"salt", b""])
def test_choices_of_one_request_compute_the_prompt_once_and_copy_its_last_block(length: int, salt: bytes) -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(length), n=4, max_tokens=6, cache_salt=salt))
    rig.run()

    # Each choice but the first computes the last prompt token again, for its own first token.
    assert rig.computed_tokens("a") == length + 3 + 4 * 5
    for choice in range(4):
        assert rig.token_ids("a", choice=choice) == echoes("a", 6, choice=choice)
        assert cached_tokens(rig, "a", choice=choice) == 0
    assert_engine_empty(rig)


def test_choices_share_the_whole_blocks_of_their_prompt() -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(18), n=3, max_tokens=10))
    rig.step(3)

    tables = [row.block_table for row in rig.last.scheduled]
    assert len(tables) == 3
    assert len({table[:4] for table in tables}) == 1
    assert len({table[4] for table in tables}) == 3
    assert rig.engine.stats(rig.now).held_block_count == 4 + 3
    rig.run()
    assert_engine_empty(rig)


def test_choices_that_resume_with_prefixes_share_the_prompt_too() -> None:
    rig = EngineRig()
    choices = (Choice(0, tokens(*echoes("a", 5))), Choice(1, tokens(*echoes("a", 2, choice=1))))
    rig.add(make_request("a", prompt(10), choices=choices, max_tokens=8))
    rig.run()

    # 15 tokens of the first; the second starts behind the ten of the prompt.
    assert rig.computed_tokens("a") == (10 + 5 + 2) + (2 + 5)
    assert rig.token_ids("a", choice=1) == echoes("a", 8, choice=1)[2:]
    assert_engine_empty(rig)


def test_when_the_first_choice_is_aborted_in_its_prefill_another_takes_over() -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(40), n=2, max_tokens=4))
    rig.step()
    rig.engine.abort("a", choice=0)
    rig.run()

    assert rig.token_ids("a", choice=1) == echoes("a", 4, choice=1)
    assert_engine_empty(rig)


def test_a_burst_of_one_prefix_computes_it_once() -> None:
    rig = EngineRig()
    for index in range(6):
        tail = tokens(*prompt(32).tolist(), index, index + 1)
        rig.add(make_request(f"r{index}", tail, max_tokens=3))
    rig.run()

    assert sum(rig.computed_tokens(f"r{index}") for index in range(6)) == 32 + 6 * 2 + 6 * 2
    assert [cached_tokens(rig, f"r{index}") for index in range(6)] == [0, 32, 32, 32, 32, 32]
    for index in range(6):
        assert rig.token_ids(f"r{index}") == echoes(f"r{index}", 3)
    assert_engine_empty(rig)


def test_who_waits_for_a_prefix_goes_on_as_soon_as_the_shared_part_is_computed() -> None:
    rig = EngineRig(max_prefill_chunk=16)
    rig.add(make_request("long", tokens(*prompt(16).tolist(), *prompt(100, seed=5).tolist()), max_tokens=2))
    rig.add(make_request("short", prompt(17), max_tokens=2))
    rig.step(2)

    assert rig.scheduled_tokens("short") == [0, 1]
    assert cached_tokens(rig, "short") == 16
    rig.run()
    assert_engine_empty(rig)


@pytest.mark.parametrize("way", ["abort", "preempt"])
def test_who_waits_for_a_prefix_computes_it_when_the_other_goes_away(way: str) -> None:
    rig = EngineRig(max_num_seqs=2)
    rig.add(make_request("first", prompt(60), max_tokens=4, priority_class=PriorityClass.BATCH))
    rig.add(make_request("second", prompt(61), max_tokens=4, priority_class=PriorityClass.BATCH))
    rig.step()
    assert rig.scheduled_tokens("second") == [0]

    if way == "abort":
        rig.engine.abort("first")
    else:
        for index in range(2):
            rig.add(make_request(f"urgent{index}", prompt(8, seed=index + 1), max_tokens=4))
    rig.run()

    assert rig.token_ids("second") == echoes("second", 4)
    assert rig.token_ids("first") == (echoes("first", 4) if way == "preempt" else [])
    assert_engine_empty(rig)


def test_a_better_class_does_not_wait_for_a_worse_one() -> None:
    rig = EngineRig()
    rig.add(make_request("batch", prompt(60), max_tokens=2, priority_class=PriorityClass.BATCH))
    rig.step()
    rig.add(make_request("urgent", prompt(60), max_tokens=2))
    rig.step(2)

    # It waits for one chunk of the other, as any long prefill does, and then goes first.
    assert rig.scheduled_tokens("urgent") == [0, 0, 16]
    assert rig.scheduled_tokens("batch") == [16, 16, 0]
    rig.run()
    assert_engine_empty(rig)


def test_hit_counters_count_prompt_tokens_looked_up_and_found() -> None:
    rig = EngineRig()
    warm(rig, 16)
    before = rig.engine.stats(rig.now)
    rig.add(make_request("a", prompt(20), max_tokens=2))
    rig.run()
    after = rig.engine.stats(rig.now)

    assert after.prefix_query_token_total - before.prefix_query_token_total == 20
    assert after.prefix_hit_token_total - before.prefix_hit_token_total == 16


def test_kv_events_carry_the_hashes_that_a_gateway_computes() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=4))
    first = rig.engine.take_kv_events()
    rig.add(make_request("a", prompt(8), max_tokens=1, tenant="t"))
    rig.run()
    stored = rig.engine.take_kv_events()
    rig.add(make_request("b", prompt(16, seed=1), max_tokens=1, tenant="t"))
    rig.run()
    replaced = rig.engine.take_kv_events()

    root = root_hash(model_version="echo@1", adapter_digest=b"", tenant_salt=b"salt of t")
    expected = chain_hashes(root, pack_tokens(prompt(8).tolist()), block_size=4)
    assert (first.snapshot, first.stored) == (True, ())
    assert (stored.snapshot, list(stored.stored), stored.removed) == (False, expected, ())
    assert set(replaced.removed) == set(expected)
    assert len(replaced.stored) == 4


def test_a_tenants_block_cap_counts_shared_blocks_once() -> None:
    rig = EngineRig(tenant_limits={"t": TenantLimits(max_blocks=8)})
    rig.add(make_request("a", prompt(18), n=3, max_tokens=4, tenant="t"))
    rig.step(3)

    # Four shared and three own blocks: all three choices run under a cap of eight.
    assert rig.engine.stats(rig.now).running_count == 3
    rig.run()
    assert_engine_empty(rig)


def test_requests_that_differ_only_in_model_version_share_no_hash() -> None:
    roots = {
        KVCacheManager(
            num_blocks=1,
            block_size=4,
            config=dataclasses.replace(EngineConfig(model_version="m@1"), model_version=version),
        ).root_of(adapter_digest=b"", cache_salt=b"s")
        for version in ("m@1", "m@2")
    }
    assert len(roots) == 2
