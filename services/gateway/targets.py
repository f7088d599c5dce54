"""Latency targets by class and length class, and whether a request met them: its goodput. Pure; called at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from google.protobuf import duration_pb2
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

CLASSES = ("interactive", "batch", "*")
LENGTHS = ("short", "medium", "long", "*")
FORM = "expected class/length=ttft:tpot:e2e in milliseconds, for example interactive/short=500:50:10000"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The most that a request may take, in seconds; None is not looked at."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Seconds:
    """What one client waited; None is what did not happen."""

    ttft: float | None
    tpot: float | None
    e2e: float


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class LatencyTargets:
    """Targets by (class, length class), `*` for all others; the class counts more than the length."""

    by_class: Mapping[tuple[str, str], Target] = dataclasses.field(default_factory=dict)

    def of(self, priority_class: str, length_class: str) -> Target | None:
        """The target of one request; None where there is none."""
        wanted = ((priority_class, length_class), (priority_class, "*"), ("*", length_class), ("*", "*"))
        return next((self.by_class[key] for key in wanted if key in self.by_class), None)

    def __repr__(self) -> str:
        return ",".join(
            f"{name}/{length}={':'.join(_text(value) for value in dataclasses.astuple(target))}"
            for (name, length), target in self.by_class.items()
        )


def parse_targets(text: str) -> LatencyTargets:
    """`class/length=ttft:tpot:e2e`, comma-separated, milliseconds, an empty place for no target. Raises ValueError."""
    found: dict[tuple[str, str], Target] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        names, _, values = part.partition("=")
        priority_class, _, length = names.strip().partition("/")
        numbers = values.split(":")
        if priority_class not in CLASSES or length not in LENGTHS or len(numbers) != len(dataclasses.fields(Target)):
            raise ValueError(f"{part!r} is not a target; {FORM}")
        if (priority_class, length) in found:
            raise ValueError(f"{priority_class}/{length} is given twice")
        found[priority_class, length] = Target(*(_milliseconds(number, part) for number in numbers))
    return LatencyTargets(found)


def latency_of(
    state: common_pb2.TerminalState.ValueType, seconds: Seconds, target: Target | None
) -> usage_event_pb2.Latency:
    """What the usage event says. A client that left says nothing of the targets."""
    latency = usage_event_pb2.Latency(whole=_duration(seconds.e2e))
    if seconds.ttft is not None:
        latency.first_token.CopyFrom(_duration(seconds.ttft))
    if seconds.tpot is not None:
        latency.per_token.CopyFrom(_duration(seconds.tpot))
    if target is not None and state != common_pb2.TERMINAL_STATE_CANCELLED:
        latency.targets_met = state == common_pb2.TERMINAL_STATE_COMPLETED and _meets(seconds, target)
    return latency


def _meets(seconds: Seconds, target: Target) -> bool:
    pairs = ((seconds.ttft, target.ttft_s), (seconds.tpot, target.tpot_s), (seconds.e2e, target.e2e_s))
    return all(took is None or most is None or took <= most for took, most in pairs)


def _milliseconds(text: str, part: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{part!r} is not a target; {FORM}") from None
    if not 0.0 < value < 1e9:
        raise ValueError(f"{part!r} has a target that is not above 0")
    return value / 1000


def _text(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:g}"


def _duration(seconds: float) -> duration_pb2.Duration:
    whole = int(max(0.0, seconds))
    return duration_pb2.Duration(seconds=whole, nanos=int((max(0.0, seconds) - whole) * 1e9))
