"""Blocks that the pool gives up: where they go, when they come back, and what is never served."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.engine.kv_blocks import KVLayout, is_intact, sealed
from services.worker.engine.kv_tiers import FETCH_PATIENCE_S, KVTiers, PrefillRate, worth_restoring
from services.worker.engine.request import FinishReason, RequestKey
from tests.helpers.engine import EngineRig, assert_engine_empty, echoes, make_request, make_spec, prompt
from tests.helpers.tiers import FaultyTiers, make_tiers, settle

LAYOUT = KVLayout("uint64", (4,), 8)


def small(tiers: KVTiers) -> EngineRig:
    """Eight blocks of four tokens."""
    return EngineRig(spec=make_spec(num_blocks=8), tiers=tiers)


def say(rig: EngineRig, request_id: str, length: int, *, seed: int = 0, **fields: object) -> int:
    """Run a request alone, to its last token; returns how many prompt tokens were cached."""
    rig.add(make_request(request_id, prompt(length, seed=seed), max_tokens=2, **fields))
    settle(rig.step, lambda: not rig.engine.has_work())
    assert rig.token_ids(request_id) == echoes(request_id, 2)
    assert_engine_empty(rig)
    return rig.outputs[RequestKey(request_id, 0, 1)][0].cached_token_count


def push_out(rig: EngineRig, times: int = 1) -> None:
    """Fill the pool with another prompt, so that what it had cached is given up."""
    for time in range(times):
        say(rig, f"other{rig.now}-{time}", 28, seed=7 + time)


def test_evicted_blocks_come_back_from_host_memory() -> None:
    rig = small(make_tiers(LAYOUT, host_blocks=16))
    assert say(rig, "cold", 24) == 0
    push_out(rig)

    assert say(rig, "warm", 24) == 23

    stats = rig.engine.stats(rig.now).tiers
    assert stats.host_hit_token_total > 0
    assert (stats.disk_hit_token_total, stats.disk_bytes, stats.disk_on) == (0, 0, False)
    assert stats.host_bytes <= 16 * LAYOUT.block_bytes


def test_another_tenant_does_not_see_them() -> None:
    rig = small(make_tiers(LAYOUT, host_blocks=64))
    say(rig, "cold", 24, tenant="a")
    push_out(rig)

    assert say(rig, "foreign", 24, tenant="b") == 0
    push_out(rig)
    assert say(rig, "own", 24, tenant="a") == 23


def test_blocks_on_disk_outlive_the_worker(tmp_path: Path) -> None:
    tiers = make_tiers(LAYOUT, disk_blocks=64, path=tmp_path)
    rig = small(tiers)
    say(rig, "cold", 24)
    push_out(rig)
    tiers.close()

    again = make_tiers(LAYOUT, disk_blocks=64, path=tmp_path)
    rig = small(again)
    cached = say(rig, "warm", 24)
    stats = rig.engine.stats(rig.now).tiers
    again.close()

    assert cached == 23
    assert (stats.disk_hit_token_total, stats.dropped_block_total, stats.disk_on) == (24, 0, True)


@pytest.mark.parametrize("offset", [0, 60, 100, -1])
def test_a_flipped_byte_in_a_file_is_computed_again(tmp_path: Path, offset: int) -> None:
    tiers = make_tiers(LAYOUT, disk_blocks=64, path=tmp_path)
    rig = small(tiers)
    say(rig, "cold", 24)
    push_out(rig)
    tiers.close()
    for file in tmp_path.glob("*.kv"):
        raw = bytearray(file.read_bytes())
        raw[offset] ^= 1
        file.write_bytes(raw)

    again = make_tiers(LAYOUT, disk_blocks=64, path=tmp_path)
    rig = small(again)
    cached = say(rig, "warm", 24)
    stats = rig.engine.stats(rig.now).tiers
    again.close()

    assert cached == 0
    assert (stats.disk_hit_token_total, stats.dropped_block_total > 0) == (0, True)


def test_a_request_waits_for_its_read_and_others_do_not() -> None:
    tiers = FaultyTiers()
    rig = small(tiers)
    say(rig, "cold", 24)
    push_out(rig)
    tiers.in_memory.clear()
    rig.add(make_request("warm", prompt(24), max_tokens=2))
    rig.add(make_request("other", prompt(4, seed=3), max_tokens=4))
    rig.step(4)

    assert rig.token_ids("other") == echoes("other", 4)
    assert rig.token_ids("warm") == []
    assert rig.engine.stats(rig.now).held_block_count == 0
    rig.step(3)
    assert rig.engine.stats(rig.now).steps_without_progress == 0
    tiers.finish_reads()
    rig.run()
    assert rig.token_ids("warm") == echoes("warm", 2)
    assert rig.outputs[RequestKey("warm", 0, 1)][0].cached_token_count > 0
    assert_engine_empty(rig)
    rig.add(make_request("last", prompt(4, seed=5)))
    rig.run()
    assert tiers.fetched == {}


def test_a_read_that_never_ends_is_given_up() -> None:
    tiers = FaultyTiers()
    rig = small(tiers)
    say(rig, "cold", 24)
    push_out(rig)
    tiers.in_memory.clear()
    rig.add(make_request("warm", prompt(24), max_tokens=2))
    rig.step(5)
    assert rig.token_ids("warm") == []

    rig.step(seconds=FETCH_PATIENCE_S)
    rig.run()

    assert rig.token_ids("warm") == echoes("warm", 2)
    assert_engine_empty(rig)
    assert tiers.reading == {}


@pytest.mark.parametrize("ending", ["abort", "deadline"])
def test_a_request_that_ends_during_its_read_leaves_nothing(ending: str) -> None:
    tiers = FaultyTiers()
    rig = small(tiers)
    say(rig, "cold", 24)
    push_out(rig)
    tiers.in_memory.clear()
    deadline = rig.now + 0.01 if ending == "deadline" else None
    rig.add(make_request("warm", prompt(24), max_tokens=2, deadline=deadline))
    rig.step(2)
    assert list(tiers.reading) == [RequestKey("warm", 0, 1)]

    if ending == "abort":
        rig.engine.abort("warm")
    rig.step(seconds=0.02)

    assert rig.finish("warm") is (FinishReason.CANCELLED if ending == "abort" else FinishReason.EXPIRED)
    rig.add(make_request("next", prompt(4, seed=3)))
    rig.run()
    assert tiers.reading == {}
    assert_engine_empty(rig)


def test_a_device_fault_spills_nothing() -> None:
    tiers = FaultyTiers()
    rig = small(tiers)
    say(rig, "cold", 24)
    rig.engine.fail_all("device lost")
    push_out(rig)

    assert tiers.kept == {}


@pytest.mark.parametrize(
    ("seconds", "recompute_s", "count"),
    [
        ([], 1.0, 0),
        ([0.1, 0.1, 0.1], 1.0, 3),
        ([2.0, 2.0], 1.0, 0),
        ([1.0], 1.0, 0),
        ([0.1, 3.0, 0.1], 1.0, 1),
        ([0.1, 1.5, 0.1], 1.0, 3),
        ([1.5, 0.1], 1.0, 2),
    ],
)
def test_blocks_come_back_as_far_as_that_is_cheaper_than_computing(
    seconds: list[float], recompute_s: float, count: int
) -> None:
    assert worth_restoring(seconds, recompute_s=recompute_s) == count


def test_a_tier_slower_than_the_model_is_left_alone() -> None:
    tiers = FaultyTiers()
    rig = small(tiers)
    say(rig, "cold", 24)
    push_out(rig)
    tiers.seconds = 3600.0

    assert say(rig, "warm", 24) == 0
    assert tiers.reading == {}


def test_the_rate_of_a_prefill_is_measured_between_steps_that_follow_each_other() -> None:
    rate = PrefillRate()
    rate.observe(1.0, 0, after_pause=True)
    rate.observe(1.5, 100, after_pause=False)
    assert rate.tokens_per_s == 200.0
    rate.observe(100.0, 200, after_pause=True)
    rate.observe(100.1, 201, after_pause=False)
    assert rate.tokens_per_s == 200.0
    rate.observe(101.1, 301, after_pause=False)
    assert rate.tokens_per_s == pytest.approx(180.0)


def test_a_block_is_intact_only_under_its_own_hash_and_layout() -> None:
    block = sealed(b"h" * 32, bytes(range(32)), LAYOUT)

    assert is_intact(block, LAYOUT)
    assert not is_intact(block._replace(full_hash=b"g" * 32), LAYOUT)
    assert not is_intact(block._replace(payload=bytes(32)), LAYOUT)
    assert not is_intact(block._replace(payload=block.payload[:-1]), LAYOUT)
    assert not is_intact(block, KVLayout("int64", (4,), 8))
    assert not is_intact(block, KVLayout("uint64", (2, 2), 8))
