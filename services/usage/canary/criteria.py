"""What a canary must hold, and what a rollout says about it by name. Pure; checked where a rollout starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from services.common.errors import InvalidRequest
from services.common.routes import Rollout


@dataclasses.dataclass(frozen=True, slots=True)
class Criteria:
    """What a canary must hold. Times in milliseconds; rates and shares in [0, 1]; None asks for nothing.

    A share of `attainment` of the requests must meet a latency target. Against the baseline a figure may be `*_ratio`
    times as high (length also as low), failures twice as likely in odds. Mirrored greedy answers may differ in a share
    of `diff_rate` (1: any output may change) or drift by more than `drift_nats` in the same share. No stage passes with
    fewer than `min_requests` of the canary, no figure fails with fewer than `min_to_fail`.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    attainment: float = 0.95
    error_rate: float = 0.02
    ttft_ratio: float = 1.5
    tpot_ratio: float = 1.2
    length_ratio: float = 1.3
    cost_ratio: float = 1.3
    diff_rate: float = 0.2
    drift_nats: float = 0.5
    min_requests: float = 50
    min_to_fail: float = 10
    false_alarm_rate: float = 0.01
    stages: int = 4


NAMES = tuple(field.name for field in dataclasses.fields(Criteria) if field.name != "stages")
_RANGES = {
    **dict.fromkeys(("ttft_ms", "tpot_ms"), (0.001, 3_600_000)),
    "attainment": (0.5, 0.9999),
    "error_rate": (0.0001, 0.9999),
    **dict.fromkeys(("ttft_ratio", "tpot_ratio", "length_ratio", "cost_ratio"), (1.0, 100.0)),
    "diff_rate": (0.001, 1.0),
    "drift_nats": (0.001, 100.0),
    **dict.fromkeys(("min_requests", "min_to_fail"), (1, 1_000_000)),
    "false_alarm_rate": (1e-9, 0.5),
}


def check_criteria(asked: Mapping[str, float]) -> None:
    """Raises InvalidRequest for a name that is none, or a value out of its range."""
    for name, value in asked.items():
        if name not in NAMES:
            raise InvalidRequest(
                f"There is no criterion `{name[:64]}`; there are {', '.join(NAMES)}.", param="criteria"
            )
        low, high = _RANGES[name]
        if not low <= value <= high:
            raise InvalidRequest(f"{name} lies between {low:g} and {high:g}.", param="criteria")


def criteria_of(rollout: Rollout) -> Criteria:
    """A rollout's criteria; names that only a newer release knows ask for nothing."""
    known = {name: value for name, value in rollout.criteria.items() if name in NAMES}
    return Criteria(**known, stages=len(rollout.step_percents))
