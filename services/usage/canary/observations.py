"""What one finished request says about its version, and sums of many. Pure; used by the judge and for plots."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

_STEP = math.log(1.05)


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """One request that ended. A figure that it does not have is None.

    `ttft_s` runs from admission to the first token, `tpot_s` is decode time over tokens after the first. `failed` is a
    fault of the platform or the version, `refused` an end without a token and without a fault (expired in the queue, an
    empty answer). `output_tokens` and `cost_tokens` (prompt and output) are of completed requests. A mirrored request
    (`shadow`) may say whether its greedy tokens `differ` from the primary's within the compared positions, and by how
    much the logprobs of their common tokens `drift` (mean absolute difference, nats).
    """

    canary: bool
    shadow: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    failed: bool = False
    refused: bool = False
    output_tokens: int | None = None
    cost_tokens: int | None = None
    differs: bool | None = None
    drift: float | None = None


class Histogram:
    """Counts of positive values in buckets 5 % wide. Merges exactly; quantiles are right to 2.5 %."""

    def __init__(self, buckets: Mapping[int, int] | None = None) -> None:
        self.buckets = dict(buckets or {})

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    def add(self, value: float) -> None:
        """Take one value in; one that is not above 0 counts as the smallest."""
        bucket = round(math.log(max(value, 1e-6)) / _STEP)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def quantile(self, share: float) -> float | None:
        """The value that this share of all does not exceed; None of an empty histogram."""
        rank = share * self.count
        for bucket in sorted(self.buckets):
            rank -= self.buckets[bucket]
            if rank <= 0:
                return math.exp(bucket * _STEP)
        return None


@dataclasses.dataclass(slots=True)
class Tally:
    """What is known of one version: for words and plots, never for a verdict."""

    requests: int = 0
    failed: int = 0
    refused: int = 0
    mirrored: int = 0
    compared: int = 0
    differing: int = 0
    ttft: Histogram = dataclasses.field(default_factory=Histogram)
    tpot: Histogram = dataclasses.field(default_factory=Histogram)
    output: Histogram = dataclasses.field(default_factory=Histogram)
    cost: Histogram = dataclasses.field(default_factory=Histogram)
    drift: Histogram = dataclasses.field(default_factory=Histogram)

    def add(self, seen: Observation) -> None:
        """Count one request; a mirrored one counts apart, its failure with the others, its latency nowhere."""
        self.failed += seen.failed
        if seen.shadow:
            self.mirrored += 1
            self.compared += seen.differs is not None
            self.differing += seen.differs is True
        else:
            self.requests += 1
            self.refused += seen.refused
        for histogram, value in self._measured(seen):
            if value is not None:
                histogram.add(value)

    def _measured(self, seen: Observation) -> Iterator[tuple[Histogram, float | None]]:
        if seen.shadow:
            yield self.drift, seen.drift
            return
        yield self.ttft, seen.ttft_s
        yield self.tpot, seen.tpot_s
        yield self.output, seen.output_tokens
        yield self.cost, seen.cost_tokens
