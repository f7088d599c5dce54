"""Speculation: guesses of the next tokens, which the runner verifies, so that output never changes.

Owns the guessing and the decision when guessing does not pay. Never schedules. Called by the scheduler only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from services.worker.engine.draft_gain import DraftGain
from services.worker.engine.request import Request, RequestKey, SamplingParams, TokenArray, no_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRequest:
    """Known tokens of one choice, prompt first, how they are sampled, and how many drafts it may get, at least 1."""

    key: RequestKey
    token_ids: TokenArray
    max_draft_count: int
    sampling: SamplingParams


class Proposer(Protocol):
    """Guesses continuations. May block for a draft model's time. Not thread-safe."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenArray]:
        """One array of 0 … max_draft_count tokens for each request, in order."""
        ...

    def release(self, key: RequestKey) -> None:
        """Forget what is kept for `key`; unknown keys are fine."""
        ...


class NgramProposer:
    """Prompt lookup: what followed the latest earlier occurrence of the longest matching tail (Saxena, 2023)."""

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, window: int = 8192) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError("need 1 <= min_ngram <= max_ngram")
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._window = window

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenArray]:
        return [self._lookup(request.token_ids[-self._window :], request.max_draft_count) for request in requests]

    def release(self, key: RequestKey) -> None:
        """Nothing is kept."""

    def _lookup(self, token_ids: TokenArray, max_draft_count: int) -> TokenArray:
        for size in range(self._max_ngram, self._min_ngram - 1, -1):
            # Occurrences end before the last token, so that at least one token follows.
            last_start = len(token_ids) - size - 1
            if last_start < 0:
                continue
            tail = token_ids[-size:]
            hits = np.ones(last_start + 1, dtype=np.bool_)
            for offset in range(size):
                hits &= token_ids[offset : offset + last_start + 1] == tail[offset]
            starts = np.flatnonzero(hits)
            if len(starts):
                follow = int(starts[-1]) + size
                return token_ids[follow : follow + max_draft_count]
        return no_tokens()


@dataclasses.dataclass(slots=True)
class _Record:
    next_pause: int
    acceptance: float = 0.5
    pause: int = 0


@dataclasses.dataclass(slots=True)
class _Step:
    """A step of decodes only, to be timed by the start of the next one."""

    number: int
    started_at: float
    row_count: int
    is_drafted: bool
    accepted_count: int = 0


class Speculation:
    """Asks the proposer while it pays: few rows in the batch, by the clock, and for a row whose drafts were accepted.

    A row whose moving acceptance falls below a fifth pauses for 16 steps, then 32 … 256, and then tries again. When
    steps with drafts take longer a token than steps without, all rows of that batch size pause (see `DraftGain`).
    """

    _MIN_ACCEPTANCE = 0.2
    _FIRST_PAUSE = 16
    _MAX_PAUSE = 256

    def __init__(self, proposer: Proposer, *, max_draft_count: int, max_batch: int) -> None:
        self._proposer = proposer
        self._max_draft_count = max_draft_count
        self._max_batch = max_batch
        self._records: dict[RequestKey, _Record] = {}
        self._gains: dict[int, DraftGain] = {}
        self._timed: _Step | None = None
        self.draft_total = 0
        self.accepted_total = 0

    def drafts(
        self, requests: Sequence[Request], *, budget: int, step: int, now: float, waiting_count: int
    ) -> dict[RequestKey, TokenArray]:
        """Drafts for decoding requests, at most `budget` tokens in all, never past a choice's own end.

        Step `step` starts `now` and computes only `requests`, but for those of the `waiting_count` that it admits.
        """
        self._time_last(step, now)
        if not requests or len(requests) > self._max_batch:
            return {}
        gain = self._gains.setdefault(len(requests), DraftGain())
        drafts = self._ask(requests, budget=budget) if gain.is_on else {}
        if not waiting_count:
            self._timed = _Step(step, now, len(requests), bool(drafts))
        return drafts

    def record(self, key: RequestKey, *, draft_count: int, accepted_count: int) -> None:
        """Learn from one verified row."""
        self.draft_total += draft_count
        self.accepted_total += accepted_count
        if self._timed is not None:
            self._timed.accepted_count += accepted_count
        record = self._records.setdefault(key, _Record(self._FIRST_PAUSE))
        record.acceptance += 0.25 * (accepted_count / draft_count - record.acceptance)
        if record.acceptance < self._MIN_ACCEPTANCE:
            record.pause = record.next_pause
            record.next_pause = min(2 * record.next_pause, self._MAX_PAUSE)
            record.acceptance = 0.5
        elif accepted_count == draft_count:
            record.next_pause = self._FIRST_PAUSE

    def release(self, key: RequestKey) -> None:
        """Forget a choice that ended or left the batch."""
        self._records.pop(key, None)
        self._proposer.release(key)

    def is_idle(self) -> bool:
        """True when nothing is kept for any choice."""
        return not self._records

    def _time_last(self, step: int, now: float) -> None:
        last, self._timed = self._timed, None
        if last is None or last.number != step - 1:
            return
        gain = self._gains[last.row_count]
        if last.is_drafted:
            gain.note_drafted(now - last.started_at, 1 + last.accepted_count / last.row_count)
        else:
            gain.note_plain(now - last.started_at)

    def _ask(self, requests: Sequence[Request], *, budget: int) -> dict[RequestKey, TokenArray]:
        asked: list[DraftRequest] = []
        for request in requests:
            left = request.max_num_tokens - request.num_tokens - 1
            count = min(self._max_draft_count, left, budget)
            if count > 0 and self._is_on(request.key):
                tokens = request.tokens(0, request.num_tokens)
                asked.append(DraftRequest(request.key, tokens, count, request.sampling))
                budget -= count
        proposed = self._proposer.propose(asked) if asked else []
        return {
            ask.key: drafts[: ask.max_draft_count] for ask, drafts in zip(asked, proposed, strict=True) if len(drafts)
        }

    def _is_on(self, key: RequestKey) -> bool:
        record = self._records.setdefault(key, _Record(self._FIRST_PAUSE))
        if record.pause:
            record.pause -= 1
            return False
        return True
