"""The judge of canaries: its evidence is valid at any look, bad versions are found soon, good ones pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from services.usage.canary.checks import Role
from services.usage.canary.criteria import Criteria
from services.usage.canary.evidence import Counts, Evidence, ExcessEvidence, RateEvidence, above
from services.usage.canary.judge import Call, Judge
from services.usage.canary.observations import Histogram, Observation
from tests.helpers.canaries import GOOD, Traffic, Version, run_stage

ONE_PERCENT = Traffic(per_window=100, share=0.01)
# What a canary of 1 % sees in 60 s where 500 requests come in a second.
SEEN_IN_A_MINUTE = 300


def expected_rate_evidence(limit: float, rate: float, requests: int) -> float:
    """Exact expectation over all outcomes of the largest value at any look, were it stopped at the best bound."""
    total = 0.0
    for outcome in itertools.product((0, 1), repeat=requests):
        evidence = RateEvidence(limit)
        for event in outcome:
            evidence.add(Counts(1, event))
            if evidence.log_value > math.log(2):
                break
        chance = math.prod(rate if event else 1 - rate for event in outcome)
        total += chance * math.exp(evidence.log_value)
    return total


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.2])
def test_evidence_against_a_rate_is_worth_at_most_one_when_the_rate_is_held_whenever_one_stops(rate: float) -> None:
    assert expected_rate_evidence(0.2, rate, 8) <= 1 + 1e-9


def hypergeometric(canary: int, baseline: int, events: int, odds: float) -> Iterator[tuple[int, float]]:
    """The canary's events and their chance when its odds are `odds` times the baseline's."""
    support = range(max(0, events - baseline), min(canary, events) + 1)
    ways = [math.comb(canary, i) * math.comb(baseline, events - i) * odds**i for i in support]
    return ((i, way / sum(ways)) for i, way in zip(support, ways, strict=True))


@pytest.mark.parametrize(("canary", "baseline", "events"), [(3, 40, 5), (10, 10, 9), (1, 500, 250), (4, 6, 1)])
def test_evidence_of_excess_is_worth_exactly_one_at_the_allowed_odds_and_less_below(
    canary: int, baseline: int, events: int
) -> None:
    def expected(odds: float) -> float:
        total = 0.0
        for seen, chance in hypergeometric(canary, baseline, events, odds):
            evidence = ExcessEvidence(2.0)
            evidence.add(Counts(canary, seen), Counts(baseline, events - seen))
            total += chance * math.exp(evidence.log_value)
        return total

    assert expected(2.0) == pytest.approx(1.0)
    assert expected(1.0) < 1.0


def test_evidence_continues_where_it_stood() -> None:
    before = ExcessEvidence(1.0)
    before.add(Counts(3, 2), Counts(20, 1))
    after = ExcessEvidence(1.0, before.logs)

    for evidence in (before, after):
        evidence.add(Counts(2, 1), Counts(30, 2))

    assert after.log_value == before.log_value


def test_a_window_of_one_version_or_of_one_outcome_says_nothing() -> None:
    evidence: Evidence = ExcessEvidence(1.0)
    assert isinstance(evidence, ExcessEvidence)

    evidence.add(Counts(0, 0), Counts(50, 3))
    evidence.add(Counts(5, 5), Counts(50, 50))
    evidence.add(Counts(5, 0), Counts(50, 0))

    assert evidence.log_value == 0.0


def test_values_above_the_common_quantile_are_events_of_both() -> None:
    assert above([9.0], [1.0, 2.0, 3.0, 4.0], 0.5) == (Counts(1, 1), Counts(4, 2))
    assert above([], [], 0.5) == (Counts(0, 0), Counts(0, 0))


def test_good_canaries_pass_with_hardly_a_false_alarm() -> None:
    trials = [
        run_stage(Judge(Criteria(tpot_ms=35)), GOOD, Traffic(20, 0.3, 0.1), windows=20, seed=seed) for seed in range(30)
    ]

    calls = [trial.verdict.call for trial in trials]
    assert calls.count(Call.FAIL) == 0
    assert calls.count(Call.PASS) >= 27


@pytest.mark.fault
def test_of_a_thousand_good_canaries_at_most_one_in_a_hundred_is_called_bad() -> None:
    trials = [
        run_stage(Judge(Criteria(tpot_ms=35, stages=1)), GOOD, Traffic(50, 0.1, 0.1), windows=60, seed=seed)
        for seed in range(1_000)
    ]

    alarms = [trial.verdict.why for trial in trials if trial.verdict.call is Call.FAIL]
    print(f"false alarms: {len(alarms)} of {len(trials)}")
    assert len(alarms) <= 10, alarms


BAD = {
    "time per output token": Version(tpot_s=0.041),
    "errors": Version(error_rate=0.03),
    "time to first token": Version(ttft_s=0.5),
    "output length": Version(output_tokens=300),
    "refusals": Version(empty_rate=0.2),
}


@pytest.mark.parametrize("figure", BAD)
def test_a_bad_version_is_found_within_what_one_percent_sees_in_a_minute(figure: str) -> None:
    trials = [run_stage(Judge(Criteria(tpot_ms=30)), BAD[figure], ONE_PERCENT, windows=450, seed=s) for s in range(3)]

    assert [trial.verdict.figure for trial in trials] == [figure] * 3
    assert sorted(trial.canary_requests for trial in trials)[1] <= SEEN_IN_A_MINUTE


def test_latency_is_found_without_a_target_too() -> None:
    trial = run_stage(Judge(Criteria()), Version(tpot_s=0.041), ONE_PERCENT, windows=100, seed=1)

    assert trial.verdict.figure == "time per output token"
    assert "baseline 2" in trial.verdict.why


def test_mirrored_requests_find_wrong_weights_and_errors_before_clients_do() -> None:
    traffic = Traffic(per_window=100, share=0.01, mirrored=0.1)
    wrong = run_stage(Judge(Criteria()), Version(differ_rate=0.95), traffic, windows=60, seed=1)
    failing = run_stage(Judge(Criteria()), Version(error_rate=0.03), traffic, windows=60, seed=1)

    assert wrong.verdict.figure in ("greedy output", "logprob drift")
    assert failing.verdict.figure == "errors"
    assert not failing.verdict.why.startswith("errors: 0")
    assert max(wrong.canary_requests, failing.canary_requests) < 60


def test_changed_output_is_no_fault_where_it_was_said_to_change() -> None:
    traffic = Traffic(per_window=50, share=0.1, mirrored=0.1)

    trial = run_stage(Judge(Criteria(diff_rate=1.0)), Version(differ_rate=0.95), traffic, windows=20, seed=1)

    assert trial.verdict.call is Call.PASS


def test_nothing_fails_before_the_least_sample() -> None:
    judge = Judge(Criteria(tpot_ms=30, min_to_fail=10))
    slow = Observation(True, tpot_s=9.0, output_tokens=10, cost_tokens=10)

    judge.observe([slow] * 9)
    assert judge.verdict().call is Call.CONTINUE
    judge.observe([slow])

    assert judge.verdict().call is Call.FAIL


def test_nothing_passes_before_the_sample_that_a_verdict_needs() -> None:
    judge = Judge(Criteria(min_requests=50))

    trial = run_stage(judge, GOOD, Traffic(49, 1.0), windows=1, seed=1)

    assert trial.verdict.call is Call.CONTINUE
    assert trial.verdict.why == "49 of 50 requests that a verdict needs were seen"


def test_a_suspicion_keeps_a_canary_from_more_traffic() -> None:
    judge = Judge(Criteria(min_requests=5))

    judge.observe([Observation(True, failed=index < 2) for index in range(40)])
    judge.observe([Observation(False) for _ in range(400)] + [Observation(True)])

    assert judge.verdict().call is Call.CONTINUE
    assert judge.verdict().why.startswith("suspicion, not yet proof: errors: 2 of 41")


def test_rare_errors_are_no_reason_even_if_the_baseline_has_none() -> None:
    judge = Judge(Criteria())

    for window in range(100):
        judge.observe([Observation(False)] * 100 + [Observation(True, failed=window % 50 == 0)] * 1)
        judge.observe([Observation(True)] * 30)

    assert judge.verdict().call is Call.PASS


def test_a_baseline_that_is_as_bad_is_no_fault_of_the_canary() -> None:
    judge = Judge(Criteria(error_rate=0.2))

    for window in range(60):
        judge.observe([Observation(window % 2 == 0, failed=i % 10 == 0) for i in range(20)])

    assert judge.verdict().call is Call.PASS


def test_a_histogram_tells_quantiles_to_within_its_buckets() -> None:
    histogram = Histogram()
    for value in range(1, 1_001):
        histogram.add(value)

    assert histogram.quantile(0.5) == pytest.approx(500, rel=0.03)
    assert histogram.quantile(0.95) == pytest.approx(950, rel=0.03)
    assert Histogram().quantile(0.5) is None
    assert Histogram(histogram.buckets).count == 1_000


def test_every_figure_is_told_in_words() -> None:
    judge = Judge(Criteria(ttft_ms=500, tpot_ms=30))

    told = {check.role: (check.told(judge.canary), check.allowed) for check in judge.checks}

    assert set(told) == set(Role)
