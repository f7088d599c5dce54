"""Speculation: the same tokens in fewer steps, and off when it does not pay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from services.worker.engine.proposer import DraftRequest, NgramProposer
from services.worker.engine.request import RequestKey, SamplingParams, TokenArray
from tests.helpers.engine import EngineRig, assert_engine_empty, echoes, make_request, make_spec, prompt, tokens


class Oracle:
    """Knows what the echo runner will say, and is wrong from `wrong_from` drafts on."""

    def __init__(self, *, prompt_length: int, wrong_from: int = 100) -> None:
        self.prompt_length = prompt_length
        self.wrong_from = wrong_from
        self.released: list[RequestKey] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenArray]:
        proposals = []
        for request in requests:
            said = len(request.token_ids) - self.prompt_length
            drafts = echoes(request.key.request_id, said + request.max_draft_count, choice=request.key.choice)[said:]
            drafts[self.wrong_from :] = [(token_id + 1) % 1000 for token_id in drafts[self.wrong_from :]]
            proposals.append(tokens(*drafts))
        return proposals

    def release(self, key: RequestKey) -> None:
        self.released.append(key)


@pytest.mark.parametrize("wrong_from", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 24])
def test_drafts_right_or_wrong_change_no_token(wrong_from: int, max_tokens: int) -> None:
    rig = EngineRig(proposer=Oracle(prompt_length=8, wrong_from=wrong_from), max_draft_count=3)
    for index in range(3):
        rig.add(make_request(f"r{index}", prompt(8, seed=index), max_tokens=max_tokens))
    rig.run()

    for index in range(3):
        assert rig.token_ids(f"r{index}") == echoes(f"r{index}", max_tokens)
    assert_engine_empty(rig)


def test_accepted_drafts_save_steps_and_are_counted() -> None:
    rig = EngineRig(proposer=Oracle(prompt_length=8), max_draft_count=3)
    rig.add(make_request("a", max_tokens=25))
    rig.run()

    # One token of the prefill, then six rows of four.
    assert len([each for each in rig.runner.decisions if each.scheduled]) == 7
    stats = rig.engine.stats(rig.now)
    assert (stats.draft_token_total, stats.accepted_draft_token_total) == (18, 18)
    assert stats.decode_token_total == 24


def test_rejected_drafts_are_rolled_back_and_their_slots_computed_again() -> None:
    rig = EngineRig(proposer=Oracle(prompt_length=8, wrong_from=1), max_draft_count=3)
    rig.add(make_request("a", max_tokens=12))
    rig.step(3)

    starts = [row.start for decision in rig.runner.decisions for row in decision.scheduled]
    assert starts == [0, 8, 10]
    rig.run()
    assert rig.token_ids("a") == echoes("a", 12)
    assert_engine_empty(rig)


def test_a_stop_inside_accepted_drafts_cuts_what_follows() -> None:
    stop = echoes("a", 3)[2]
    rig = EngineRig(proposer=Oracle(prompt_length=8), max_draft_count=4)
    rig.add(make_request("a", sampling=SamplingParams(max_tokens=20, seed=1, stop_token_ids=(stop,))))
    rig.run()

    assert rig.token_ids("a") == echoes("a", 3)
    assert_engine_empty(rig)


def test_blocks_that_hold_rejected_drafts_are_never_hit() -> None:
    rig = EngineRig(proposer=Oracle(prompt_length=8, wrong_from=0), max_draft_count=4)
    rig.add(make_request("a", max_tokens=9))
    rig.run()
    history = tokens(*prompt(8).tolist(), *echoes("a", 9))
    wrong = tokens(*prompt(8).tolist(), *[(token_id + 1) % 1000 for token_id in echoes("a", 9)])

    rig.add(make_request("right", history, max_tokens=2))
    rig.add(make_request("wrong", wrong, max_tokens=2))
    rig.run()

    assert rig.outputs[RequestKey("right", 0, 1)][0].cached_token_count == 16
    assert rig.outputs[RequestKey("wrong", 0, 1)][0].cached_token_count == 8
    assert_engine_empty(rig)


def test_a_draft_never_passes_the_end_of_its_choice_or_the_pool() -> None:
    rig = EngineRig(spec=make_spec(num_blocks=4, max_model_len=17), proposer=Oracle(prompt_length=8), max_draft_count=8)
    rig.add(make_request("a", max_tokens=9))
    rig.run()

    rows = [row for decision in rig.runner.decisions for row in decision.scheduled]
    assert max(row.start + len(row.token_ids) for row in rows) == 16
    assert rig.token_ids("a") == echoes("a", 9)
    assert_engine_empty(rig)


def test_speculation_is_off_in_a_large_batch() -> None:
    rig = EngineRig(proposer=Oracle(prompt_length=8), max_draft_count=3, max_draft_batch=2)
    for index in range(3):
        rig.add(make_request(f"r{index}", prompt(8, seed=index), max_tokens=5 + 20 * (index == 0)))
    rig.step(4)

    assert rig.engine.stats(rig.now).draft_token_total == 0
    rig.run()
    assert rig.engine.stats(rig.now).draft_token_total > 0
    assert_engine_empty(rig)


def test_speculation_pauses_for_a_row_whose_drafts_are_wrong_and_tries_again() -> None:
    rig = EngineRig(proposer=Oracle(prompt_length=8, wrong_from=0), max_draft_count=3, spec=make_spec(num_blocks=200))
    rig.add(make_request("a", max_tokens=300))
    rig.run()

    drafted = [bool(row.draft_count) for decision in rig.runner.decisions for row in decision.scheduled]
    assert 10 < sum(drafted) < 40
    assert any(drafted[100:])
    assert rig.token_ids("a") == echoes("a", 300)
    assert_engine_empty(rig)


def drafted_steps(*, plain_s: float, drafted_s: float, wrong_from: int = 100) -> list[bool]:
    """Which of some hundred steps had drafts, when steps take so long without and with them."""
    oracle = Oracle(prompt_length=8, wrong_from=wrong_from)
    rig = EngineRig(proposer=oracle, max_draft_count=3, spec=make_spec(num_blocks=400))
    rig.add(make_request("a", max_tokens=450))
    drafted: list[bool] = []
    while rig.engine.has_work():
        was_drafted = bool(drafted and drafted[-1])
        rig.step(seconds=drafted_s if was_drafted else plain_s)
        drafted.append(bool(rig.last.scheduled and rig.last.scheduled[0].draft_count))
    assert rig.token_ids("a") == echoes("a", 450)
    assert_engine_empty(rig)
    return drafted


def test_speculation_stays_on_while_a_step_with_drafts_gives_more_than_it_takes_longer() -> None:
    # Four tokens for the time of three; wrong from the second draft on, two tokens for less than the time of two.
    for wrong_from, drafted_s in ((100, 0.003), (1, 0.0019)):
        drafted = drafted_steps(plain_s=0.001, drafted_s=drafted_s, wrong_from=wrong_from)
        assert sum(drafted) > 0.9 * len(drafted)


def test_speculation_pauses_for_longer_and_longer_while_drafting_takes_longer_than_it_saves() -> None:
    for wrong_from, drafted_s in ((100, 0.005), (1, 0.0021)):
        drafted = drafted_steps(plain_s=0.001, drafted_s=drafted_s, wrong_from=wrong_from)
        assert 16 <= sum(drafted) <= 4 * 16, "tried again a few times, and no more"
        assert any(drafted[40:]), "never tried again"


def test_a_batch_size_that_loses_does_not_stop_another() -> None:
    rig = EngineRig(proposer=Oracle(prompt_length=8), max_draft_count=3, spec=make_spec(num_blocks=800))
    rig.add(make_request("a", max_tokens=800))
    rig.add(make_request("b", prompt(8, seed=1), max_tokens=120))
    drafted: dict[int, list[bool]] = {1: [], 2: []}
    rows, was_drafted = 2, False
    while rig.engine.has_work():
        rig.step(seconds=0.009 if rows == 2 and was_drafted else 0.001)
        if rig.last.scheduled:
            rows, was_drafted = len(rig.last.scheduled), rig.last.scheduled[0].draft_count > 0
            drafted[rows].append(was_drafted)

    assert sum(drafted[2]) == 16
    assert sum(drafted[1]) > 0.9 * len(drafted[1])
    assert_engine_empty(rig)


def test_drafts_leave_the_budget_to_others() -> None:
    rig = EngineRig(
        proposer=Oracle(prompt_length=8),
        max_draft_count=8,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_prefill_chunk=4,
    )
    for index in range(3):
        rig.add(make_request(f"r{index}", prompt(8, seed=index), max_tokens=20))
    rig.run()

    assert max(decision.num_tokens for decision in rig.runner.decisions) <= 8
    for index in range(3):
        assert rig.token_ids(f"r{index}") == echoes(f"r{index}", 20)
    assert_engine_empty(rig)


def test_the_proposer_is_told_of_every_choice_that_leaves() -> None:
    oracle = Oracle(prompt_length=8)
    rig = EngineRig(proposer=oracle, max_draft_count=3)
    rig.add(make_request("a", max_tokens=5))
    rig.add(make_request("b", prompt(8, seed=1), max_tokens=200))
    rig.step(3)
    rig.engine.abort("b")
    rig.run()

    assert set(oracle.released) == {RequestKey("a", 0, 1), RequestKey("b", 0, 1)}
    assert_engine_empty(rig)


@pytest.mark.parametrize(
    ("known", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([5, 1, 2, 7, 7, 7, 1, 2, 8, 8, 8, 1, 2], [8, 8, 8]),
        ([1, 2, 3, 5, 9, 9, 3, 5, 8, 1, 2, 3, 5], [9, 9, 3]),
        ([1, 2, 3, 4, 5], []),
        ([1, 1, 1, 1], [1]),
        ([4], []),
    ],
)
def test_prompt_lookup_copies_what_followed_the_longest_and_latest_match(known: list[int], drafts: list[int]) -> None:
    proposer = NgramProposer(max_ngram=4, min_ngram=2)

    request = DraftRequest(
        RequestKey("a", 0, 1), np.array(known, dtype=np.int32), 3, SamplingParams(max_tokens=9, seed=1)
    )
    (proposed,) = proposer.propose([request])

    assert proposed.tolist() == drafts


def test_prompt_lookup_needs_a_range_of_sizes_that_exists() -> None:
    with pytest.raises(ValueError, match="min_ngram"):
        NgramProposer(max_ngram=1, min_ngram=2)
