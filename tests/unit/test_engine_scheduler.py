"""Who runs when: budget, chunks, fairness, classes, caps, preemption, and that nothing gets stuck."""

from __future__ import annotations

import pytest

from services.worker.engine.engine import Engine
from services.worker.engine.engine_config import EngineConfig, NeverFitsError, TenantLimits
from services.worker.engine.fake_model_runner import FakeModelRunner
from services.worker.engine.request import FinishReason, Request, RequestGroup, RequestKey, SamplingParams
from services.worker.engine.request_queue import RequestQueue
from tests.helpers.engine import (
    EngineRig,
    PriorityClass,
    assert_engine_empty,
    echoes,
    make_request,
    make_spec,
    prompt,
)

BATCH = PriorityClass.BATCH


def first_token_step(rig: EngineRig, request_id: str) -> int:
    """The number of the step, from 1, that gave the first token of choice 0."""
    for number, decision in enumerate(rig.runner.decisions, start=1):
        if any(row.key.request_id == request_id and row.samples for row in decision.scheduled):
            return number
    raise AssertionError(f"{request_id} got no token")


def order_of_first_tokens(rig: EngineRig) -> list[str]:
    seen: list[str] = []
    for decision in rig.runner.decisions:
        for row in decision.scheduled:
            if row.samples and row.key.request_id not in seen:
                seen.append(row.key.request_id)
    return seen


@pytest.mark.parametrize("budget", [8, 9, 17, 64])
@pytest.mark.parametrize("chunk", [1, 3, 16, 1000])
def test_no_step_exceeds_the_budget_and_chunking_changes_no_token(budget: int, chunk: int) -> None:
    rig = EngineRig(max_num_batched_tokens=budget, max_prefill_chunk=chunk)
    for index in range(6):
        rig.add(make_request(f"r{index}", prompt(5 + 7 * index, seed=index), max_tokens=6))
    rig.run()

    assert max(decision.num_tokens for decision in rig.runner.decisions) <= budget
    for index in range(6):
        assert rig.token_ids(f"r{index}") == echoes(f"r{index}", 6)
    assert_engine_empty(rig)


def test_running_decodes_go_on_in_every_step_of_a_long_prefill() -> None:
    rig = EngineRig(max_num_batched_tokens=16, max_prefill_chunk=8)
    rig.add(make_request("decoding", max_tokens=40))
    rig.step(2)
    rig.add(make_request("long", prompt(100, seed=1), max_tokens=2))
    rig.step(12)

    assert rig.scheduled_tokens("decoding")[2:] == [1] * 12
    assert sum(rig.scheduled_tokens("long")) >= 12 * 7
    rig.run()
    assert_engine_empty(rig)


@pytest.mark.parametrize("longs", [1, 3])
def test_a_short_request_waits_for_at_most_one_chunk_of_long_prefills(longs: int) -> None:
    rig = EngineRig(max_num_batched_tokens=32, max_prefill_chunk=16, spec=make_spec(num_blocks=400))
    for index in range(longs):
        rig.add(make_request(f"long{index}", prompt(300, seed=index + 1), max_tokens=2, tenant=f"t{index}"))
    rig.step(3)
    rig.add(make_request("short", prompt(8), max_tokens=2, tenant="s"))
    rig.step()

    assert rig.token_ids("short") == echoes("short", 1)
    rig.run()
    assert_engine_empty(rig)


def test_long_prefills_of_two_tenants_take_turns() -> None:
    rig = EngineRig(max_num_batched_tokens=32, max_prefill_chunk=16, spec=make_spec(num_blocks=400))
    rig.add(make_request("a", prompt(160, seed=1), max_tokens=2, tenant="a"))
    rig.step()
    rig.add(make_request("b", prompt(160, seed=2), max_tokens=2, tenant="b"))
    rig.step(8)

    computed = {request_id: rig.computed_tokens(request_id) for request_id in "ab"}
    assert abs(computed["a"] - computed["b"]) <= 32
    rig.run()
    assert_engine_empty(rig)


def test_a_request_that_needs_more_blocks_than_exist_is_refused_and_blocks_nobody() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=8, max_model_len=100))

    with pytest.raises(NeverFitsError):
        rig.add(make_request("huge", prompt(50), max_tokens=30))
    rig.add(make_request("a", max_tokens=5))
    rig.run()

    assert rig.token_ids("a") == echoes("a", 5)
    assert_engine_empty(rig)


