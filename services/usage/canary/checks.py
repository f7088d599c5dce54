"""One sequential test a figure: which requests count, what counts as an event, and how it is told. Pure; for the judge.

A latency or a length becomes an event by lying above a common quantile (against the baseline) or above a bound (against
a target). The tests assume nothing about the shape of a distribution.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterable, Sequence

from services.usage.canary.evidence import Counts, Evidence, ExcessEvidence, RateEvidence, above, log_mean
from services.usage.canary.observations import Observation, Tally

QUANTILES = (0.5, 0.9)
# Values of one version that wait for one of the other to be compared with: the first ones stand for all.
MAX_WAITING = 1_000
# Failures this rare are no reason to withdraw a version, whatever the baseline does.
FLOOR_RATE = 0.001
FLOOR_ODDS_RATIO = 2.0


class Role(enum.Enum):
    """A figure, by the name that people read."""

    TTFT = "time to first token"
    TPOT = "time per output token"
    ERRORS = "errors"
    REFUSALS = "refusals"
    LENGTH = "output length"
    COST = "cost"
    OUTPUT = "greedy output"
    DRIFT = "logprob drift"


class Check(abc.ABC):
    """One test. `count` are the canary's requests that it has seen."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.count = 0

    @property
    def name(self) -> str:
        return self.role.value

    @property
    @abc.abstractmethod
    def allowed(self) -> str:
        """What would have been all right, in words."""

    @property
    @abc.abstractmethod
    def parts(self) -> Sequence[Evidence]:
        """All that must be kept to go on after a restart, besides `count`."""

    @property
    @abc.abstractmethod
    def log_value(self) -> float:
        """Logarithm of the evidence that the canary is worse than allowed."""

    @abc.abstractmethod
    def observe(self, seen: Sequence[Observation]) -> None:
        """Take one window in."""

    def told(self, tally: Tally) -> str:
        """The figure of one version, in words."""
        match self.role:
            case Role.TTFT:
                return _milliseconds(tally.ttft.quantile(0.5), tally.ttft.quantile(0.95))
            case Role.TPOT:
                return _milliseconds(tally.tpot.quantile(0.5), tally.tpot.quantile(0.95))
            case Role.LENGTH:
                return _tokens(tally.output.quantile(0.5))
            case Role.COST:
                return _tokens(tally.cost.quantile(0.5))
            case Role.ERRORS:
                return f"{tally.failed} of {tally.requests + tally.mirrored}"
            case Role.REFUSALS:
                return f"{tally.refused} of {tally.requests}"
            case Role.OUTPUT:
                return f"{tally.differing} of {tally.compared} mirrored answers differ"
            case Role.DRIFT:
                return f"{tally.drift.quantile(0.5) or 0.0:.2f} nats at the median"


class BaselineCheck(Check):
    """A test that compares with the baseline."""


class LargerThanBaseline(BaselineCheck):
    """A figure's values are no larger than `ratio` times the baseline's plus `slack`; with `smaller`, nor smaller."""

    def __init__(self, role: Role, ratio: float, *, slack: float, smaller: bool = False) -> None:
        super().__init__(role)
        self._ratio = ratio
        self._slack = slack
        self._sides = (1, -1) if smaller else (1,)
        self._parts = [ExcessEvidence(1.0) for _ in self._sides for _ in QUANTILES]
        self._canary: list[float] = []
        self._baseline: list[float] = []

    @property
    def allowed(self) -> str:
        sides = f"{self._ratio:g} times as much" + (" or as little" if len(self._sides) == 2 else "")
        return f"allowed is {sides}"

    @property
    def parts(self) -> Sequence[Evidence]:
        return self._parts

    @property
    def log_value(self) -> float:
        return log_mean([part.log_value for part in self._parts])

    def observe(self, seen: Sequence[Observation]) -> None:
        for each in seen:
            value = value_of(self.role, each)
            waiting = self._canary if each.canary else self._baseline
            if value is not None and len(waiting) < MAX_WAITING:
                waiting.append(value)
                self.count += each.canary
        if not self._canary or not self._baseline:
            return
        parts = iter(self._parts)
        for side in self._sides:
            shifted = [side * self._shifted(value, side) for value in self._canary]
            signed = [side * value for value in self._baseline]
            for quantile in QUANTILES:
                next(parts).add(*above(shifted, signed, quantile))
        self._canary, self._baseline = [], []

    def _shifted(self, value: float, side: int) -> float:
        # The allowance is taken off the canary, so that "worse than allowed" becomes "worse".
        return (value - self._slack) / self._ratio if side > 0 else (value + self._slack) * self._ratio


