"""How long a step takes by its tokens, learnt from the steps themselves, and how many may join a step of decodes.

Owns the model of one machine's step time. Pure: the caller measures. Called by the scheduler.
"""

from __future__ import annotations

# A step's weight fades by this with every later one: about the last hundred steps count.
_FADE = 0.98
_MIN_STEPS = 8
# Prefills go on beside decodes whatever the target, by at least this many tokens a step.
MIN_PREFILL = 16
# Where decodes alone take about the target or more, holding prefills back altogether would starve them for nothing:
# they may make a step longer by this share.
_STRETCH = 0.1


class StepPace:
    """Step time as `base + slope × tokens`, fitted by least squares over fading weights."""

    def __init__(self, target_s: float | None) -> None:
        """`target_s`: how long a step with decodes in it should take; None limits nothing."""
        self._target_s = target_s
        self._steps = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` took `seconds`."""
        self._steps += 1
        self._weight = _FADE * self._weight + 1.0
        self._x = _FADE * self._x + tokens
        self._y = _FADE * self._y + seconds
        self._xx = _FADE * self._xx + tokens * tokens
        self._xy = _FADE * self._xy + tokens * seconds

    def predict(self, tokens: int) -> float | None:
        """Seconds that a step of `tokens` should take; None before enough is known."""
        if self._steps < _MIN_STEPS:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= 1e-6 * mean_x * mean_x:
            # Steps of one size: all of the time counts as theirs.
            return mean_y * tokens / mean_x if mean_x else mean_y
        slope = max((self._xy / self._weight - mean_x * mean_y) / variance, 0.0)
        return max(mean_y + slope * (tokens - mean_x), 0.0)

    def prefill_room(self, decodes: int, limit: int) -> int:
        """How many of `limit` prefill tokens may share a step with `decodes`, for it to meet the target, or to take not
        much longer than the decodes alone where these miss it."""
        if self._target_s is None or decodes == 0 or limit <= MIN_PREFILL:
            return limit
        full = self.predict(decodes + limit)
        alone = self.predict(decodes) or 0.0
        allowed = max(self._target_s, alone * (1 + _STRETCH))
        if full is None or full <= allowed:
            return limit
        return max(int(limit * (allowed - alone) / (full - alone)), MIN_PREFILL)