def test_two_requests_that_each_hold_half_of_the_pool_both_finish() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=8))
    for index in range(2):
        rig.add(make_request(f"r{index}", prompt(9, seed=index), max_tokens=20))
    rig.run(limit=80)

    assert rig.token_ids("r0") == echoes("r0", 20)
    assert rig.token_ids("r1") == echoes("r1", 20)
    assert rig.engine.stats(rig.now).preemption_total >= 1
    assert_engine_empty(rig)


def test_a_preempted_request_comes_back_only_when_all_it_knows_fits() -> None:
    """Resuming on part of the blocks would be undone by the next step, for ever."""
    rig = EngineRig(spec=make_spec(num_blocks=8))
    for index in range(3):
        rig.add(make_request(f"r{index}", prompt(9, seed=index), max_tokens=22))
    rig.run(limit=200)

    stats = rig.engine.stats(rig.now)
    assert 1 <= stats.preemption_total <= 4
    for decision in rig.runner.decisions:
        for new in decision.new_requests:
            known = len(new.prompt_token_ids) + len(new.output_token_ids)
            tables = [row.block_table for row in decision.scheduled if row.key == new.key]
            assert all(len(table) * 4 >= known for table in tables)
    for index in range(3):
        assert rig.token_ids(f"r{index}") == echoes(f"r{index}", 22)
    assert_engine_empty(rig)


def test_three_preemptions_in_prefill_and_decode_change_no_token_and_repeat_none() -> None:
    rig = EngineRig(max_num_seqs=1, max_prefill_chunk=8, aging_seconds=1e9)
    rig.add(make_request("victim", prompt(30), max_tokens=12, priority_class=BATCH))
    for index, steps in enumerate([2, 8, 5]):
        rig.step(steps)
        rig.add(make_request(f"urgent{index}", prompt(5, seed=index + 1), max_tokens=2))
    rig.run()

    assert rig.engine.stats(rig.now).preemption_total == 3
    assert rig.token_ids("victim") == echoes("victim", 12)
    assert_engine_empty(rig)


def test_a_preempted_request_is_introduced_again_with_what_it_has_said() -> None:
    rig = EngineRig(max_num_seqs=1, aging_seconds=1e9)
    rig.add(make_request("victim", prompt(6), max_tokens=12, priority_class=BATCH))
    rig.step(4)
    rig.add(make_request("urgent", prompt(5, seed=1), max_tokens=1))
    rig.step()
    assert RequestKey("victim", 0, 1) in rig.last.released
    rig.step()

    (new,) = rig.last.new_requests
    assert new.prompt_token_ids.tolist() == prompt(6).tolist()
    assert new.output_token_ids.tolist() == echoes("victim", 4)
    rig.run()
    assert_engine_empty(rig)


def test_interactive_takes_the_slots_of_the_latest_batch_requests_at_once() -> None:
    rig = EngineRig(max_num_seqs=4)
    for index in range(4):
        rig.add(make_request(f"batch{index}", prompt(8, seed=index), max_tokens=30, priority_class=BATCH))
    rig.step(3)
    rig.add(make_request("urgent", prompt(8, seed=9), max_tokens=3))
    rig.step()

    assert rig.token_ids("urgent") == echoes("urgent", 1)
    assert rig.scheduled_tokens("batch3")[-1] == 0
    assert [rig.scheduled_tokens(f"batch{index}")[-1] for index in range(3)] == [1, 1, 1]
    rig.run()
    for index in range(4):
        assert rig.token_ids(f"batch{index}") == echoes(f"batch{index}", 30)
    assert_engine_empty(rig)


def test_interactive_takes_the_blocks_of_batch_requests() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=8))
    rig.add(make_request("batch", prompt(20), max_tokens=8, priority_class=BATCH))
    rig.step(2)
    rig.add(make_request("urgent", prompt(20, seed=1), max_tokens=8))
    rig.run()

    assert first_token_step(rig, "urgent") <= 5
    assert rig.token_ids("batch") == echoes("batch", 8)
    assert_engine_empty(rig)


def test_interactive_does_not_preempt_interactive() -> None:
    rig = EngineRig(max_num_seqs=2)
    for index in range(4):
        rig.add(make_request(f"r{index}", prompt(8, seed=index), max_tokens=10))
    rig.run()

    assert rig.engine.stats(rig.now).preemption_total == 0
    assert order_of_first_tokens(rig) == ["r0", "r1", "r2", "r3"]
    assert_engine_empty(rig)


def test_batch_work_ages_into_interactive_and_is_not_starved() -> None:
    rig = EngineRig(max_num_seqs=1, aging_seconds=0.05)
    rig.add(make_request("batch", prompt(8, seed=99), max_tokens=3, tenant="b", priority_class=BATCH))
    for index in range(200):
        rig.add(make_request(f"r{index}", prompt(8, seed=index), max_tokens=3, tenant="i"))
    rig.run()

    # 50 steps of a millisecond, and then the one that is running.
    assert first_token_step(rig, "batch") <= 50 + 3 + 1
    assert_engine_empty(rig)


