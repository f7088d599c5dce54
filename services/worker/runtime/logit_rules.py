"""What a request's parameters do to its logits before a token is chosen: penalties, bias, bans.

Pure functions on one row, in place. Called by the sampler.
Order: repetition, frequency and presence penalties; then bias; then bans. A grammar bans all that it does not allow;
where the other bans leave nothing of what it allows, it wins.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from services.worker.engine.request import SamplingParams
from services.worker.runtime.input_batch import RequestState

Row = npt.NDArray[np.float32]


def changes_logits(state: RequestState) -> bool:
    """True when `adjust` would touch this request's logits."""
    return state.history or bool(state.sampling.logit_bias)


def adjust(logits: Row, state: RequestState, eos_token_ids: frozenset[int]) -> None:
    """Apply every rule of `state.sampling` to `logits` (vocab,) in place.

    Raises GrammarError when the grammar allows no token here.
    """
    sampling = state.sampling
    if sampling.repetition_penalty != 1.0:
        _repetition(logits, state)
    if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
        ids, counts = state.output_counts()
        if len(ids):
            logits[ids] -= np.float32(sampling.frequency_penalty) * counts + np.float32(sampling.presence_penalty)
    for token, bias in sampling.logit_bias:
        logits[token] += np.float32(bias)
    if state.place is None:
        _ban(logits, state, eos_token_ids)
        return
    allowed = state.place.mask()
    unbanned = logits[allowed]
    _ban(logits, state, eos_token_ids)
    logits[~allowed] = -math.inf
    if not np.isfinite(logits[allowed]).any():
        logits[allowed] = unbanned


def _ban(logits: Row, state: RequestState, eos_token_ids: frozenset[int]) -> None:
    if state.sampling.bad_words:
        _ban_bad_words(logits, state)
    if state.output_length < state.sampling.min_tokens:
        _ban_ends(logits, state.sampling, eos_token_ids)


def _repetition(logits: Row, state: RequestState) -> None:
    output_ids, _ = state.output_counts()
    ids = np.union1d(state.prompt_ids, output_ids)
    ids = ids[ids < len(logits)]
    penalty = np.float32(state.sampling.repetition_penalty)
    values = logits[ids]
    logits[ids] = np.where(values > 0, values / penalty, values * penalty)


def _ban_bad_words(logits: Row, state: RequestState) -> None:
    tokens = state.tokens
    for word in state.sampling.bad_words:
        if not word:
            continue
        lead = len(word) - 1
        # Only generated tokens count as the beginning of a bad word.
        if lead > state.output_length:
            continue
        if lead == 0 or tokens[len(tokens) - lead :].tolist() == list(word[:-1]):
            logits[word[-1]] = -math.inf


def _ban_ends(logits: Row, sampling: SamplingParams, eos_token_ids: frozenset[int]) -> None:
    ends = list(eos_token_ids.union(sampling.stop_token_ids))
    logits[[token for token in ends if token < len(logits)]] = -math.inf
