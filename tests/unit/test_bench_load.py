"""What `millrace bench` sends, and what it makes of the answers."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from cli.bench_load import (
    Ending,
    Lengths,
    Outcome,
    Percentiles,
    Shape,
    Targets,
    knee,
    make_jobs,
    percentiles,
    ramp_rates,
    seeded,
    summarise,
    trace_jobs,
)

SHAPE = Shape(Lengths.parse("20"), Lengths.parse("8"), shared_words=30)


def outcome(*, due: float = 0.0, ttft: float = 0.1, tokens: int = 5, gap: float = 0.01, **fields: object) -> Outcome:
    gaps = (gap,) * (tokens - 1)
    made = {
        "due_s": due,
        "sent_s": due,
        "first_s": due + ttft,
        "end_s": due + ttft + sum(gaps),
        "ending": Ending.COMPLETED,
        "gaps_s": gaps,
        "prompt_tokens": 10,
        "completion_tokens": tokens,
    }
    return Outcome(**(made | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [("7", 7, 7, 7.0), ("uniform:50:150", 50, 150, 100.0), ("lognormal:100", 1, 4000, 100.0)],
)
def test_lengths_keep_their_bounds_and_mean(text: str, low: int, high: int, mean: float) -> None:
    rng = seeded(1)
    lengths = Lengths.parse(text)

    drawn = [lengths.draw(rng) for _ in range(4000)]

    assert low <= min(drawn) <= max(drawn) <= high
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    "text", ["", "0", "x", "uniform:9:3", "uniform:1", "lognormal:5:-1", "lognormal:5:nan", "gamma:5"]
)
def test_wrong_lengths_are_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"lengths start at 1|is none of"):
        Lengths.parse(text)


def test_arrivals_are_poisson_and_equal_seeds_make_equal_work() -> None:
    jobs = make_jobs(SHAPE, 4000, seed=5, rate=8.0)

    gaps = [late.due_s - early.due_s for early, late in itertools.pairwise(jobs)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert make_jobs(SHAPE, 4000, seed=5, rate=8.0) == jobs != make_jobs(SHAPE, 4000, seed=6, rate=8.0)


def test_every_prompt_begins_with_the_shared_words_and_goes_on_with_its_own() -> None:
    prompts = [job.prompt.split() for job in make_jobs(SHAPE, 16, seed=3)]

    assert {len(prompt) for prompt in prompts} == {50}
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 16


def test_a_trace_gives_arrivals_lengths_and_shared_beginnings() -> None:
    entries = [
        {"timestamp": 9500, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]},
        {"timestamp": 7000, "input_length": 700, "output_length": 3, "hash_ids": [1, 3]},
        {"timestamp": 10000, "input_length": 40, "output_length": 4},
    ]

    jobs = trace_jobs([*map(json.dumps, entries), ""], seed=1)

    assert [(job.due_s, len(job.prompt.split()), job.max_tokens) for job in jobs] == [
        (0.0, 700, 3),
        (2.5, 600, 9),
        (3.0, 40, 4),
    ]
    first, second = (job.prompt.split() for job in jobs[:2])
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]


@pytest.mark.parametrize(
    "line", ["{}", "[]", "x", '{"timestamp": -1, "input_length": 1, "output_length": 1}', '{"timestamp": 1}']
)
def test_a_wrong_trace_names_its_line(line: str) -> None:
    good = '{"timestamp": 1, "input_length": 1, "output_length": 1}'

    with pytest.raises(ValueError, match="line 2"):
        trace_jobs([good, line], seed=1)
    with pytest.raises(ValueError, match="no entries"):
        trace_jobs([], seed=1)


def test_a_ramp_reaches_its_last_rate() -> None:
    assert ramp_rates("0.1:0.3:0.1") == [0.1, 0.2, 0.3]
    assert ramp_rates("2:9:3") == [2.0, 5.0, 8.0]
    for wrong in ("1:2", "0:2:1", "3:2:1", "1:2:0", "1:inf:1", "1:1000:1", "a:b:c"):
        with pytest.raises(ValueError, match=r"A:B:STEP|rates"):
            ramp_rates(wrong)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles(range(100, 0, -1)) == Percentiles(50, 95, 99)
    assert percentiles([3.0]) == Percentiles(3.0, 3.0, 3.0)
    assert percentiles([]) == Percentiles(None, None, None)


@pytest.mark.parametrize(
    ("targets", "is_met"),
    [
        (Targets(100, 10, 0.14), True),
        (Targets(99, None, None), False),
        (Targets(None, 9.9, None), False),
        (Targets(None, None, 0.13), False),
        (Targets(None, None, None), True),
    ],
)
def test_a_request_is_good_when_it_meets_every_target(targets: Targets, is_met: bool) -> None:
    one = outcome(ttft=0.0999999, gap=0.00999, tokens=5)

    assert targets.met_by(one) is is_met


def test_goodput_counts_refused_and_failed_requests_as_missed_and_latency_of_the_completed_only() -> None:
    outcomes = [
        outcome(cached_tokens=4),
        outcome(due=1.0, ttft=3.0),
        outcome(due=1.5, ttft=9.0, ending=Ending.REFUSED, error="429: full", completion_tokens=0),
        outcome(due=1.9, sent_s=2.0, ending=Ending.FAILED, error="cut"),
    ]

    found = summarise(outcomes, Targets(), rate=2.0)

    assert (found.goodput_share, found.completed, found.refused, found.failed) == (0.25, 2, 1, 1)
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (20, 10, 4)
    assert found.wall_s == pytest.approx(10.54)
    assert found.goodput_per_s == pytest.approx(1 / 10.54, abs=1e-3)
    assert found.output_tokens_per_s == pytest.approx(10 / 10.54, abs=0.1)
    assert found.ttft_s == Percentiles(0.1, 3.0, 3.0)
    assert found.max_lag_s == pytest.approx(0.1)
    assert found.errors == {"429: full": 1, "cut": 1}


def test_the_knee_is_the_last_rate_before_goodput_is_missed() -> None:
    def at(rate: float, good: int) -> object:
        return summarise([outcome(ttft=0.1 if n < good else 5.0) for n in range(20)], Targets(), rate=rate)

    ramp = [at(3.0, 20), at(1.0, 20), at(2.0, 19), at(4.0, 18), at(5.0, 20)]

    assert knee(ramp).rate == 3.0  # type: ignore[arg-type,union-attr]
    assert knee([at(1.0, 18), at(2.0, 20)]) is None  # type: ignore[list-item]
