"""Evidence that grows with each request and may be looked at at any time: e-processes. Pure; used by the judge only.

An e-process is a non-negative process whose expected value never exceeds 1 while the null hypothesis holds, whenever
one stops. By Ville's inequality it reaches 1/alpha with a probability of at most alpha, over all looks together. Both
processes here are mixtures of likelihood ratios over some alternatives (Robbins, 1970; the mSPRT of Johari, Pekelis and
Walsh, "Always Valid Inference", 2015, arXiv:1512.04922; Ramdas, Grünwald, Vovk and Shafer, "Game-Theoretic Statistics
and Safe Anytime-Valid Inference", 2023, arXiv:2210.01948).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

# How many times the odds of the null hypothesis an alternative has.
ODDS_RATIOS = (2.0, 6.0, 24.0, 128.0, 2_048.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """`total` requests, `events` of them as asked for. 0 <= events <= total."""

    total: int
    events: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.total + other.total, self.events + other.events)


class Evidence:
    """Natural logarithms of likelihood ratios, one an alternative. `logs` continues where an earlier one stood."""

    def __init__(self, logs: Sequence[float] = ()) -> None:
        self.logs = list(logs) if logs else [0.0] * len(ODDS_RATIOS)

    @property
    def log_value(self) -> float:
        """Logarithm of the mixture; above log(1/alpha) the null hypothesis is rejected at level alpha."""
        return log_mean(self.logs)


class RateEvidence(Evidence):
    """Against: an event happens with a probability of at most `limit` (0 < limit < 1), whatever happened before."""

    def __init__(self, limit: float, logs: Sequence[float] = ()) -> None:
        super().__init__(logs)
        self._steps = [self._step(limit, ratio) for ratio in ODDS_RATIOS]

    def add(self, counts: Counts) -> None:
        """Take some requests in."""
        for index, (event, other) in enumerate(self._steps):
            self.logs[index] += counts.events * event + (counts.total - counts.events) * other

    @staticmethod
    def _step(limit: float, ratio: float) -> tuple[float, float]:
        """Log likelihood ratios of an event and of none; its mean is at most 1 for every rate up to the limit."""
        odds = ratio * limit / (1 - limit)
        rate = odds / (1 + odds)
        return math.log(rate / limit), math.log((1 - rate) / (1 - limit))


class ExcessEvidence(Evidence):
    """Against: an event is no likelier in the canary than `ratio` times (in odds) what it is in the baseline.

    Each window is judged by itself, given how many requests of both had an event: under the null hypothesis with equal
    odds the canary's share of them is hypergeometric, else Fisher's noncentral one, and likelihood ratios of the two
    multiply over windows. So the common rate may drift with load, and shares of traffic may change, at no cost.
    """

    def __init__(self, ratio: float, logs: Sequence[float] = ()) -> None:
        super().__init__(logs)
        self._null = math.log(ratio)

    def add(self, canary: Counts, baseline: Counts) -> None:
        """Take one window in. A window without requests of both, or where all or none had an event, says nothing."""
        events = canary.events + baseline.events
        support = range(max(0, events - baseline.total), min(canary.total, events) + 1)
        if len(support) < 2:
            return
        ways = [_log_choose(canary.total, i) + _log_choose(baseline.total, events - i) for i in support]
        null = self._log_probability(ways, support, canary.events, self._null)
        for index, ratio in enumerate(ODDS_RATIOS):
            log_odds = self._null + math.log(ratio)
            self.logs[index] += self._log_probability(ways, support, canary.events, log_odds) - null

    @staticmethod
    def _log_probability(ways: Sequence[float], support: range, seen: int, log_odds: float) -> float:
        terms = [way + i * log_odds for way, i in zip(ways, support, strict=True)]
        return terms[seen - support.start] - _log_sum(terms)


def above(canary: Sequence[float], baseline: Sequence[float], quantile: float) -> tuple[Counts, Counts]:
    """How many values of each lie above the common quantile: events whose labels are exchangeable where both are alike.

    A canary whose values are stochastically smaller has fewer of them, so the evidence stays valid against "no larger".
    """
    pooled = sorted((*canary, *baseline))
    if not pooled:
        return Counts(0, 0), Counts(0, 0)
    bound = pooled[min(len(pooled) - 1, int(quantile * len(pooled)))]
    return _exceeding(canary, bound), _exceeding(baseline, bound)


def _exceeding(values: Sequence[float], bound: float) -> Counts:
    # At the bound itself counts too: a window of two values has an event then.
    return Counts(len(values), sum(value >= bound for value in values))


def log_mean(logs: Sequence[float]) -> float:
    """Logarithm of the mean of the exponentials: the mean of e-processes is one."""
    return _log_sum(logs) - math.log(len(logs))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_sum(logs: Sequence[float]) -> float:
    highest = max(logs)
    return highest + math.log(sum(math.exp(value - highest) for value in logs))