class OftenerThanBaseline(BaselineCheck):
    """An event is at most twice as likely (in odds) as in the baseline, or rarer than once in a thousand."""

    def __init__(self, role: Role) -> None:
        super().__init__(role)
        self._excess = ExcessEvidence(FLOOR_ODDS_RATIO)
        self._floor = RateEvidence(FLOOR_RATE)
        self._canary = self._baseline = Counts(0, 0)

    @property
    def allowed(self) -> str:
        return f"allowed is {FLOOR_ODDS_RATIO:g} times as often"

    @property
    def parts(self) -> Sequence[Evidence]:
        return (self._excess, self._floor)

    @property
    def log_value(self) -> float:
        # Against "not oftener, or too rare to matter": the smaller of two e-processes is one for either being true.
        return min(self._excess.log_value, self._floor.log_value)

    def observe(self, seen: Sequence[Observation]) -> None:
        events = [(each.canary, event) for each in seen if (event := event_of(self.role, each)) is not None]
        canary = _counts(event for is_canary, event in events if is_canary)
        self.count += canary.total
        self._floor.add(canary)
        self._canary += canary
        self._baseline += _counts(event for is_canary, event in events if not is_canary)
        if self._canary.total and self._baseline.total:
            self._excess.add(self._canary, self._baseline)
            self._canary = self._baseline = Counts(0, 0)


class OftenerThanTarget(Check):
    """An event happens in a share of at most `limit`; with a `bound` the event is a value above it."""

    def __init__(self, role: Role, limit: float, *, bound: float | None = None) -> None:
        super().__init__(role)
        self._limit = limit
        self._bound = bound
        self._evidence = RateEvidence(limit)

    @property
    def allowed(self) -> str:
        if self._bound is None:
            return f"the target is {100 * self._limit:g} %"
        unit = f"{self._bound:g} nats" if self.role is Role.DRIFT else f"{1000 * self._bound:g} ms"
        return f"the target is {unit} for {100 * (1 - self._limit):g} % of requests"

    @property
    def parts(self) -> Sequence[Evidence]:
        return (self._evidence,)

    @property
    def log_value(self) -> float:
        return self._evidence.log_value

    def observe(self, seen: Sequence[Observation]) -> None:
        events = [self._event(each) for each in seen if each.canary]
        counts = _counts(event for event in events if event is not None)
        self._evidence.add(counts)
        self.count += counts.total

    def _event(self, seen: Observation) -> bool | None:
        if self._bound is None:
            return event_of(self.role, seen)
        value = value_of(self.role, seen)
        return None if value is None else value > self._bound


def value_of(role: Role, seen: Observation) -> float | None:
    """The figure of one request; latencies and lengths of mirrored ones are the batch class's and do not count."""
    if role is Role.DRIFT:
        return seen.drift
    if seen.shadow:
        return None
    match role:
        case Role.TTFT:
            return seen.ttft_s
        case Role.TPOT:
            return seen.tpot_s
        case Role.LENGTH:
            return seen.output_tokens
        case _:
            return seen.cost_tokens


def event_of(role: Role, seen: Observation) -> bool | None:
    """Whether it happened to this request; None where it cannot."""
    match role:
        case Role.ERRORS:
            return seen.failed
        case Role.REFUSALS:
            return None if seen.shadow else seen.refused
        case _:
            return seen.differs


def _counts(events: Iterable[bool]) -> Counts:
    listed = list(events)
    return Counts(len(listed), sum(listed))


def _milliseconds(median: float | None, high: float | None) -> str:
    if median is None or high is None:
        return "unknown"
    return f"{1000 * median:.1f} ms at the median, {1000 * high:.1f} at the 95th percentile"


def _tokens(median: float | None) -> str:
    return "unknown" if median is None else f"{median:.0f} tokens at the median"