def test_an_aged_backlog_of_batch_work_does_not_bury_interactive_work() -> None:
    rig = EngineRig(max_num_seqs=1, aging_seconds=0.01)
    for index in range(50):
        rig.add(make_request(f"batch{index}", prompt(8, seed=index), max_tokens=5, priority_class=BATCH))
    rig.step(40)
    rig.add(make_request("urgent", prompt(8, seed=99), max_tokens=2))
    before = len(rig.runner.decisions)
    rig.run()

    # At most the aged one that runs and the next to have aged go before it.
    assert first_token_step(rig, "urgent") - before <= 11
    assert_engine_empty(rig)


def test_a_flooding_tenant_does_not_delay_another_ones_request() -> None:
    rig = EngineRig(max_num_seqs=2)
    for index in range(50):
        rig.add(make_request(f"flood{index}", prompt(8, seed=index), max_tokens=10, tenant="flood"))
    rig.step(5)
    rig.add(make_request("one", prompt(8, seed=99), max_tokens=10, tenant="calm"))
    before = len(rig.runner.decisions)
    rig.run()

    # The next slot that falls free is for the tenant that has had less.
    assert first_token_step(rig, "one") - before <= 10
    assert_engine_empty(rig)


def test_tenants_share_by_weight() -> None:
    rig = EngineRig(max_num_seqs=1)
    for index in range(40):
        rig.add(make_request(f"heavy{index}", prompt(8, seed=index), max_tokens=4, tenant="heavy", weight=3.0))
        rig.add(make_request(f"light{index}", prompt(8, seed=100 + index), max_tokens=4, tenant="light", weight=1.0))
    rig.step(4 * 40)

    heavy = sum(rig.computed_tokens(f"heavy{index}") for index in range(40))
    light = sum(rig.computed_tokens(f"light{index}") for index in range(40))
    assert 2.5 <= heavy / light <= 3.5
    rig.run()
    assert_engine_empty(rig)


def test_a_tenant_that_was_away_saves_up_no_credit() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.add(make_request("early", tenant="back", max_tokens=1))
    rig.run()
    for index in range(20):
        rig.add(make_request(f"steady{index}", prompt(8, seed=index), max_tokens=8, tenant="steady"))
    rig.step(80)
    for index in range(10):
        rig.add(make_request(f"back{index}", prompt(8, seed=50 + index), max_tokens=8, tenant="back"))
    rig.run()

    # From its return on the two alternate: its fifth is not before the other's tenth.
    order = [request_id for request_id in order_of_first_tokens(rig) if request_id.startswith(("steady", "back"))]
    assert order.index("back5") > order.index("steady13")
    assert_engine_empty(rig)


def test_a_cached_prompt_costs_its_tenant_little() -> None:
    rig = EngineRig(max_num_seqs=1, max_prefill_chunk=64, spec=make_spec(num_blocks=200))
    rig.add(make_request("warm", prompt(60), tenant="cached", max_tokens=1))
    rig.run()
    for index in range(12):
        rig.add(make_request(f"cached{index}", prompt(60), tenant="cached", max_tokens=2))
        rig.add(make_request(f"cold{index}", prompt(60, seed=index + 1), tenant="cold", max_tokens=2))
    rig.run()

    order = order_of_first_tokens(rig)
    assert order.index("cached11") < order.index("cold2")
    assert_engine_empty(rig)


def test_a_blocked_big_request_lets_small_ones_pass_for_a_while_and_then_holds_the_door() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=16), max_bypass_count=5, max_num_seqs=4)
    rig.add(make_request("running", prompt(8, seed=98), max_tokens=24))
    rig.step()
    rig.add(make_request("big", prompt(56, seed=99), max_tokens=4))
    for index in range(40):
        rig.add(make_request(f"small{index}", prompt(8, seed=index), max_tokens=4))
    rig.run()

    order = order_of_first_tokens(rig)
    position = order.index("big")
    assert 3 <= position <= 8
    assert_engine_empty(rig)


