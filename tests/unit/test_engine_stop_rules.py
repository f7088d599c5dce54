"""Why a choice ends, and which of its tokens are kept."""

from __future__ import annotations

import pytest

from services.worker.engine.outputs import ModelRunnerOutput, SampledRow, SchedulerOutput, TokenLogprobs
from services.worker.engine.request import FinishReason, RequestKey, SamplingParams
from tests.helpers.engine import EngineRig, RecordingRunner, assert_engine_empty, echoes, make_request, make_spec

EOS = 7


class ScriptedRunner(RecordingRunner):
    """Says what it is told, whatever was asked."""

    script: list[SampledRow]

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.decisions.append(scheduler_output)
        rows = [self.script.pop(0) if row.samples else SampledRow() for row in scheduler_output.scheduled]
        return ModelRunnerOutput(tuple(rows))

    def check_invariants(self) -> None:
        return None


def scripted(sampling: SamplingParams, *rows: SampledRow | int) -> EngineRig:
    """Run one request whose steps give these rows; a number is a row of that token."""
    rig = EngineRig(spec=make_spec(eos_token_ids=[EOS]))
    runner = ScriptedRunner(rig.runner.spec)
    runner.script = [row if isinstance(row, SampledRow) else SampledRow((row,)) for row in rows]
    rig.engine._runner = runner
    rig.add(make_request("a", sampling=sampling))
    rig.run(limit=len(rows) + 2)
    return rig


def test_end_of_sequence_stops_and_is_the_last_token_kept() -> None:
    rig = scripted(SamplingParams(max_tokens=9, seed=1), 1, 2, EOS)

    assert rig.token_ids("a") == [1, 2, EOS]
    last = rig.outputs[RequestKey("a", 0, 1)][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, EOS)
    assert_engine_empty(rig)


def test_end_of_sequence_on_the_last_token_is_a_stop_and_not_a_length() -> None:
    rig = scripted(SamplingParams(max_tokens=2, seed=1), 1, EOS)

    assert rig.finish("a") is FinishReason.STOP


def test_end_of_sequence_is_an_ordinary_token_when_ignored() -> None:
    rig = scripted(SamplingParams(max_tokens=3, seed=1, ignore_eos=True), EOS, EOS, EOS)

    assert rig.token_ids("a") == [EOS] * 3
    last = rig.outputs[RequestKey("a", 0, 1)][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_stop_id_stops_whether_or_not_end_of_sequence_is_ignored(ignore_eos: bool) -> None:
    rig = scripted(SamplingParams(max_tokens=9, seed=1, ignore_eos=ignore_eos, stop_token_ids=(55,)), 1, 55)

    assert rig.token_ids("a") == [1, 55]
    assert rig.outputs[RequestKey("a", 0, 1)][-1].stop_token_id == 55


def test_with_min_tokens_n_the_earliest_stop_is_token_n_plus_one() -> None:
    rig = scripted(SamplingParams(max_tokens=9, seed=1, min_tokens=4), EOS, EOS, EOS, EOS, EOS)

    assert rig.token_ids("a") == [EOS] * 5
    assert rig.finish("a") is FinishReason.STOP


def test_min_tokens_equal_to_max_tokens_ends_by_length() -> None:
    rig = scripted(SamplingParams(max_tokens=3, seed=1, min_tokens=3), EOS, EOS, EOS)

    assert rig.finish("a") is FinishReason.LENGTH


def test_several_end_of_sequence_ids_all_respect_min_tokens() -> None:
    rig = EngineRig(spec=make_spec(eos_token_ids=echoes("a", 6)))
    rig.add(make_request("a", sampling=SamplingParams(max_tokens=9, seed=1, min_tokens=4)))
    rig.run()

    assert rig.token_ids("a") == echoes("a", 5)
    assert rig.finish("a") is FinishReason.STOP
    assert_engine_empty(rig)


def test_the_end_of_a_grammar_stops_before_min_tokens_and_keeps_its_tokens() -> None:
    rig = scripted(SamplingParams(max_tokens=9, seed=1, min_tokens=5), 1, SampledRow((2,), grammar_ended=True))

    assert rig.token_ids("a") == [1, 2]
    last = rig.outputs[RequestKey("a", 0, 1)][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, None)


def test_a_grammar_that_allows_nothing_more_ends_without_a_token() -> None:
    rig = scripted(SamplingParams(max_tokens=9, seed=1), SampledRow(grammar_ended=True))

    assert rig.token_ids("a") == []
    assert rig.finish("a") is FinishReason.STOP
    assert_engine_empty(rig)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (SampledRow(error="nan in logits"), "nan in logits"),
        (SampledRow(), "no token"),
        (SampledRow((1, 2)), "more tokens"),
    ],
)
def test_a_faulty_row_ends_its_choice_with_the_reason(row: SampledRow, error: str) -> None:
    rig = scripted(SamplingParams(max_tokens=9, seed=1), 1, row)

    assert rig.token_ids("a") == [1]
    last = rig.outputs[RequestKey("a", 0, 1)][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert error in (last.error or "")
    assert_engine_empty(rig)


def test_logprobs_travel_with_their_tokens_only() -> None:
    pairs = [TokenLogprobs(1, -0.5), TokenLogprobs(EOS, -0.25)]
    rows = [SampledRow((pair.token_id,), (pair,)) for pair in pairs]
    rig = scripted(SamplingParams(max_tokens=9, seed=1, logprob_count=0), *rows)

    outputs = rig.outputs[RequestKey("a", 0, 1)]
    assert [output.logprobs for output in outputs] == [(pairs[0],), (pairs[1],)]


def test_a_runner_that_leaves_rows_unanswered_is_a_fault_of_the_whole() -> None:
    class DeafRunner(RecordingRunner):
        def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
            return ModelRunnerOutput(())

    rig = EngineRig()
    rig.engine._runner = DeafRunner(make_spec())
    rig.add(make_request("a"))

    with pytest.raises(RuntimeError, match="answered 0 rows of 1"):
        rig.engine.step(0.0)
    assert len(rig.engine.fail_all("the engine failed")) == 1
