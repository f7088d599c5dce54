"""Each sampling parameter does what it says, for its own row only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.outputs import NewRequest, SampledRow
from services.worker.engine.request import RequestKey, SamplingParams
from services.worker.runtime.choosing import Draw, NumpyChooser, choose_token
from services.worker.runtime.input_batch import RequestState
from services.worker.runtime.noise import gumbel, noise_key
from services.worker.runtime.sampler import Sampler, SampleRow

VOCAB = 12
EOS = 3


def state(
    *,
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (),
    name: str = "r",
    choice: int = 0,
    **sampling: object,
) -> RequestState:
    values = {"max_tokens": 99, "seed": 5, "temperature": 0.0, **sampling}
    return RequestState(
        NewRequest(
            RequestKey(name, choice, 1),
            np.array(prompt, dtype=np.int32),
            np.array(output, dtype=np.int32),
            SamplingParams(**values),  # type: ignore[arg-type]
        )
    )


def sample(rows: Sequence[RequestState | SampleRow], logits: Sequence[Sequence[float]]) -> list[SampledRow]:
    entries = [row if isinstance(row, SampleRow) else SampleRow(row) for row in rows]
    return Sampler(NumpyChooser(), frozenset({EOS})).sample(torch.tensor(logits, dtype=torch.float32), entries)


def one(row: RequestState, logits: Sequence[float]) -> int:
    result = sample([row], [logits])[0]
    assert result.error is None, result.error
    return result.token_ids[0]


def falling(**changes: float) -> list[float]:
    """Token 0 is the best, then 1, and so on, one apart; `t4=9.0` sets the logit of token 4."""
    logits = [float(VOCAB - index) for index in range(VOCAB)]
    for name, value in changes.items():
        logits[int(name[1:])] = value
    return logits


def seen(count: int = 400, *, logits: Sequence[float] | None = None, **sampling: object) -> dict[int, int]:
    """How often each token came, over `count` seeds."""
    counts: dict[int, int] = {}
    for seed in range(count):
        token = one(state(seed=seed, **{"temperature": 1.0, **sampling}), logits or [0.0] * VOCAB)
        counts[token] = counts.get(token, 0) + 1
    return counts


def test_temperature_zero_takes_the_largest_logit_and_the_lower_id_of_equals() -> None:
    assert one(state(), falling(t7=99.0)) == 7
    assert one(state(), falling(t7=99.0, t5=99.0)) == 5


def test_sampling_follows_the_softmax_of_logits_over_temperature() -> None:
    logits = [math.log(weight) for weight in range(1, VOCAB + 1)]
    for temperature in (0.5, 1.0, 2.0):
        weights = np.array([weight ** (1 / temperature) for weight in range(1, VOCAB + 1)])
        counts = seen(3000, logits=logits, temperature=temperature)
        expected = 3000 * weights / weights.sum()
        observed = np.array([counts.get(token, 0) for token in range(VOCAB)])
        # Chi-squared with 11 degrees of freedom exceeds 31.3 once in a thousand; the seeds are fixed.
        assert (((observed - expected) ** 2) / expected).sum() < 31.3


@pytest.mark.parametrize(("top_k", "left"), [(1, {0}), (2, {0, 1}), (5, set(range(5))), (0, set(range(VOCAB)))])
def test_top_k_leaves_that_many(top_k: int, left: set[int]) -> None:
    assert set(seen(top_k=top_k, logits=[float(-index) / 100 for index in range(VOCAB)])) == left


def test_top_p_leaves_the_smallest_set_that_reaches_the_mass() -> None:
    logits = [math.log(share) for share in (0.5, 0.25, 0.125, 0.125)] + [-1e9] * (VOCAB - 4)
    assert set(seen(top_p=0.49, logits=logits)) == {0}
    assert set(seen(top_p=0.7, logits=logits)) == {0, 1}
    assert set(seen(top_p=0.8, logits=logits)) == {0, 1, 2}


def test_min_p_leaves_tokens_of_that_share_of_the_best() -> None:
    logits = [math.log(share) for share in (0.5, 0.26, 0.12)] + [-1e9] * (VOCAB - 3)
    assert set(seen(min_p=0.5, logits=logits)) == {0, 1}
    assert set(seen(min_p=0.2, logits=logits)) == {0, 1, 2}


def test_filters_apply_one_after_the_other() -> None:
    draw = Draw(temperature=1.0, top_k=2, top_p=0.6, min_p=0.01, noise_key=0)
    logits = np.log(np.array([0.4, 0.3, 0.3] + [1e-9] * (VOCAB - 3), dtype=np.float32))
    got = {choose_token(logits, Draw(1.0, 2, 0.6, 0.01, key)) for key in range(0, 10**6, 4321)}
    assert got == {0, 1}, "top-p counts what top-k left: 0.4 of 0.7 does not reach 0.6"
    assert choose_token(logits, draw) in got


def test_repetition_penalty_lowers_prompt_and_output_tokens_of_either_sign() -> None:
    assert one(state(prompt=(0,), repetition_penalty=2.0), falling()) == 1
    assert one(state(prompt=(5,), output=(0, 1), repetition_penalty=2.0), falling()) == 2
    negative = [-1.0, -1.5] + [-9.0] * (VOCAB - 2)
    assert one(state(prompt=(0,), repetition_penalty=2.0), negative) == 1


def test_presence_penalty_counts_output_once_and_frequency_penalty_each_time() -> None:
    assert one(state(output=(0, 0, 0), presence_penalty=0.9), falling()) == 0
    assert one(state(output=(0, 0, 0), presence_penalty=1.1), falling()) == 1
    assert one(state(output=(0,), frequency_penalty=0.9), falling()) == 0
    assert one(state(output=(0, 0), frequency_penalty=0.9), falling()) == 1
    assert one(state(prompt=(0, 0, 0), frequency_penalty=2.0, presence_penalty=2.0), falling()) == 0


def test_logit_bias_adds_to_its_token_only() -> None:
    assert one(state(logit_bias=((4, 100.0),)), falling()) == 4
    assert one(state(logit_bias=((0, -100.0),)), falling()) == 1


def test_min_tokens_bans_eos_and_stop_ids_until_enough_came() -> None:
    logits = falling(t3=99.0, t4=98.0)
    assert one(state(min_tokens=2, stop_token_ids=(4,)), logits) == 0
    assert one(state(min_tokens=2, stop_token_ids=(4,), output=(7,)), logits) == 0
    assert one(state(min_tokens=2, stop_token_ids=(4,), output=(7, 7)), logits) == EOS
    assert one(state(min_tokens=1, stop_token_ids=(4, 10**6)), logits) == 0


def test_a_bias_cannot_undo_a_ban() -> None:
    assert one(state(min_tokens=1, logit_bias=((EOS, 100.0),)), falling()) == 0
    assert one(state(bad_words=((4,),), logit_bias=((4, 100.0),)), falling()) == 0


def test_a_bad_word_is_banned_at_its_last_token_only() -> None:
    assert one(state(bad_words=((0,),)), falling()) == 1
    assert one(state(bad_words=((8, 9, 0),)), falling()) == 0
    assert one(state(bad_words=((8, 9, 0),), output=(7, 8, 9)), falling()) == 1
    assert one(state(bad_words=((8, 9, 0),), output=(9,), prompt=(8,)), falling()) == 0


def test_logprobs_are_of_the_unscaled_logits_whatever_else_is_asked() -> None:
    logits = falling()
    reference = torch.log_softmax(torch.tensor(logits), -1)
    for sampling in (
        {"temperature": 0.0},
        {"temperature": 5.0, "top_k": 1},
        {"temperature": 0.0, "logit_bias": ((0, -50.0),), "presence_penalty": 1.0},
    ):
        result = sample([state(output=(1,), logprob_count=3, **sampling)], [logits])[0]
        entry = result.logprobs[0]
        assert entry.token_id == result.token_ids[0]
        assert entry.logprob == pytest.approx(float(reference[entry.token_id]), abs=1e-5)
        assert [token for token, _ in entry.top] == [0, 1, 2]
        assert [value for _, value in entry.top] == pytest.approx(reference[:3].tolist(), abs=1e-5)
        assert all(math.isfinite(value) for _, value in entry.top)


def test_no_logprobs_unless_asked_and_only_its_own_for_zero() -> None:
    assert sample([state()], [falling()])[0].logprobs == ()
    assert sample([state(logprob_count=0)], [falling()])[0].logprobs[0].top == ()


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    generator = np.random.default_rng(0)
    mine = generator.normal(size=VOCAB).tolist()
    alone = one(state(seed=77, temperature=1.0), mine)
    for size in range(1, 6):
        strangers = [state(name=f"s{index}", seed=index, temperature=1.5, top_k=4) for index in range(size)]
        rows = [*strangers, state(seed=77, temperature=1.0)]
        logits = [*generator.normal(size=(size, VOCAB)).tolist(), mine]
        assert sample(rows, logits)[-1].token_ids == (alone,)


def test_seed_choice_and_position_each_change_the_noise() -> None:
    ids = np.arange(64)
    noises = [gumbel(noise_key(*key), ids).tolist() for key in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))]
    assert len({tuple(noise) for noise in noises}) == 4
    assert gumbel(noise_key(1, 0, 0), ids).tolist() == noises[0]
    assert gumbel(noise_key(1, 0, 0), ids[10:20]).tolist() == noises[0][10:20]
    flat = {one(state(seed=9, temperature=1.0, choice=choice), [0.0] * VOCAB) for choice in range(30)}
    assert len(flat) > 3


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(noise_key(3, 1, 4), np.arange(200_000))
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("bad", [[math.nan] * VOCAB, [-math.inf] * VOCAB, [math.inf] + [0.0] * (VOCAB - 1)])
def test_one_bad_row_fails_alone(bad: list[float]) -> None:
    before, broken, after = state(name="a"), state(name="b"), state(name="c")
    results = sample([before, broken, after], [falling(), bad, falling(t4=50.0)])
    assert [result.token_ids for result in results] == [(0,), (), (4,)]
    assert [result.error is None for result in results] == [True, False, True]
    assert (before.output_length, broken.output_length, after.output_length) == (1, 0, 1)


def test_a_fault_in_one_rows_rules_fails_that_row_alone() -> None:
    results = sample([state(logit_bias=((VOCAB + 5, 1.0),)), state(name="c")], [falling(), falling()])
    assert results[0].error is not None
    assert results[1].token_ids == (0,)


def test_a_request_that_bans_everything_fails_and_says_so() -> None:
    result = sample([state(bad_words=tuple((token,) for token in range(VOCAB)))], [falling()])[0]
    assert result.error is not None
    assert "no token is allowed" in result.error


@pytest.mark.parametrize(
    ("drafts", "expected"), [((5, 6, 7), (5, 6, 7, 8)), ((5, 6, 0), (5, 6, 7)), ((0, 6, 7), (5,)), ((), (5,))]
)
@pytest.mark.parametrize("history", [False, True])
def test_drafts_are_kept_as_far_as_sampling_agrees(
    drafts: tuple[int, ...], expected: tuple[int, ...], history: bool
) -> None:
    row = state(logprob_count=1, presence_penalty=0.001 if history else 0.0)
    logits = [falling(**{f"t{5 + point}": 99.0}) for point in range(1 + len(drafts))]
    result = sample([SampleRow(row, drafts)], logits)[0]
    assert result.token_ids == expected
    assert len(result.logprobs) == len(expected)
    assert tuple(row.tokens[2:]) == expected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB),
    penalty=st.sampled_from([0.0, 1.5]),
    drafts=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    data_seed=st.integers(0, 1000),
)
def test_drafts_never_change_what_is_said(
    seed: int, temperature: float, top_k: int, penalty: float, drafts: list[int], data_seed: int
) -> None:
    logits = np.random.default_rng(data_seed).normal(size=(len(drafts) + 1, VOCAB)).tolist()
    sampling = {"seed": seed, "temperature": temperature, "top_k": top_k, "frequency_penalty": penalty}
    plain = state(**sampling)
    said: list[int] = []
    for row in logits:
        said.append(one(plain, row))
        if len(said) > len(drafts) or said[-1] != drafts[len(said) - 1]:
            break
    assert list(sample([SampleRow(state(**sampling), tuple(drafts))], logits)[0].token_ids) == said
