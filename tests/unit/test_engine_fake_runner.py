"""The echo runner: pure in what it says, strict in what it reads, and broken exactly as told."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.engine.fake_model_runner import FakeModelRunner, FakeScript, echo_token
from services.worker.engine.outputs import NewRequest, ScheduledRequest, SchedulerOutput
from services.worker.engine.request import RequestKey, SamplingParams
from tests.helpers.engine import EngineRig, assert_engine_empty, echoes, make_request, make_spec, prompt, tokens

A, B = RequestKey("a", 0, 1), RequestKey("b", 0, 1)
SAMPLING = SamplingParams(max_tokens=9, seed=1)


def step(number: int, *rows: ScheduledRequest, new: tuple[NewRequest, ...] = (), **fields: object) -> SchedulerOutput:
    return SchedulerOutput(step=number, new_requests=new, scheduled=rows, **fields)  # type: ignore[arg-type]


def test_echo_tokens_are_a_wire_promise() -> None:
    """Clients check their streams by this function: its values must never change."""
    golden = [6463, 2680, 45779, 3974]

    assert [echo_token("req", choice, index, vocab_size=50_000) for choice in (0, 1) for index in (0, 1)] == golden


def test_ids_choices_and_indices_are_told_apart() -> None:
    values = {
        echo_token(*each, vocab_size=2**40) for each in [("a", 1, 11), ("a", 11, 1), ("a1", 1, 1), ("a\x001", 1, 1)]
    }
    assert len(values) == 4


def test_a_block_table_of_another_requests_blocks_is_caught() -> None:
    runner = FakeModelRunner(make_spec(), script=FakeScript(verify=True))
    ids = prompt(4)
    new = (NewRequest(A, ids, tokens(), SAMPLING), NewRequest(B, prompt(4, seed=1), tokens(), SAMPLING))
    first = runner.execute(
        step(
            1,
            ScheduledRequest(A, 0, ids, (0, 1), True),
            ScheduledRequest(B, 0, prompt(4, seed=1), (2, 3), True),
            new=new,
        )
    )

    token = np.array(first.rows[0].token_ids, dtype=np.int32)
    with pytest.raises(RuntimeError, match="another prefix's keys and values at position 0"):
        runner.execute(step(2, ScheduledRequest(A, 4, token, (2, 1), True)))


def test_a_block_that_is_given_away_too_early_is_caught() -> None:
    runner = FakeModelRunner(make_spec(), script=FakeScript(verify=True))
    ids, other = prompt(4), prompt(4, seed=1)
    new = (NewRequest(A, ids, tokens(), SAMPLING), NewRequest(B, other, tokens(), SAMPLING))

    with pytest.raises(RuntimeError, match="another prefix"):
        runner.execute(
            step(1, ScheduledRequest(A, 0, ids, (0,), True), ScheduledRequest(B, 0, other, (0,), True), new=new)
        )


def test_a_skipped_copy_is_caught_and_a_made_one_passes() -> None:
    ids = prompt(6)
    for copies, passes in (((), False), (((1, 5),), True)):
        runner = FakeModelRunner(make_spec(), script=FakeScript(verify=True))
        new = (NewRequest(A, ids, tokens(), SAMPLING),)
        runner.execute(step(1, ScheduledRequest(A, 0, ids, (0, 1), True), new=new))
        forked = step(
            2,
            ScheduledRequest(B, 5, ids[5:], (0, 5), True),
            new=(NewRequest(B, ids, tokens(), SAMPLING),),
            block_copies=copies,
        )
        if passes:
            assert list(runner.execute(forked).rows[0].token_ids) == echoes("b", 1)
        else:
            with pytest.raises(RuntimeError, match="position 4"):
                runner.execute(forked)


def test_a_row_that_skips_or_repeats_a_token_is_caught() -> None:
    runner = FakeModelRunner(make_spec())
    ids = prompt(4)
    runner.execute(step(1, ScheduledRequest(A, 0, ids, (0,), True), new=(NewRequest(A, ids, tokens(), SAMPLING),)))

    with pytest.raises(RuntimeError, match="samples after 4 tokens, 5 are known"):
        runner.execute(step(2, ScheduledRequest(A, 3, ids[3:], (0,), True)))


def test_state_of_a_request_that_is_gone_is_an_invariant_broken() -> None:
    runner = FakeModelRunner(make_spec())
    ids = prompt(4)
    runner.execute(step(1, ScheduledRequest(A, 0, ids, (0,), True), new=(NewRequest(A, ids, tokens(), SAMPLING),)))

    with pytest.raises(AssertionError, match="1 sequences"):
        runner.check_invariants()
    runner.execute(step(2, released=(A,)))
    runner.check_invariants()


def test_a_magic_prompt_calls_what_would_end_the_process() -> None:
    calls: list[str] = []
    script = FakeScript(magic_prompt=(1, 2, 3), on_magic=lambda: calls.append("exit"))
    rig = EngineRig(script=script)
    rig.add(make_request("harmless", tokens(1, 2, 3, 4), max_tokens=2))
    rig.run()
    assert calls == []

    rig.add(make_request("poison", tokens(1, 2, 3), max_tokens=1))
    rig.run()
    assert calls == ["exit"]
    assert_engine_empty(rig)


def test_latency_is_asked_for_once_a_step_and_sees_its_size() -> None:
    sizes: list[int] = []
    rig = EngineRig(script=FakeScript(before_step=lambda decision: sizes.append(decision.num_tokens)))
    rig.add(make_request("a", prompt(20), max_tokens=3))
    rig.run()

    assert sizes == [16, 4, 1, 1, 0]


def test_logprobs_are_given_when_asked_for() -> None:
    rig = EngineRig()
    rig.add(make_request("a", sampling=SamplingParams(max_tokens=3, seed=1, logprob_count=0)))
    rig.add(make_request("b", prompt(8, seed=1), max_tokens=3))
    rig.run()

    assert [entry.token_id for out in rig.outputs[A] for entry in out.logprobs] == echoes("a", 3)
    assert all(out.logprobs == () for out in rig.outputs[B])
