"""Both versions' latency over time, in spans that grow with the rollout, so that a plot never has too many. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from services.usage.canary.observations import Observation, Tally

MAX_POINTS = 120
FIRST_SPAN_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """One version in one span. Latencies in seconds: the median and the 95th percentile, None without requests."""

    requests: int = 0
    failed: int = 0
    ttft: tuple[float, float] | None = None
    tpot: tuple[float, float] | None = None

    @classmethod
    def of(cls, tally: Tally) -> Figures:
        return cls(
            tally.requests,
            tally.failed,
            _two(tally.ttft.quantile(0.5), tally.ttft.quantile(0.95)),
            _two(tally.tpot.quantile(0.5), tally.tpot.quantile(0.95)),
        )

    def merged(self, later: Figures) -> Figures:
        """Both spans as one: medians by the mean, weighted by requests, high percentiles by the larger one."""

        def latency(one: tuple[float, float] | None, other: tuple[float, float] | None) -> tuple[float, float] | None:
            if one is None or other is None:
                return one if other is None else other
            total = max(1, self.requests + later.requests)
            return (one[0] * self.requests + other[0] * later.requests) / total, max(one[1], other[1])

        return Figures(
            self.requests + later.requests,
            self.failed + later.failed,
            latency(self.ttft, later.ttft),
            latency(self.tpot, later.tpot),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One span from `start` (unix seconds) on."""

    start: float
    baseline: Figures
    candidate: Figures


class Timeline:
    """Spans of equal length since the rollout began; twice as long once there are too many."""

    def __init__(self, span_s: float = FIRST_SPAN_S, points: Sequence[Point] = ()) -> None:
        self.span_s = span_s
        self.points = list(points)
        self._tallies = Tally(), Tally()
        self._start: float | None = None

    def add(self, seen: Sequence[Observation], now: float) -> None:
        """Count requests that ended by `now`; a span is closed by the first call after its end."""
        start = now - now % self.span_s
        if self._start is not None and start > self._start:
            baseline, candidate = self._tallies
            self.points.append(Point(self._start, Figures.of(baseline), Figures.of(candidate)))
            self._tallies = Tally(), Tally()
            if len(self.points) > MAX_POINTS:
                self._widen()
                start = now - now % self.span_s
        self._start = start
        for each in seen:
            if not each.shadow:
                self._tallies[each.canary].add(each)

    def _widen(self) -> None:
        self.span_s *= 2
        merged: list[Point] = []
        for point in self.points:
            start = point.start - point.start % self.span_s
            if merged and merged[-1].start == start:
                last = merged.pop()
                both = last.baseline.merged(point.baseline), last.candidate.merged(point.candidate)
            else:
                both = point.baseline, point.candidate
            merged.append(Point(start, *both))
        self.points = merged


def _two(median: float | None, high: float | None) -> tuple[float, float] | None:
    return None if median is None or high is None else (median, high)
