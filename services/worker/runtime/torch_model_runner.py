"""The engine's ModelRunner over a loaded transformer: one step's decision in, sampled tokens out.

Owns the KV memory and the sampling state. Never decides what runs. Called by the engine on its thread.
Charter: be slow to add lines here; a new feature is a new file and at most one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.kv_blocks import KVLayout
from services.worker.engine.model_runner import RunnerSpec
from services.worker.engine.outputs import (
    ModelRunnerOutput,
    SampledRow,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from services.worker.runtime.forward import Forward
from services.worker.runtime.input_batch import InputBatch, RequestState, flatten
from services.worker.runtime.kv_store import KVStore
from services.worker.runtime.logprobs import token_logprobs
from services.worker.runtime.pooling import MeanPool
from services.worker.runtime.sampler import Sampler, SampleRow

# Rows of logits alive at once: 64 × 49k × 4 bytes is 12 MiB.
LOGIT_ROWS = 64
Positions = npt.NDArray[np.int32]


class TorchModelRunner:
    """See `ModelRunner`. `forward` computes, `store` remembers, `sampler` chooses."""

    def __init__(self, *, spec: RunnerSpec, forward: Forward, store: KVStore, sampler: Sampler) -> None:
        self._spec = spec
        self._forward = forward
        self._store = store
        self._sampler = sampler
        self._batch = InputBatch()
        self._scheduled: frozenset[object] = frozenset()

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @property
    def kv_layout(self) -> KVLayout:
        return self._store.layout

    def export_block(self, block: int) -> bytes:
        """See `ModelRunner.export_block`."""
        return self._store.export_block(block)

    def import_block(self, block: int, payload: bytes) -> None:
        """See `ModelRunner.import_block`."""
        self._store.import_block(block, payload)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See `ModelRunner.execute`."""
        self._batch.apply(scheduler_output.released, scheduler_output.new_requests)
        self._store.copy_blocks(scheduler_output.block_copies)
        rows = scheduler_output.scheduled
        results: list[SampledRow] = [SampledRow()] * len(rows)
        sound: list[int] = []
        for index, row in enumerate(rows):
            problem = self._problem(row)
            if problem is None:
                sound.append(index)
            else:
                results[index] = SampledRow(error=problem)
        if sound:
            for index, result in zip(sound, self._run([rows[index] for index in sound]), strict=True):
                results[index] = result
        return ModelRunnerOutput(tuple(results))

    def check_invariants(self) -> None:
        """See `ModelRunner.check_invariants`; the engine calls it when no request is left."""
        if len(self._batch):
            raise AssertionError(f"the runner still holds {len(self._batch)} requests")

    def _problem(self, row: ScheduledRequest) -> str | None:
        """Why this row cannot be computed, checked before it can touch another's memory."""
        state = self._batch.get(row.key)
        count = len(row.token_ids)
        end = row.start + count
        if state is None:
            return "the runner does not know this request"
        if state.fault is not None:
            return state.fault
        if count == 0 or row.start < 0 or end > self._spec.max_model_len:
            return f"positions {row.start} to {end} are outside the context of {self._spec.max_model_len}"
        if -(-end // self._spec.block_size) > len(row.block_table):
            return f"{len(row.block_table)} blocks cannot hold {end} tokens"
        if min(row.block_table) < 0 or max(row.block_table) >= self._spec.num_blocks:
            return "a block is outside the pool"
        if int(row.token_ids.min()) < 0 or int(row.token_ids.max()) >= self._spec.vocab_size:
            return "a token id is outside the vocabulary"
        if state.pool is not None and state.pool.count != row.start:
            return f"an embedding pools every position, {state.pool.count} come before {row.start}"
        if row.samples and (row.draft_count >= count or end - row.draft_count != state.length):
            return f"the step ends at {end} with {row.draft_count} proposals, the request has {state.length} tokens"
        return None

    def _run(self, rows: Sequence[ScheduledRequest]) -> list[SampledRow]:
        states = [self._state(row) for row in rows]
        wanted = [_wanted(row, state) for row, state in zip(rows, states, strict=True)]
        hidden = self._forward.hidden(flatten(rows, wanted), self._store)
        results = [SampledRow()] * len(rows)
        pending: list[tuple[int, Positions]] = []
        at = 0
        for index, (row, state) in enumerate(zip(rows, states, strict=True)):
            mine = np.arange(at, at + len(wanted[index]), dtype=np.int32)
            at += len(mine)
            if state.pool is not None:
                results[index] = _pooled(hidden[at - len(mine) : at], row, state.pool)
                continue
            if _wants_prompt_logprobs(row, state):
                results[index] = self._prompt_row(hidden, mine, row, state)
            if row.samples and results[index].error is None:
                pending.append((index, mine[len(mine) - 1 - row.draft_count :]))
        self._sample(hidden, rows, states, pending, results)
        return results

    def _state(self, row: ScheduledRequest) -> RequestState:
        state = self._batch.get(row.key)
        if state is None:
            raise RuntimeError("a row without state passed the check")
        return state

    def _sample(
        self,
        hidden: torch.Tensor,
        rows: Sequence[ScheduledRequest],
        states: Sequence[RequestState],
        pending: Sequence[tuple[int, Positions]],
        results: list[SampledRow],
    ) -> None:
        """Sample `pending` (row, hidden rows) in slabs of logits, into `results`."""
        slab: list[tuple[int, Positions]] = []
        for entry in [*pending, None]:
            size = sum(len(points) for _, points in slab)
            if slab and (entry is None or size + len(entry[1]) > LOGIT_ROWS):
                logits = self._forward.logits(_rows_of(hidden, np.concatenate([points for _, points in slab])))
                sample_rows = [_sample_row(rows[index], states[index]) for index, _ in slab]
                for (index, _), result in zip(slab, self._sampler.sample(logits, sample_rows), strict=True):
                    results[index] = _merge(results[index], result)
                slab = []
            if entry is not None:
                slab.append(entry)

    def _prompt_row(
        self, hidden: torch.Tensor, mine: Positions, row: ScheduledRequest, state: RequestState
    ) -> SampledRow:
        try:
            return SampledRow(prompt_logprobs=self._prompt_logprobs(hidden, mine, row, state))
        except Exception as error:
            return SampledRow(error=f"prompt logprobs failed: {type(error).__name__}: {error}")

    def _prompt_logprobs(
        self, hidden: torch.Tensor, mine: Positions, row: ScheduledRequest, state: RequestState
    ) -> tuple[TokenLogprobs, ...]:
        """Logprobs of the prompt tokens that follow this chunk's positions."""
        count = min(row.start + len(row.token_ids), state.prompt_length - 1) - row.start
        top_count = state.sampling.prompt_logprob_count or 0
        found: list[TokenLogprobs] = []
        for first in range(0, count, LOGIT_ROWS):
            slab = mine[first : min(first + LOGIT_ROWS, count)]
            logits = self._forward.logits(hidden[torch.from_numpy(slab).long()])
            targets = state.tokens[row.start + first + 1 :]
            found.extend(token_logprobs(logits[offset], int(targets[offset]), top_count) for offset in range(len(slab)))
        return tuple(found)


def _rows_of(hidden: torch.Tensor, points: Positions) -> torch.Tensor:
    """The rows at distinct ascending `points`; all of them without a copy, as in a step that only decodes."""
    return hidden if len(points) == hidden.shape[0] else hidden[torch.from_numpy(points).long()]


def _wants_prompt_logprobs(row: ScheduledRequest, state: RequestState) -> bool:
    return state.sampling.prompt_logprob_count is not None and row.start < state.prompt_length - 1


def _wanted(row: ScheduledRequest, state: RequestState) -> Positions:
    """Positions of the chunk whose hidden state is needed."""
    count = len(row.token_ids)
    if state.pool is not None or _wants_prompt_logprobs(row, state):
        return np.arange(count, dtype=np.int32)
    if row.samples:
        return np.arange(count - 1 - row.draft_count, count, dtype=np.int32)
    return np.empty(0, dtype=np.int32)


def _pooled(hidden: torch.Tensor, row: ScheduledRequest, pool: MeanPool) -> SampledRow:
    pool.add(hidden.cpu().numpy())
    return SampledRow(embedding=pool.unit_vector()) if row.samples else SampledRow()


def _sample_row(row: ScheduledRequest, state: RequestState) -> SampleRow:
    drafts = row.token_ids[len(row.token_ids) - row.draft_count :].tolist() if row.draft_count else []
    return SampleRow(state, tuple(drafts))


def _merge(before: SampledRow, sampled: SampledRow) -> SampledRow:
    return SampledRow(sampled.token_ids, sampled.logprobs, before.prompt_logprobs, sampled.grammar_ended, sampled.error)