def test_a_tenants_slot_cap_holds_and_does_not_block_others() -> None:
    rig = EngineRig(tenant_limits={"capped": TenantLimits(max_slots=1)})
    for index in range(3):
        rig.add(make_request(f"capped{index}", prompt(8, seed=index), max_tokens=5, tenant="capped"))
    rig.add(make_request("other", prompt(8, seed=9), max_tokens=5, tenant="other"))
    rig.step()

    running = {row.key.request_id for row in rig.last.scheduled}
    assert running == {"capped0", "other"}
    rig.run()
    assert order_of_first_tokens(rig) == ["capped0", "other", "capped1", "capped2"]
    assert_engine_empty(rig)


def test_a_tenants_block_cap_preempts_that_tenant_only() -> None:
    rig = EngineRig(tenant_limits={"capped": TenantLimits(max_blocks=8)})
    for index in range(2):
        rig.add(make_request(f"capped{index}", prompt(13, seed=index), max_tokens=16, tenant="capped"))
    rig.add(make_request("other", prompt(13, seed=9), max_tokens=16, tenant="other"))
    rig.run()

    assert rig.engine.stats(rig.now).preemption_total >= 1
    others = [new.key.request_id for decision in rig.runner.decisions for new in decision.new_requests]
    assert others.count("other") == 1
    for request_id in ("capped0", "capped1", "other"):
        assert rig.token_ids(request_id) == echoes(request_id, 16)
    assert_engine_empty(rig)


def test_reserved_slots_and_blocks_are_there_for_their_tenant_at_any_load() -> None:
    rig = EngineRig(
        max_num_seqs=3,
        spec=make_spec(num_blocks=16),
        tenant_limits={"vip": TenantLimits(reserved_slots=1, reserved_blocks=6)},
    )
    for index in range(6):
        rig.add(make_request(f"r{index}", prompt(12, seed=index), max_tokens=8, tenant="crowd"))
    rig.step(3)
    assert rig.engine.stats(rig.now).running_count == 2
    rig.add(make_request("vip", prompt(16, seed=9), max_tokens=8, tenant="vip"))
    rig.step()

    assert rig.token_ids("vip") == echoes("vip", 1)
    rig.run()
    for index in range(6):
        assert rig.token_ids(f"r{index}") == echoes(f"r{index}", 8)
    assert_engine_empty(rig)


def test_what_others_have_reserved_can_never_be_asked_for() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=10), tenant_limits={"vip": TenantLimits(reserved_blocks=4)})

    with pytest.raises(NeverFitsError, match="needs 7 blocks, at most 6"):
        rig.add(make_request("a", prompt(20), max_tokens=6, tenant="crowd"))
    rig.add(make_request("vip", prompt(20), max_tokens=6, tenant="vip"))
    rig.run()
    assert_engine_empty(rig)


def test_a_growing_request_preempts_the_latest_of_the_worst_class() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=9))
    rig.add(make_request("old", prompt(8, seed=0), max_tokens=20, priority_class=BATCH))
    rig.add(make_request("young", prompt(8, seed=1), max_tokens=20, priority_class=BATCH))
    rig.add(make_request("urgent", prompt(8, seed=2), max_tokens=20))
    rig.run()

    assert rig.engine.stats(rig.now).preemption_total >= 1
    assert next(key.request_id for decision in rig.runner.decisions for key in decision.released) == "young"
    introduced = [new.key.request_id for decision in rig.runner.decisions for new in decision.new_requests]
    assert introduced.count("urgent") == 1
    for request_id in ("old", "young", "urgent"):
        assert rig.token_ids(request_id) == echoes(request_id, 20)
    assert_engine_empty(rig)


