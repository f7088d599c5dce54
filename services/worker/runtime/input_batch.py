"""What the runner remembers of each choice between steps, and how a step's rows become flat arrays.

Owns sampling state (tokens, counts); owns no blocks and no tensors of the model. Called by the runner only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.common.grammar_source import GrammarError
from services.worker.engine.outputs import NewRequest, ScheduledRequest
from services.worker.engine.request import Grammar, RequestKey, SamplingParams, TokenArray
from services.worker.runtime.forward import IntArray, StepInputs
from services.worker.runtime.grammar import CompiledGrammar, GrammarPlace
from services.worker.runtime.pooling import MeanPool


class RequestState:
    """Tokens and counts of one choice. `history` says that earlier tokens change its logits.

    `pool` gathers the embedding of a request for one.
    `place` is where it is in its grammar, if it has one. `fault` says why it cannot run.
    """

    def __init__(self, request: NewRequest) -> None:
        self.key: RequestKey = request.key
        self.sampling: SamplingParams = request.sampling
        self.prompt_length = len(request.prompt_token_ids)
        self._tokens: IntArray = np.concatenate((request.prompt_token_ids, request.output_token_ids)).astype(np.int32)
        self._length = len(self._tokens)
        sampling = request.sampling
        self.pool = MeanPool() if sampling.embed else None
        self.history = bool(
            sampling.repetition_penalty != 1.0
            or sampling.frequency_penalty != 0.0
            or sampling.presence_penalty != 0.0
            or sampling.bad_words
            or sampling.min_tokens > self.output_length
            or sampling.grammar is not None
        )
        self.place: GrammarPlace | None = None
        self.fault: str | None = None
        if sampling.grammar is not None:
            self._enter(sampling.grammar, request.output_token_ids)
        self._output_counts: dict[int, int] = {}
        for token in request.output_token_ids.tolist():
            self._output_counts[token] = self._output_counts.get(token, 0) + 1
        self._prompt_ids: npt.NDArray[np.int64] = np.unique(request.prompt_token_ids).astype(np.int64)

    def _enter(self, grammar: Grammar, output_token_ids: TokenArray) -> None:
        """Take the place in the grammar that the known output leads to."""
        if not isinstance(grammar.compiled, CompiledGrammar):
            self.fault = "its grammar was not compiled"
            return
        try:
            self.place = grammar.compiled.start(output_token_ids.tolist())
        except GrammarError as error:
            self.fault = f"structured output failed: {error}"

    @property
    def length(self) -> int:
        """Known tokens, prompt and output."""
        return self._length

    @property
    def output_length(self) -> int:
        return self._length - self.prompt_length

    @property
    def tokens(self) -> IntArray:
        return self._tokens[: self._length]

    @property
    def prompt_ids(self) -> npt.NDArray[np.int64]:
        """Distinct ids of the prompt."""
        return self._prompt_ids

    def output_counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Distinct ids of the output and how often each occurred."""
        size = len(self._output_counts)
        ids = np.fromiter(self._output_counts.keys(), dtype=np.int64, count=size)
        return ids, np.fromiter(self._output_counts.values(), dtype=np.float32, count=size)

    def append(self, token: int) -> None:
        """Remember a sampled token. Raises GrammarError when the grammar does not allow it."""
        if self._length == len(self._tokens):
            grown = np.empty(max(64, 2 * self._length), dtype=np.int32)
            grown[: self._length] = self._tokens
            self._tokens = grown
        if self.place is not None:
            self.place.accept(token)
        self._tokens[self._length] = token
        self._length += 1
        self._output_counts[token] = self._output_counts.get(token, 0) + 1


class InputBatch:
    """States by key; a key is there from its NewRequest until it is released."""

    def __init__(self) -> None:
        self._states: dict[RequestKey, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, released: Sequence[RequestKey], new_requests: Sequence[NewRequest]) -> None:
        """Drop, then add; a returning key replaces what was known of it."""
        for key in released:
            self._states.pop(key, None)
        for request in new_requests:
            self._states[request.key] = RequestState(request)

    def get(self, key: RequestKey) -> RequestState | None:
        return self._states.get(key)

    def keys(self) -> frozenset[RequestKey]:
        return frozenset(self._states)


def flatten(rows: Sequence[ScheduledRequest], selected: Sequence[npt.NDArray[np.int32]]) -> StepInputs:
    """One flat batch of `rows`; `selected` are each row's wanted positions, counted from the row's first token."""
    lengths = np.fromiter((len(row.token_ids) for row in rows), dtype=np.int32, count=len(rows))
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    firsts = np.fromiter((row.start for row in rows), dtype=np.int32, count=len(rows))
    within = np.arange(int(starts[-1]), dtype=np.int32) - np.repeat(starts[:-1], lengths)
    tables = np.zeros((len(rows), max(len(row.block_table) for row in rows)), dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.block_table)] = row.block_table
    return StepInputs(
        token_ids=np.concatenate([row.token_ids for row in rows]).astype(np.int32, copy=False),
        positions=np.repeat(firsts, lengths) + within,
        query_starts=starts,
        block_tables=tables,
        selected=np.concatenate([part + start for part, start in zip(selected, starts[:-1], strict=True)]).astype(
            np.int32
        ),
    )
