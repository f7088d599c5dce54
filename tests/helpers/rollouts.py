"""Simulated traffic of one route in simulated time: the real pick, the real usage events, a fleet that is made up."""

from __future__ import annotations

import dataclasses
import random

from google.protobuf import timestamp_pb2
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_types import SHADOW_TENANT
from services.common.routes import RouteTable, Target
from tests.helpers.canaries import GOOD, Version

OLD, NEW = Target("echo", "1"), Target("echo", "2")


def stamp(seconds: float) -> timestamp_pb2.Timestamp:
    made = timestamp_pb2.Timestamp()
    made.FromMicroseconds(round(seconds * 1e6))
    return made


@dataclasses.dataclass
class Fleet:
    """Answers requests of `echo` as `versions` say; counts whom they touched and when."""

    versions: dict[Target, Version]
    seed: int
    requests: int = 0
    touched: int = 0
    first_touch: float | None = None
    last_touch: float | None = None

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def serve(self, table: RouteTable, count: int, now: float) -> list[usage_event_pb2.UsageEvent]:
        """The events of `count` requests that came in at `now`, and of those that were mirrored."""
        events = []
        for _ in range(count):
            self.requests += 1
            key = f"{self.seed}-{self.requests}"
            target = table.pick("echo", tenant="acme", key=key, usable=lambda _: True)
            assert target is not None
            if target == NEW:
                self.touched += 1
                self.first_touch = now if self.first_touch is None else self.first_touch
                self.last_touch = now
            events.append(self._event(target, key, now))
            shadow = table.routes["echo"].shadow
            if shadow is not None and target != shadow.target and self._rng.random() < shadow.share:
                events.append(self._mirrored(shadow.target, key, now))
        return events

    def _event(self, target: Target, key: str, now: float) -> usage_event_pb2.UsageEvent:
        seen = self.versions.get(target, GOOD).request(self._rng, canary=False)
        tokens = seen.output_tokens or 0
        first = now + (seen.ttft_s or 0.1)
        event = self._bare(target, key, now)
        event.tenant = "acme"
        event.times.first_token_time.CopyFrom(stamp(first))
        event.times.end_time.CopyFrom(stamp(first + (seen.tpot_s or 0.0) * max(0, tokens - 1)))
        event.delivered.prompt_token_count = 300
        event.delivered.completion_token_count = tokens
        event.choice_token_counts.append(tokens)
        if seen.failed:
            event.terminal_state = common_pb2.TERMINAL_STATE_FAILED
            event.error_reason = "ENGINE_ERROR"
        return event

    def _mirrored(self, target: Target, key: str, now: float) -> usage_event_pb2.UsageEvent:
        seen = self.versions.get(target, GOOD).mirrored(self._rng)
        event = self._bare(target, f"{key}-shadow", now)
        event.tenant = SHADOW_TENANT
        event.times.end_time.CopyFrom(stamp(now + 1))
        if seen.failed:
            event.terminal_state = common_pb2.TERMINAL_STATE_FAILED
            event.error_reason = "ENGINE_ERROR"
        event.shadow.primary_request_id = key
        event.shadow.compared_token_count = 40
        event.shadow.equal_token_count = 1 if seen.differs else 40
        if seen.drift is not None:
            event.shadow.drift_nats = seen.drift
        return event

    def _bare(self, target: Target, key: str, now: float) -> usage_event_pb2.UsageEvent:
        event = usage_event_pb2.UsageEvent(
            request_id=key,
            model=common_pb2.ModelRef(model=target.model, version=target.version),
            terminal_state=common_pb2.TERMINAL_STATE_COMPLETED,
            priority_class=common_pb2.PRIORITY_CLASS_INTERACTIVE,
        )
        event.times.admit_time.CopyFrom(stamp(now))
        event.times.start_time.CopyFrom(stamp(now))
        return event
