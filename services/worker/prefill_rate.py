"""How fast this worker prefills, from its own steps: what a router weighs it by. Pure; owned by the load board."""

from __future__ import annotations

from services.worker.engine.outputs import EngineStats

# A report's weight fades by this with every later one.
_FADE = 0.9
# Shorter prompts say more about a step's fixed cost than about its tokens.
_MIN_TOKENS = 64


class PrefillRate:
    """Prompt tokens a second over the last reports that were mostly prefill."""

    def __init__(self) -> None:
        self._prefill_total = self._decode_total = 0
        self._tokens = self._seconds = 0.0

    def note(self, stats: EngineStats, step_seconds: list[float]) -> None:
        """Take the engine's counts after steps that took so long."""
        prefilled = stats.prefill_token_total - self._prefill_total
        decoded = stats.decode_token_total - self._decode_total
        self._prefill_total, self._decode_total = stats.prefill_token_total, stats.decode_token_total
        if prefilled >= _MIN_TOKENS and prefilled > 3 * decoded:
            self._tokens = _FADE * self._tokens + prefilled
            self._seconds = _FADE * self._seconds + sum(step_seconds)

    @property
    def per_second(self) -> int | None:
        """None before the first such report."""
        return int(self._tokens / self._seconds) or None if self._seconds > 0 else None