def test_the_time_of_a_step_does_not_follow_the_queue() -> None:
    """Only so many waiting requests are looked at in vain, however many there are."""
    rig = EngineRig(spec=make_spec(num_blocks=8))
    rig.add(make_request("running", prompt(24), max_tokens=8))
    rig.step()
    looked_at: list[str] = []
    match = rig.engine._scheduler.kv.match
    rig.engine._scheduler.kv.match = lambda request: looked_at.append(request.key.request_id) or match(request)  # type: ignore
    for index in range(500):
        rig.add(make_request(f"r{index}", prompt(16, seed=index + 1), max_tokens=1))
    rig.step()

    assert 0 < len(looked_at) <= 64
    rig.run()
    assert_engine_empty(rig)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "max_num_batched_tokens"),
        ({"max_prefill_chunk": 0}, "max_prefill_chunk"),
        ({"aging_seconds": float("nan")}, "aging_seconds"),
        ({"tenant_limits": {"a": TenantLimits(reserved_blocks=64)}}, "reserved_blocks"),
        ({"tenant_limits": {"a": TenantLimits(reserved_slots=8)}, "max_num_seqs": 8}, "reserved_slots"),
        ({"default_limits": TenantLimits(reserved_slots=1)}, "default_limits"),
        ({"max_draft_count": -1}, "max_draft_count"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(FakeModelRunner(make_spec()), EngineConfig(model_version="m", **settings))  # type: ignore[arg-type]


def test_a_schedule_is_replayed_exactly_by_the_same_arrivals() -> None:
    def play() -> list[object]:
        rig = EngineRig(spec=make_spec(num_blocks=12), max_num_seqs=3)
        for index in range(10):
            rig.add(
                make_request(
                    f"r{index}",
                    prompt(4 + 3 * index, seed=index % 3),
                    max_tokens=4,
                    tenant=f"t{index % 2}",
                    priority_class=PriorityClass(index % 2),
                )
            )
            rig.step(2)
        rig.run()
        return [
            [(row.key, row.start, row.token_ids.tolist(), row.block_table) for row in decision.scheduled]
            for decision in rig.runner.decisions
        ]

    assert play() == play()


def test_an_earlier_decision_stays_as_it_was_while_the_requests_go_on() -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(4), max_tokens=6))
    rig.add(make_request("b", prompt(5, seed=1), max_tokens=6))
    rig.step(2)

    def seen() -> list[tuple[int, list[int], tuple[int, ...]]]:
        return [(row.start, row.token_ids.tolist(), row.block_table) for row in early.scheduled]

    early = rig.last
    before = seen()
    rig.run()

    assert list(early.decode_keys) == [row.key for row in early.scheduled]
    assert [row[0] for row in before] == [4, 5]
    assert seen() == before


def test_the_end_by_length_wins_nothing_over_the_deadline_of_a_later_step() -> None:
    rig = EngineRig()
    rig.add(make_request("a", sampling=SamplingParams(max_tokens=2, seed=1), deadline=0.0025))
    rig.step(2)

    assert rig.finish("a") is FinishReason.LENGTH
    rig.step()
    assert_engine_empty(rig)


def test_batch_work_does_not_take_the_blocks_that_interactive_work_waits_for() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=8))
    rig.add(make_request("running", prompt(18), max_tokens=3))
    rig.step()
    rig.add(make_request("big", prompt(20, seed=1), max_tokens=2))
    rig.add(make_request("small", prompt(2, seed=2), max_tokens=2, priority_class=BATCH))
    rig.step()

    assert rig.scheduled_tokens("small") == [0, 0]
    rig.run()
    introduced = [new.key.request_id for decision in rig.runner.decisions for new in decision.new_requests]
    assert introduced == ["running", "big", "small"]
    assert_engine_empty(rig)


def test_a_chunk_as_large_as_the_budget_still_leaves_half_of_it_to_those_who_wait() -> None:
    rig = EngineRig(max_num_batched_tokens=16, max_prefill_chunk=16)
    rig.add(make_request("long", prompt(100, seed=1), max_tokens=2, tenant="a"))
    rig.step()
    rig.add(make_request("short", prompt(8), max_tokens=2, tenant="b"))
    rig.step()

    assert rig.scheduled_tokens("long") == [16, 8]
    assert rig.token_ids("short") == echoes("short", 1)
    rig.run()
    assert_engine_empty(rig)


def test_who_stays_within_its_reservation_is_not_preempted_for_others() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=9), tenant_limits={"vip": TenantLimits(reserved_blocks=4)})
    for index in range(2):
        rig.add(make_request(f"crowd{index}", prompt(5, seed=index), max_tokens=12, tenant="crowd"))
    rig.add(make_request("vip", prompt(5, seed=9), max_tokens=9, tenant="vip", priority_class=BATCH))
    rig.run()

    assert rig.engine.stats(rig.now).preemption_total >= 1
    introduced = [new.key.request_id for decision in rig.runner.decisions for new in decision.new_requests]
    assert introduced.count("vip") == 1
    for request_id, count in (("crowd0", 12), ("crowd1", 12), ("vip", 9)):
        assert rig.token_ids(request_id) == echoes(request_id, count)
    assert_engine_empty(rig)


def test_computing_a_prompt_again_after_a_preemption_is_not_charged_again() -> None:
    queue = RequestQueue()
    source = make_request("a", prompt(20), tenant="t")
    request = Request(
        RequestGroup(source, root=None), source.choices[0], sequence=1, arrival=0.0, eos_token_ids=frozenset()
    )
    queue.enter(request)
    charged = []
    for start, size in ((0, 8), (8, 12), (0, 8), (8, 12)):
        request.num_computed_tokens = start
        queue.charge_chunk(request, size)
        charged.append(queue.fair_order(request)[1])

    assert charged == [8.0, 20.0, 20.0, 20.0]
