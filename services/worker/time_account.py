"""Where a worker's time goes: every moment since the start is either busy or idle. Pure: the engine loop measures.

Written by the engine's thread alone; any thread may read `spent`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds since the start of the account up to `until` (monotonic); `busy_s + idle_s` is all of it."""

    until: float
    busy_s: float = 0.0
    idle_s: float = 0.0


class TimeAccount:
    """Splits time at the marks it is given, in their order."""

    def __init__(self, start: float) -> None:
        # One value, so that a reader never sees half of a change.
        self.spent = TimeSpent(start)

    def busy_until(self, now: float) -> float:
        """All since the last mark was work; returns how long that was."""
        spent = self.spent
        seconds = now - spent.until
        self.spent = TimeSpent(now, spent.busy_s + seconds, spent.idle_s)
        return seconds

    def idle_until(self, now: float) -> None:
        """Nothing was computed since the last mark."""
        spent = self.spent
        self.spent = TimeSpent(now, spent.busy_s, spent.idle_s + now - spent.until)
