"""The life of a request in the engine: arrival, chunks, tokens, every way to end, abort in every state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from services.worker.engine.engine_config import (
    DuplicateRequestError,
    InvalidRequestError,
    NeverFitsError,
    TenantLimits,
)
from services.worker.engine.outputs import SchedulerOutput
from services.worker.engine.request import Choice, EngineRequest, FinishReason, RequestKey, SamplingParams
from tests.helpers.engine import (
    EngineRig,
    FakeScript,
    PriorityClass,
    assert_engine_empty,
    echoes,
    make_request,
    make_spec,
    prompt,
    tokens,
)


def test_one_request_gets_its_echo_sequence_and_ends_by_length() -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(10), max_tokens=20))

    rig.run()

    assert rig.token_ids("a") == echoes("a", 20)
    assert rig.finish("a") is FinishReason.LENGTH
    assert_engine_empty(rig)


def test_a_long_prompt_is_computed_in_chunks_and_starts_with_the_first() -> None:
    rig = EngineRig(max_prefill_chunk=16, max_num_batched_tokens=64)
    rig.add(make_request("a", prompt(40), max_tokens=2))

    first = rig.step()
    rig.run()

    assert [(output.started, output.token_ids) for output in first] == [(True, ())]
    assert rig.scheduled_tokens("a")[:4] == [16, 16, 8, 1]
    assert rig.token_ids("a") == echoes("a", 2)
    assert_engine_empty(rig)


def test_strangers_in_one_batch_do_not_change_each_other() -> None:
    rig = EngineRig()
    for index in range(8):
        rig.add(make_request(f"r{index}", prompt(3 + 5 * index, seed=index), max_tokens=3 + index))

    rig.run()

    for index in range(8):
        assert rig.token_ids(f"r{index}") == echoes(f"r{index}", 3 + index)
    assert_engine_empty(rig)


def test_the_step_after_an_abort_computes_nothing_of_it_and_the_runner_forgets_it() -> None:
    rig = EngineRig()
    rig.add(make_request("a", max_tokens=100))
    rig.step(5)

    assert rig.engine.abort("a") == 1

    assert rig.engine.stats(rig.now).held_block_count == 0
    outputs = rig.step()
    assert [(output.finish_reason, output.token_ids) for output in outputs] == [(FinishReason.CANCELLED, ())]
    assert not rig.last.scheduled
    assert rig.last.released == (RequestKey("a", 0, 1),)
    assert_engine_empty(rig)


def waiting(rig: EngineRig) -> None:
    """`a` waits for a slot."""
    rig.add(make_request("b", max_tokens=50))
    rig.step()
    rig.add(make_request("a", prompt(20), max_tokens=50))
    rig.step()
    assert rig.engine.stats(rig.now).waiting_count == 1


def prefilling(rig: EngineRig) -> None:
    """`a` is between two chunks."""
    rig.add(make_request("a", prompt(40), max_tokens=50))
    rig.step()
    assert rig.scheduled_tokens("a") == [16]


def decoding(rig: EngineRig) -> None:
    """`a` has tokens."""
    rig.add(make_request("a", max_tokens=50))
    rig.step(4)
    assert len(rig.token_ids("a")) == 4


def preempted(rig: EngineRig) -> None:
    """`a` was running and lost its slot to a better class."""
    rig.add(make_request("a", max_tokens=50, priority_class=PriorityClass.BATCH))
    rig.step(3)
    rig.add(make_request("b", prompt(8, seed=1), max_tokens=50))
    rig.step()
    assert rig.engine.stats(rig.now).preemption_total == 1


def fresh(rig: EngineRig) -> None:
    """`a` has just been added."""
    rig.add(make_request("a", max_tokens=50))


def ended(rig: EngineRig) -> None:
    """`a` is done."""
    rig.add(make_request("a", max_tokens=1))
    rig.run()


@pytest.mark.parametrize("state", [fresh, waiting, prefilling, decoding, preempted, ended])
@pytest.mark.parametrize("way", [FinishReason.CANCELLED, FinishReason.EXPIRED])
def test_abort_and_expiry_free_everything_in_every_state(
    state: Callable[[EngineRig], None], way: FinishReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = EngineRig(max_num_seqs=1)
    add = rig.add

    def add_with_deadline(request: EngineRequest) -> EngineRequest:
        return add(dataclasses.replace(request, deadline=10.0) if request.request_id == "a" else request)

    monkeypatch.setattr(rig, "add", add_with_deadline)
    state(rig)
    computed = rig.computed_tokens("a")

    if way is FinishReason.CANCELLED:
        assert rig.engine.abort("a") == (0 if state is ended else 1)
    else:
        rig.now = 10.0
    rig.step()

    assert rig.finish("a") is (FinishReason.LENGTH if state is ended else way)
    assert rig.computed_tokens("a") == computed
    rig.engine.abort("b")
    rig.run()
    assert_engine_empty(rig)


def test_abort_names_epoch_and_choice() -> None:
    rig = EngineRig()
    rig.add(make_request("a", n=3, max_tokens=30))
    rig.add(make_request("a", n=1, max_tokens=30, epoch=2))
    rig.step(4)

    assert rig.engine.abort("a", epoch=1, choice=1) == 1
    assert rig.engine.abort("a", epoch=3) == 0
    assert rig.engine.abort("nobody") == 0
    assert rig.engine.abort("a", epoch=2) == 1
    rig.run()

    ends = {(choice, epoch): rig.finish("a", choice=choice, epoch=epoch) for choice, epoch in [(0, 1), (1, 1), (0, 2)]}
    assert ends == {
        (0, 1): FinishReason.LENGTH,
        (1, 1): FinishReason.CANCELLED,
        (0, 2): FinishReason.CANCELLED,
    }
    assert_engine_empty(rig)


def test_all_choices_of_an_aborted_request_stop_and_free_their_shared_blocks() -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(10), n=4, max_tokens=50))
    rig.step(5)

    assert rig.engine.abort("a") == 4

    rig.step()
    assert [rig.finish("a", choice=choice) for choice in range(4)] == [FinishReason.CANCELLED] * 4
    assert_engine_empty(rig)


def test_an_abort_from_within_a_step_takes_effect_without_harm() -> None:
    rigs: list[EngineRig] = []

    def abort_midway(decision: SchedulerOutput) -> None:
        if decision.step == 3:
            rigs[0].engine.abort("a")

    rig = EngineRig(script=FakeScript(before_step=abort_midway))
    rigs.append(rig)
    rig.add(make_request("a", max_tokens=20))
    rig.add(make_request("b", prompt(9, seed=1), max_tokens=20))
    rig.run()

    assert rig.finish("a") is FinishReason.CANCELLED
    assert rig.token_ids("a") == echoes("a", 2)
    assert rig.token_ids("b") == echoes("b", 20)
    assert_engine_empty(rig)


def test_work_that_expired_while_waiting_never_starts() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.add(make_request("a", max_tokens=10))
    rig.step()
    rig.add(make_request("late", deadline=rig.now + 0.002))
    rig.run()

    assert rig.finish("late") is FinishReason.EXPIRED
    assert rig.computed_tokens("late") == 0
    assert not any(output.started for output in rig.outputs[RequestKey("late", 0, 1)])
    assert_engine_empty(rig)


def test_the_fault_of_one_row_ends_that_choice_alone() -> None:
    bad = RequestKey("bad", 1, 1)
    rig = EngineRig(script=FakeScript(row_error=lambda key, index: "boom" if (key, index) == (bad, 3) else None))
    rig.add(make_request("bad", n=2, max_tokens=10))
    rig.add(make_request("canary", prompt(9, seed=1), max_tokens=10))
    rig.run()

    assert rig.finish("bad", choice=1) is FinishReason.ERROR
    assert rig.outputs[bad][-1].error == "boom"
    assert rig.token_ids("bad", choice=1) == echoes("bad", 3, choice=1)
    assert rig.token_ids("bad", choice=0) == echoes("bad", 10, choice=0)
    assert rig.token_ids("canary") == echoes("canary", 10)
    assert_engine_empty(rig)


def test_a_fault_of_the_device_reaches_the_caller_and_fail_all_ends_everything() -> None:
    def break_at_step_3(decision: SchedulerOutput) -> None:
        if decision.step == 3:
            raise RuntimeError("device lost")

    rig = EngineRig(script=FakeScript(before_step=break_at_step_3), max_num_seqs=2)
    for index in range(3):
        rig.add(make_request(f"r{index}", prompt(8, seed=index), max_tokens=10))
    rig.step(2)

    with pytest.raises(RuntimeError, match="device lost"):
        rig.engine.step(rig.now)
    with pytest.raises(RuntimeError, match="fail_all"):
        rig.engine.step(rig.now)
    outputs = rig.engine.fail_all("the device failed")

    assert sorted(output.key.request_id for output in outputs) == ["r0", "r1", "r2"]
    assert {(output.finish_reason, output.error) for output in outputs} == {(FinishReason.ERROR, "the device failed")}
    stats = rig.engine.stats(rig.now)
    assert (stats.held_block_count, stats.cached_block_count, stats.running_count) == (0, 0, 0)


def test_after_fail_all_the_engine_serves_again() -> None:
    def break_at_step_3(decision: SchedulerOutput) -> None:
        if decision.step == 3:
            raise RuntimeError("device lost")

    rig = EngineRig(script=FakeScript(before_step=break_at_step_3))
    rig.add(make_request("a", max_tokens=10))
    rig.step(2)
    with pytest.raises(RuntimeError, match="device lost"):
        rig.engine.step(rig.now)
    rig.engine.fail_all("the device failed")
    rig.outputs.clear()

    rig.add(make_request("b", max_tokens=5))
    rig.run()

    assert rig.token_ids("b") == echoes("b", 5)
    assert_engine_empty(rig)


def test_a_received_prefix_is_continued_at_its_index() -> None:
    rig = EngineRig()
    received = tokens(*echoes("a", 7))
    rig.add(make_request("a", prompt(10), max_tokens=12, choices=(Choice(0, received),), epoch=5))

    rig.run()

    assert rig.outputs[RequestKey("a", 0, 5)][0].first_index == 7
    assert rig.token_ids("a", epoch=5) == echoes("a", 12)[7:]
    assert rig.last.released == (RequestKey("a", 0, 5),)
    assert_engine_empty(rig)


def test_choices_resume_each_from_its_own_prefix_and_finished_ones_are_left_out() -> None:
    rig = EngineRig()
    choices = (Choice(0, tokens(*echoes("a", 3))), Choice(2, tokens(*echoes("a", 9, choice=2))))
    rig.add(make_request("a", prompt(10), max_tokens=12, choices=choices))

    rig.run()

    assert rig.token_ids("a", choice=0) == echoes("a", 12)[3:]
    assert rig.token_ids("a", choice=2) == echoes("a", 12, choice=2)[9:]
    assert RequestKey("a", 1, 1) not in rig.outputs
    assert_engine_empty(rig)


def test_a_prefix_that_was_already_complete_ends_at_once() -> None:
    rig = EngineRig(spec=make_spec(eos_token_ids=[5]))
    full, stopped = tokens(*echoes("a", 4)), tokens(1, 5)
    rig.add(make_request("a", max_tokens=4, choices=(Choice(0, full), Choice(1, stopped))))

    rig.run()

    assert rig.finish("a", choice=0) is FinishReason.LENGTH
    assert rig.finish("a", choice=1) is FinishReason.STOP
    assert rig.outputs[RequestKey("a", 1, 1)][0].stop_token_id == 5
    assert rig.token_ids("a") == []
    assert_engine_empty(rig)


@pytest.mark.parametrize(("total", "fits"), [(63, True), (64, True), (65, False)])
def test_prompt_and_output_may_fill_the_context_and_not_one_token_more(total: int, fits: bool) -> None:
    rig = EngineRig(spec=make_spec(max_model_len=64))
    request = make_request("a", prompt(40), max_tokens=total - 40)

    if not fits:
        with pytest.raises(NeverFitsError, match="needs 65 tokens of context, at most 64") as refusal:
            rig.add(request)
        assert (refusal.value.unit, refusal.value.required, refusal.value.limit) == ("tokens of context", 65, 64)
    else:
        rig.add(request)
        rig.run()
        assert rig.token_ids("a") == echoes("a", total - 40)
    assert_engine_empty(rig)


@pytest.mark.parametrize(("total", "fits"), [(32, True), (33, True), (34, False)])
def test_a_request_may_need_every_block_of_the_pool_and_not_one_more(total: int, fits: bool) -> None:
    """The newest token is never computed, so 33 tokens end in 8 blocks of 4."""
    rig = EngineRig(spec=make_spec(num_blocks=8))
    request = make_request("a", prompt(20), max_tokens=total - 20)

    if not fits:
        with pytest.raises(NeverFitsError, match="needs 9 blocks, at most 8"):
            rig.add(request)
    else:
        rig.add(request)
        rig.run()
        assert rig.token_ids("a") == echoes("a", total - 20)
    assert_engine_empty(rig)


def test_what_a_tenants_cap_can_never_hold_is_refused_and_harms_nobody() -> None:
    rig = EngineRig(tenant_limits={"small": TenantLimits(max_blocks=3), "shut": TenantLimits(max_slots=0)})
    rig.add(make_request("other", tenant="other", max_tokens=10))

    with pytest.raises(NeverFitsError, match="needs 4 blocks, at most 3"):
        rig.add(make_request("a", prompt(8), max_tokens=6, tenant="small"))
    with pytest.raises(NeverFitsError, match="slots"):
        rig.add(make_request("b", tenant="shut"))
    rig.run()

    assert rig.token_ids("other") == echoes("other", 10)
    assert_engine_empty(rig)


GOOD = make_request("a", max_tokens=4)
MALFORMED = {
    "request_id": dataclasses.replace(GOOD, request_id=""),
    "prompt_token_ids": dataclasses.replace(GOOD, prompt_token_ids=tokens()),
    "prompt_token_ids must be inside": dataclasses.replace(GOOD, prompt_token_ids=tokens(1, 1000)),
    "prompt_token_ids must be inside the": dataclasses.replace(GOOD, prompt_token_ids=tokens(-1)),
    "int32": dataclasses.replace(GOOD, prompt_token_ids=tokens(1, 2).reshape(1, 2)),
    "choices": dataclasses.replace(GOOD, choices=()),
    "choices must": dataclasses.replace(GOOD, choices=(Choice(1), Choice(1))),
    "choices must be": dataclasses.replace(GOOD, choices=(Choice(-1),)),
    "weight": dataclasses.replace(GOOD, weight=0.0),
    "weight must": dataclasses.replace(GOOD, weight=float("nan")),
    "max_tokens": dataclasses.replace(GOOD, sampling=SamplingParams(max_tokens=0, seed=1)),
    "min_tokens": dataclasses.replace(GOOD, sampling=SamplingParams(max_tokens=4, min_tokens=5, seed=1)),
    "seed": dataclasses.replace(GOOD, sampling=SamplingParams(max_tokens=4, seed=2**64)),
    "stop_token_ids": dataclasses.replace(GOOD, sampling=SamplingParams(max_tokens=4, seed=1, stop_token_ids=(1000,))),
    "stop_token_ids must": dataclasses.replace(
        GOOD, sampling=SamplingParams(max_tokens=4, seed=1, min_tokens=1, stop_token_ids=(-1,))
    ),
    "deadline": dataclasses.replace(GOOD, deadline=float("nan")),
    "output_token_ids": dataclasses.replace(GOOD, choices=(Choice(0, tokens(1, 2, 3, 4, 5)),)),
    "output_token_ids must be inside": dataclasses.replace(GOOD, choices=(Choice(0, tokens(5000)),)),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_a_malformed_request_is_refused_by_name_and_changes_nothing(message: str) -> None:
    rig = EngineRig()
    rig.add(make_request("canary", max_tokens=6))
    rig.step(2)

    with pytest.raises(InvalidRequestError, match=message):
        rig.add(MALFORMED[message])
    rig.run()

    assert rig.token_ids("canary") == echoes("canary", 6)
    assert_engine_empty(rig)


def test_the_same_request_and_epoch_is_refused_while_it_is_in_hand_only() -> None:
    rig = EngineRig()
    rig.add(make_request("a", max_tokens=5))
    rig.step()

    with pytest.raises(DuplicateRequestError):
        rig.add(make_request("a", max_tokens=5))
    rig.add(make_request("a", max_tokens=5, epoch=2))
    rig.run()

    assert rig.token_ids("a", epoch=1) == rig.token_ids("a", epoch=2) == echoes("a", 5)
    assert_engine_empty(rig)


def test_counters_tell_prefill_from_decode_and_gauges_return_to_zero() -> None:
    rig = EngineRig()
    rig.add(make_request("a", prompt(40), max_tokens=5))
    rig.step()

    middle = rig.engine.stats(rig.now)
    rig.run()
    end = rig.engine.stats(rig.now)

    assert (middle.running_count, middle.scheduled_token_count, middle.backlog_token_count) == (1, 16, 24)
    assert middle.free_block_count + middle.cached_block_count + middle.held_block_count == middle.total_block_count
    assert (end.prefill_token_total, end.decode_token_total) == (40, 4)
    assert_engine_empty(rig)


def test_steps_without_progress_are_counted_while_there_is_work_only() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.add(make_request("a", max_tokens=3))
    rig.step(2, seconds=0.5)
    busy = rig.engine.stats(rig.now + 4.0)
    rig.run()
    idle = rig.engine.stats(rig.now + 60.0)

    assert (busy.steps_without_progress, busy.seconds_without_progress) == (0, 4.0)
    assert (idle.steps_without_progress, idle.seconds_without_progress) == (0, 0.0)
