"""Whether drafting pays, by the clock: seconds a token with drafts against seconds a step without.

Owns the samples of one batch size. Told the time, reads none. Called by speculation only.
"""

from __future__ import annotations

# Steps with drafts that are measured, then steps without; while it pays, measured anew after the longer stretch.
_FIRST_WINDOW = 16
_LATER_WINDOW = 128
_PLAIN_STEPS = 4
_FIRST_PAUSE = 64
_MAX_PAUSE = 1024


class DraftGain:
    """Judges in rounds: a window of steps with drafts, a few without, then on as before or a pause.

    A loss pauses drafting for 64 steps, then 128 … 1,024: the traffic may have changed by then.
    """

    def __init__(self) -> None:
        self._window = _FIRST_WINDOW
        self._pause = _FIRST_PAUSE
        self._paused_steps = 0
        self._forget()

    @property
    def is_on(self) -> bool:
        """True when the next step should have drafts."""
        return not self._paused_steps and self._drafted_steps < self._window

    def note_drafted(self, seconds: float, tokens_per_row: float) -> None:
        """One step with drafts: how long it took with the drafting, and what it gave each row."""
        self._drafted_steps += 1
        self._drafted_seconds += seconds
        self._drafted_tokens += tokens_per_row

    def note_plain(self, seconds: float) -> None:
        """One step without drafts, which gave each row one token."""
        if self._paused_steps:
            self._paused_steps -= 1
            return
        if self._drafted_steps < self._window:
            return
        self._plain_steps += 1
        self._plain_seconds += seconds
        if self._plain_steps >= _PLAIN_STEPS:
            self._judge()

    def _judge(self) -> None:
        drafted = self._drafted_seconds / self._drafted_tokens
        if drafted <= self._plain_seconds / self._plain_steps:
            self._window, self._pause = _LATER_WINDOW, _FIRST_PAUSE
        else:
            self._paused_steps = self._pause
            self._window, self._pause = _FIRST_WINDOW, min(2 * self._pause, _MAX_PAUSE)
        self._forget()

    def _forget(self) -> None:
        self._drafted_steps = self._plain_steps = 0
        self._drafted_seconds = self._drafted_tokens = self._plain_seconds = 0.0
