"""Logits → tokens for the rows of one step: rules, choice, logprobs and the check of proposed tokens.

Owns nothing between steps (states belong to the input batch). One row's fault is that row's error. Called by the
runner. Be slow to add here: a new rule goes to `logit_rules`, a new filter to `choosing`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from services.worker.engine.outputs import SampledRow, TokenLogprobs
from services.worker.engine.request import SamplingParams
from services.worker.runtime.choosing import Chooser, Draw
from services.worker.runtime.input_batch import RequestState
from services.worker.runtime.logit_rules import adjust, changes_logits
from services.worker.runtime.logprobs import token_logprobs
from services.worker.runtime.noise import noise_key


@dataclasses.dataclass(frozen=True, slots=True)
class SampleRow:
    """A row that samples: `drafts` proposed tokens give 1 + len(drafts) consecutive rows of logits."""

    state: RequestState
    drafts: tuple[int, ...] = ()


class NoTokenError(Exception):
    """Nothing can be sampled: every token is banned, or the logits are not numbers."""


class Sampler:
    """Chooses with `chooser`; `eos_token_ids` are what `min_tokens` bans."""

    def __init__(self, chooser: Chooser, eos_token_ids: frozenset[int]) -> None:
        self._chooser = chooser
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledRow]:
        """Tokens of each row; appends them to the states, overwrites `logits` (points, vocab) float32."""
        results: list[SampledRow | None] = [None] * len(rows)
        batch: list[tuple[int, int, list[Draw]]] = []
        raw: dict[int, torch.Tensor] = {}
        at = 0
        for index, row in enumerate(rows):
            first, at = at, at + 1 + len(row.drafts)
            if _grammar_ended(row.state):
                # A resume whose prefix was already the whole of it.
                results[index] = SampledRow(grammar_ended=True)
                continue
            if row.drafts and row.state.history:
                results[index] = self._guarded(row, logits[first:at])
                continue
            try:
                self._prepare(logits, first, row, raw)
                draws = [draw_of(row.state, row.state.length + ahead) for ahead in range(1 + len(row.drafts))]
            except Exception as error:
                results[index] = _failed(error)
            else:
                batch.append((index, first, draws))
        for (index, first, _), tokens in zip(batch, self._choose(logits, batch), strict=True):
            try:
                results[index] = _accept(rows[index], tokens, logits, first, raw)
            except Exception as error:
                results[index] = _failed(error)
        return [result if result is not None else SampledRow(error="the row was not sampled") for result in results]

    def _prepare(self, logits: torch.Tensor, first: int, row: SampleRow, raw: dict[int, torch.Tensor]) -> None:
        if not changes_logits(row.state):
            return
        for point in range(first, first + 1 + len(row.drafts)):
            if row.state.sampling.logprob_count is not None:
                raw[point] = logits[point].clone()
            self._adjust(logits[point], row.state)

    def _adjust(self, logits: torch.Tensor, state: RequestState) -> None:
        """Apply the rules to one row, in place wherever it lies."""
        row = logits.cpu()
        adjust(row.numpy(), state, self._eos_token_ids)
        if row.device != logits.device:
            logits.copy_(row)

    def _choose(self, logits: torch.Tensor, batch: Sequence[tuple[int, int, list[Draw]]]) -> list[list[int | None]]:
        """The choices at each row's points, of which `first` is the first; one call for all rows."""
        points = [point for _, first, draws in batch for point in range(first, first + len(draws))]
        whole = len(points) == len(logits)
        chosen = iter(self._chooser.choose(logits if whole else logits[points], [d for _, _, ds in batch for d in ds]))
        return [list(itertools.islice(chosen, len(draws))) for _, _, draws in batch]

    def _guarded(self, row: SampleRow, logits: torch.Tensor) -> SampledRow:
        """Point by point, because each accepted token changes the rules of the next."""
        state = row.state
        wanted = state.sampling.logprob_count
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        try:
            for point in range(1 + len(row.drafts)):
                raw = logits[point].clone() if wanted is not None else logits[point]
                self._adjust(logits[point], state)
                token = self._chooser.choose(logits[point : point + 1], [draw_of(state, state.length)])[0]
                if token is None:
                    raise NoTokenError("no token is allowed here")
                tokens.append(token)
                state.append(token)
                if wanted is not None:
                    logprobs.append(token_logprobs(raw, token, wanted))
                if _grammar_ended(state) or (point < len(row.drafts) and token != row.drafts[point]):
                    break
        except Exception as error:
            return _failed(error)
        return SampledRow(tuple(tokens), tuple(logprobs), grammar_ended=_grammar_ended(state))


def draw_of(state: RequestState, position: int) -> Draw:
    """How `state` draws the token at `position`."""
    return draw_at(state.sampling, state.key.choice, position)


def draw_at(sampling: SamplingParams, choice: int, position: int) -> Draw:
    """How a choice with these parameters draws the token at `position`, counted from the first prompt token."""
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        noise_key=noise_key(sampling.seed, choice, position) if sampling.temperature else 0,
    )


def _accept(
    row: SampleRow, chosen: Sequence[int | None], logits: torch.Tensor, first: int, raw: dict[int, torch.Tensor]
) -> SampledRow:
    """The longest run of proposals that sampling agrees with, and the token after it."""
    wanted = row.state.sampling.logprob_count
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for ahead, token in enumerate(chosen):
        if token is None:
            raise NoTokenError("no token is allowed here")
        tokens.append(token)
        if wanted is not None:
            logprobs.append(token_logprobs(raw.get(first + ahead, logits[first + ahead]), token, wanted))
        if ahead < len(row.drafts) and token != row.drafts[ahead]:
            break
    for token in tokens:
        row.state.append(token)
    return SampledRow(tuple(tokens), tuple(logprobs), grammar_ended=_grammar_ended(row.state))


def _grammar_ended(state: RequestState) -> bool:
    return state.place is not None and state.place.ended


def _failed(error: Exception) -> SampledRow:
    return SampledRow(error=f"sampling failed: {type(error).__name__}: {error}")
