"""Simulated requests of a baseline and of a canary, good or bad in one way, for the judge."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from services.usage.canary.judge import Call, Judge, Verdict
from services.usage.canary.observations import Observation


@dataclasses.dataclass(frozen=True)
class Version:
    """How a version behaves: medians of lognormal figures (seconds, tokens), and chances of events."""

    ttft_s: float = 0.2
    tpot_s: float = 0.024
    output_tokens: float = 100.0
    error_rate: float = 0.001
    empty_rate: float = 0.002
    differ_rate: float = 0.02

    def request(self, rng: random.Random, *, canary: bool) -> Observation:
        """One request of a client."""
        ttft = self.ttft_s * rng.lognormvariate(0, 0.6)
        if rng.random() < self.error_rate:
            return Observation(canary, ttft_s=ttft, failed=True)
        if rng.random() < self.empty_rate:
            return Observation(canary, refused=True)
        tokens = max(1, int(self.output_tokens * rng.lognormvariate(0, 0.8)))
        tpot = self.tpot_s * rng.lognormvariate(0, 0.08)
        return Observation(canary, ttft_s=ttft, tpot_s=tpot, output_tokens=tokens, cost_tokens=tokens + 300)

    def mirrored(self, rng: random.Random) -> Observation:
        """One mirrored request of the canary, greedy."""
        differs = rng.random() < self.differ_rate
        drift = abs(rng.gauss(3.0 if differs else 0.01, 0.3 if differs else 0.01))
        return Observation(True, shadow=True, failed=rng.random() < self.error_rate, differs=differs, drift=drift)


GOOD = Version()


@dataclasses.dataclass(frozen=True)
class Trial:
    """How a simulated stage went; `canary_requests` are those that clients sent to the canary until then."""

    verdict: Verdict
    canary_requests: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Requests a window, the canary's share of them, and the share that is mirrored to it besides."""

    per_window: int = 50
    share: float = 0.1
    mirrored: float = 0.0

    def window(self, rng: random.Random, canary: Version) -> Iterator[Observation]:
        """What ends in one window."""
        for _ in range(self.per_window):
            is_canary = rng.random() < self.share
            yield (canary if is_canary else GOOD).request(rng, canary=is_canary)
            if not is_canary and rng.random() < self.mirrored:
                yield canary.mirrored(rng)


def run_stage(judge: Judge, canary: Version, traffic: Traffic, *, windows: int, seed: int) -> Trial:
    """Judge after every window until the canary fails or the windows are over."""
    rng = random.Random(seed)
    for _ in range(windows):
        judge.observe(list(traffic.window(rng, canary)))
        if judge.verdict().call is Call.FAIL:
            break
    return Trial(judge.verdict(), judge.canary.requests)
