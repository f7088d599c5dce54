"""Judges a new version (the canary) by its requests, against the old one (the baseline) and against targets. Pure.

Every figure has a sequential test of its own (evidence.py), so verdicts may be asked for after every request; all
together they call a good canary bad with a probability of at most `Criteria.false_alarm_rate` in a whole rollout. One
`Judge` judges one stage. Called by the rollout; never moves traffic itself.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

from services.usage.canary.checks import (
    BaselineCheck,
    Check,
    LargerThanBaseline,
    OftenerThanBaseline,
    OftenerThanTarget,
    Role,
)
from services.usage.canary.criteria import Criteria
from services.usage.canary.observations import Observation, Tally


class Call(enum.Enum):
    """What the judge says."""

    CONTINUE = "continue"
    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A call and why, in words for people. `figure` is the name of the one that failed."""

    call: Call
    why: str
    figure: str = ""


class Judge:
    """Judges one stage. `observe` takes what ended since the last call; order inside does not matter."""

    def __init__(self, criteria: Criteria) -> None:
        self.criteria = criteria
        self.canary = Tally()
        self.baseline = Tally()
        self.checks: list[Check] = _checks(criteria)
        self._failures = sum(check.role is Role.ERRORS for check in self.checks)

    def observe(self, seen: Sequence[Observation]) -> None:
        """Take some requests in: one window of every test."""
        for each in seen:
            (self.canary if each.canary else self.baseline).add(each)
        for check in self.checks:
            check.observe(seen)

    def verdict(self) -> Verdict:
        """FAIL once a figure's evidence suffices, PASS once there is a sample and no suspicion, else CONTINUE."""
        for check in self.checks:
            if check.count >= self.criteria.min_to_fail and check.log_value >= self._log_bound(check):
                return Verdict(Call.FAIL, self._why(check), check.name)
        if self.canary.requests < self.criteria.min_requests:
            have, need = self.canary.requests, self.criteria.min_requests
            return Verdict(Call.CONTINUE, f"{have} of {need:g} requests that a verdict needs were seen")
        # One in e**3 = 20 by chance: not enough to fail, too much to send it more traffic.
        suspect = max(self.checks, key=lambda check: check.log_value)
        if suspect.log_value >= 3.0:
            return Verdict(Call.CONTINUE, f"suspicion, not yet proof: {self._why(suspect)}", suspect.name)
        return Verdict(Call.PASS, f"no figure is worse after {self.canary.requests} requests")

    def _log_bound(self, check: Check) -> float:
        # Errors, which cost users most, get half of what may go wrong; the other figures share the rest.
        equals = self._failures if check.role is Role.ERRORS else len(self.checks) - self._failures
        return math.log(2 * equals * self.criteria.stages / self.criteria.false_alarm_rate)

    def _why(self, check: Check) -> str:
        against = f" (baseline {check.told(self.baseline)})" if isinstance(check, BaselineCheck) else ""
        return f"{check.name}: {check.told(self.canary)}{against}, {check.allowed}; {check.count} requests"


def _checks(asked: Criteria) -> list[Check]:
    checks: list[Check] = [
        LargerThanBaseline(Role.TTFT, asked.ttft_ratio, slack=0.02),
        LargerThanBaseline(Role.TPOT, asked.tpot_ratio, slack=0.001),
        LargerThanBaseline(Role.LENGTH, asked.length_ratio, slack=2, smaller=True),
        LargerThanBaseline(Role.COST, asked.cost_ratio, slack=2),
        OftenerThanBaseline(Role.ERRORS),
        OftenerThanBaseline(Role.REFUSALS),
        OftenerThanTarget(Role.ERRORS, asked.error_rate),
    ]
    miss = 1 - asked.attainment
    if asked.ttft_ms is not None:
        checks.append(OftenerThanTarget(Role.TTFT, miss, bound=asked.ttft_ms / 1000))
    if asked.tpot_ms is not None:
        checks.append(OftenerThanTarget(Role.TPOT, miss, bound=asked.tpot_ms / 1000))
    if asked.diff_rate < 1:
        checks.append(OftenerThanTarget(Role.OUTPUT, asked.diff_rate))
        checks.append(OftenerThanTarget(Role.DRIFT, asked.diff_rate, bound=asked.drift_nats))
    return checks
