"""What each choice took of the accelerator: its shares of the steps that computed it, and what they computed.

A step's time is shared by weight: a decoded token weighs its measured cost, a prefilled one its own, as learnt from the
steps themselves. Pure: the caller measures. Called by the engine; read by the shell when a choice ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import msgspec

from services.worker.engine.outputs import EngineOutput, ModelRunnerOutput, SchedulerOutput
from services.worker.engine.request import RequestKey

# A step's weight fades by this with every later one: about the last thousand steps count.
_FADE = 0.999
_MIN_STEPS = 16
# Whatever was learnt, a prefilled token weighs between a thousandth and all of what a decoded one does.
_LIGHTEST = 0.001


class ChoiceCost(msgspec.Struct, gc=False):
    """What one choice of one attempt took so far; tokens computed again after a preemption count again.

    Decoded are the tokens that decode steps sampled, accepted guesses among them; an output's first token comes from
    the prefill. `block_seconds` are blocks held × seconds of the steps that computed the choice.
    """

    key: RequestKey
    prompt_token_count: int = 0
    prefill_token_count: int = 0
    decode_token_count: int = 0
    accepted_draft_token_count: int = 0
    rejected_draft_token_count: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    block_seconds: float = 0.0


class TokenWeights:
    """Step time as `decode × decoded + prefill × prefilled`, by least squares through zero over fading weights."""

    def __init__(self) -> None:
        self._steps = 0
        self._dd = self._dp = self._pp = self._dt = self._pt = 0.0

    def note(self, decoded: int, prefilled: int, seconds: float) -> None:
        """A step of so many tokens of both kinds took `seconds`."""
        self._steps += 1
        self._dd = _FADE * self._dd + decoded * decoded
        self._dp = _FADE * self._dp + decoded * prefilled
        self._pp = _FADE * self._pp + prefilled * prefilled
        self._dt = _FADE * self._dt + decoded * seconds
        self._pt = _FADE * self._pt + prefilled * seconds

    @property
    def prefill_weight(self) -> float:
        """What a prefilled token costs, of a decoded one's cost; 1 until both are known."""
        determinant = self._dd * self._pp - self._dp * self._dp
        if self._steps < _MIN_STEPS or determinant <= 1e-9 * self._dd * self._pp:
            return 1.0
        decode = (self._dt * self._pp - self._pt * self._dp) / determinant
        prefill = (self._pt * self._dd - self._dt * self._dp) / determinant
        if decode <= 0.0 or not math.isfinite(prefill / decode):
            return 1.0
        return min(max(prefill / decode, _LIGHTEST), 1.0)


class StepCosts:
    """Costs of the choices in hand: `note` what a step did, then `take` how long it took."""

    def __init__(self) -> None:
        self._weights = TokenWeights()
        self._costs: dict[RequestKey, ChoiceCost] = {}
        self._decision, self._result = _NOTHING
        self._ended: list[RequestKey] = []
        # The rows of the last step, with their costs; none unless all of them decoded one token.
        self._keys: list[RequestKey] = []
        self._decoding: list[ChoiceCost] = []
        # What later steps of the same rows add to each of them: `_settle` does.
        self._steps, self._shares = 0, 0.0
        self._block_seconds: list[float] = []

    def note(self, decision: SchedulerOutput, result: ModelRunnerOutput, outputs: Iterable[EngineOutput]) -> None:
        """A step was computed. What was noted before and never taken is dropped."""
        if self._decision.scheduled or self._ended:
            self.take(0.0)
        self._decision, self._result = decision, result
        self.end(outputs)

    def end(self, outputs: Iterable[EngineOutput]) -> None:
        """Choices that ended, by their last outputs."""
        self._ended += [output.key for output in outputs if output.finish_reason is not None]

    def take(self, seconds: float) -> list[ChoiceCost]:
        """Share the `seconds` of the noted step among its rows; returns the choices that ended, whole.

        A choice that was never computed is not among them.
        """
        if self._decision.scheduled:
            self._share(seconds)
        self._decision, self._result = _NOTHING
        if not self._ended:
            return []
        self._settle()
        ended, self._ended = self._ended, []
        return [cost for key in ended if (cost := self._costs.pop(key, None)) is not None]

    def _share(self, seconds: float) -> None:
        decision, rows = self._decision, self._decision.scheduled
        if decision.decode_keys == self._keys and len(self._keys) == len(rows) and not decision.new_requests:
            # Most steps decode one token for each row of the step before: no look-ups, nothing to tell rows apart by.
            self._weights.note(len(rows), 0, seconds)
            self._steps += 1
            self._shares += seconds / len(rows)
            self._block_seconds = [
                held + len(row.block_table) * seconds for held, row in zip(self._block_seconds, rows, strict=True)
            ]
            return
        self._settle()
        keys = [row.key for row in rows]
        counts = [len(row.token_ids) for row in rows]
        total = sum(counts)
        for new in decision.new_requests:
            if new.key not in self._costs:
                self._costs[new.key] = ChoiceCost(new.key, len(new.prompt_token_ids))
        costs = [self._costs[key] for key in keys]
        is_decode = [
            count - row.draft_count == 1 and row.samples and row.start >= cost.prompt_token_count
            for row, cost, count in zip(rows, costs, counts, strict=True)
        ]
        # A guessed token is verified as part of a decode.
        decoded = sum(itertools.compress(counts, is_decode))
        prefilled = total - decoded
        self._keys = keys if decoded == len(rows) and not prefilled else []
        self._decoding = costs if self._keys else []
        self._block_seconds = [0.0] * len(self._keys)
        self._weights.note(decoded, prefilled, seconds)
        weight = self._weights.prefill_weight if prefilled and decoded else 1.0
        unit = seconds / (decoded + weight * prefilled)
        for row, cost, count, decode, sampled in zip(rows, costs, counts, is_decode, self._result.rows, strict=True):
            cost.block_seconds += len(row.block_table) * seconds
            if not decode:
                cost.prefill_token_count += count
                cost.prefill_seconds += unit * weight * count
                continue
            cost.decode_seconds += unit * count
            cost.decode_token_count += 1
            if count > 1:
                accepted = min(max(0, len(sampled.token_ids) - 1), row.draft_count)
                cost.decode_token_count += accepted
                cost.accepted_draft_token_count += accepted
                cost.rejected_draft_token_count += row.draft_count - accepted

    def _settle(self) -> None:
        """Add to the costs what steps of the same rows left to add."""
        if not self._steps:
            return
        for cost, block_seconds in zip(self._decoding, self._block_seconds, strict=True):
            cost.decode_token_count += self._steps
            cost.decode_seconds += self._shares
            cost.block_seconds += block_seconds
        self._steps, self._shares, self._block_seconds = 0, 0.0, [0.0] * len(self._keys)


_NOTHING = SchedulerOutput(0, (), ()), ModelRunnerOutput(())
