"""Where the time of a cold start goes: every moment from the load of the model to ready belongs to one stage.

Told stage by stage by whoever ends one; shown in the line `worker_ready`. Not thread-safe: one stage at a time.
"""

from __future__ import annotations

from services.common.clock import Clock, SystemClock


class StageClock:
    """Starts at once; each stage is what lies between the end of the stage before it and its own."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self._mark = self._clock.monotonic()
        self._seconds: dict[str, float] = {}

    def ended(self, stage: str) -> None:
        """All since the last mark was `stage`; a stage told twice is the sum of both."""
        now = self._clock.monotonic()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._mark
        self._mark = now

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage in their order, rounded to a millisecond, and their `total`."""
        shown = {stage: round(spent, 3) for stage, spent in self._seconds.items()}
        return shown | {"total": round(sum(self._seconds.values()), 3)}
