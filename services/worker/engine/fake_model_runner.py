"""The echo runner: token i is a pure hash of (request, choice, i), so any stream can be checked with no model.

Owns no tensors. Faults and latency are scripted by what it is given. With `verify`, it keeps a shadow of every block
slot and fails when a row's block table does not hold exactly that row's earlier tokens. Called by the engine only.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.worker.engine.kv_blocks import KVLayout
from services.worker.engine.model_runner import RunnerSpec
from services.worker.engine.outputs import (
    ModelRunnerOutput,
    SampledRow,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
)
from services.worker.engine.request import RequestKey, SamplingParams, TokenArray

_PRIME = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def echo_token(request_id: str, choice: int, index: int, *, vocab_size: int, salt: str = "") -> int:
    """Output token `index` of a choice: the same whatever the batch, the attempt or the worker.

    `salt` tells versions of the echo model apart: a stream of two versions is no prefix of either's tokens.
    """
    text = f"{request_id}\x00{choice}\x00{index}{salt and chr(0)}{salt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % vocab_size


def weighed_token(weights: bytes, prompt_token_ids: Sequence[int], index: int, *, vocab_size: int) -> int:
    """Output token `index` as a model's would be: the same for each request of a prompt, another by other weights."""
    text = weights + np.asarray([*prompt_token_ids, index], dtype="<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % vocab_size


def echo_embedding(prompt_token_ids: Sequence[int]) -> bytes:
    """Embedding of a prompt, 16 little-endian float32 at unit length: a hash of the tokens and nothing else."""
    text = np.asarray(prompt_token_ids, dtype="<u4").tobytes()
    raw = np.frombuffer(hashlib.blake2b(text, digest_size=64).digest(), dtype="<i4").astype(np.float64)
    return bytes((raw / np.sqrt(np.sum(raw * raw))).astype("<f4").tobytes())


def _nothing(_: SchedulerOutput) -> None:
    return None


def _no_fault(_: RequestKey, __: int) -> str | None:
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class FakeScript:
    """What goes wrong, and when.

    `before_step` runs first in every step: it may sleep (latency, a stall) or raise (a device fault). `row_error` is
    asked with (key, output index) for each sampled token and fails that row alone. When a row computes the whole of
    `magic_prompt`, `on_magic` is called: it may end the process. `verify` checks block tables against the shadow. With
    `weights`, answers follow from them and the prompt, as a greedy model's do, and not from the request's id.
    """

    before_step: Callable[[SchedulerOutput], None] = _nothing
    row_error: Callable[[RequestKey, int], str | None] = _no_fault
    magic_prompt: tuple[int, ...] = ()
    on_magic: Callable[[], None] | None = None
    verify: bool = False
    weights: bytes = b""


class _Sequence:
    """A known request: its length, and a running hash of its tokens up to each position."""

    __slots__ = ("is_magic", "length", "prefix_hashes", "prompt", "sampling")

    def __init__(self, prompt: TokenArray, outputs: TokenArray, sampling: SamplingParams, *, verify: bool) -> None:
        self.prompt = prompt
        self.length = len(prompt) + len(outputs)
        self.sampling = sampling
        self.is_magic = False
        self.prefix_hashes: list[int] = []
        if verify:
            for token_id in (*prompt.tolist(), *outputs.tolist()):
                self.push(token_id)

    def push(self, token_id: int) -> None:
        before = self.prefix_hashes[-1] if self.prefix_hashes else 1
        self.prefix_hashes.append((before * _PRIME + token_id + 1) & _MASK)


class FakeModelRunner:
    """ModelRunner without a model. Its answer to a row never depends on other rows, chunking or earlier attempts."""

    def __init__(self, spec: RunnerSpec, *, script: FakeScript | None = None, salt: str = "") -> None:
        self._spec = spec
        self._salt = salt
        self._script = script if script is not None else FakeScript()
        self._sequences: dict[RequestKey, _Sequence] = {}
        # Hash of the prefix that ends in each slot; 0 is never written.
        self._shadow: npt.NDArray[np.uint64] = np.zeros(
            (spec.num_blocks, spec.block_size) if self._script.verify else (0, spec.block_size), dtype=np.uint64
        )

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step. Raises what the script raises, and RuntimeError when verification fails."""
        self._script.before_step(scheduler_output)
        for key in scheduler_output.released:
            self._sequences.pop(key, None)
        for new in scheduler_output.new_requests:
            sequence = _Sequence(new.prompt_token_ids, new.output_token_ids, new.sampling, verify=self._script.verify)
            magic = self._script.magic_prompt
            sequence.is_magic = bool(magic) and tuple(new.prompt_token_ids.tolist()) == magic
            self._sequences[new.key] = sequence
        if self._script.verify:
            self._copy(scheduler_output.block_copies)
            for row in scheduler_output.scheduled:
                self._write(row)
            for row in scheduler_output.scheduled:
                self._check(row)
        return ModelRunnerOutput(rows=tuple([self._answer(row) for row in scheduler_output.scheduled]))

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout("uint64", (self._spec.block_size,), 8)

    def export_block(self, block: int) -> bytes:
        """The block's shadow; zeros when there is none."""
        return self._shadow[block].tobytes() if self._script.verify else bytes(self.kv_layout.block_bytes)

    def import_block(self, block: int, payload: bytes) -> None:
        """Overwrite the block's shadow. Raises ValueError unless `payload` is exactly one block."""
        if len(payload) != self.kv_layout.block_bytes:
            raise ValueError(f"a block is {self.kv_layout.block_bytes} bytes, got {len(payload)}")
        if self._script.verify:
            self._shadow[block] = np.frombuffer(payload, dtype=np.uint64)

    def check_invariants(self) -> None:
        """Raise AssertionError when state is kept though the engine is idle."""
        assert not self._sequences, f"{len(self._sequences)} sequences are kept for nobody"

    def _answer(self, row: ScheduledRequest) -> SampledRow:
        sequence = self._sequences[row.key]
        if sequence.is_magic and self._script.on_magic is not None:
            self._script.on_magic()
        wants_prompt = sequence.sampling.prompt_logprob_count is not None
        prompt_logprobs = self._prompt_logprobs(row, sequence) if wants_prompt else ()
        if not row.samples:
            return SampledRow(prompt_logprobs=prompt_logprobs)
        known_end = row.start + len(row.token_ids) - row.draft_count
        if known_end != sequence.length:
            raise RuntimeError(f"{row.key} samples after {known_end} tokens, {sequence.length} are known")
        if sequence.sampling.embed:
            return SampledRow(embedding=echo_embedding(sequence.prompt.tolist()))
        drafts = row.token_ids[len(row.token_ids) - row.draft_count :].tolist()
        tokens: list[int] = []
        for position in range(row.draft_count + 1):
            index = sequence.length - len(sequence.prompt)
            error = self._script.row_error(row.key, index)
            if error is not None:
                return SampledRow(error=error)
            token_id = self._token(row.key, sequence, index)
            tokens.append(token_id)
            sequence.length += 1
            if self._script.verify:
                sequence.push(token_id)
            if position < row.draft_count and drafts[position] != token_id:
                break
        return SampledRow(tuple(tokens), self._logprobs(tokens, sequence), prompt_logprobs)

    def _token(self, key: RequestKey, sequence: _Sequence, index: int) -> int:
        vocab_size = self._spec.vocab_size
        if self._script.weights:
            return weighed_token(self._script.weights, sequence.prompt.tolist(), index, vocab_size=vocab_size)
        return echo_token(key.request_id, key.choice, index, vocab_size=vocab_size, salt=self._salt)

    def _logprobs(self, tokens: list[int], sequence: _Sequence) -> tuple[TokenLogprobs, ...]:
        if sequence.sampling.logprob_count is None:
            return ()
        return tuple(TokenLogprobs(token_id, 0.0) for token_id in tokens)

    def _prompt_logprobs(self, row: ScheduledRequest, sequence: _Sequence) -> tuple[TokenLogprobs, ...]:
        predicted = sequence.prompt[row.start + 1 : row.start + len(row.token_ids) + 1]
        return tuple(TokenLogprobs(token_id, 0.0) for token_id in predicted.tolist())

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        if copies:
            sources, destinations = zip(*copies, strict=True)
            self._shadow[list(destinations)] = self._shadow[list(sources)]

    def _slots(
        self, row: ScheduledRequest, start: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        positions = np.arange(start, end)
        table = np.asarray(row.block_table, dtype=np.int64)
        return table[positions // self._spec.block_size], positions % self._spec.block_size

    def _write(self, row: ScheduledRequest) -> None:
        """Store the prefix hash of each computed position; drafts are hashed as if they were accepted."""
        sequence = self._sequences[row.key]
        known = len(row.token_ids) - row.draft_count
        hashes = sequence.prefix_hashes[row.start : row.start + known]
        if len(hashes) != known:
            raise RuntimeError(f"{row.key} computes tokens that nobody told the runner of")
        for token_id in row.token_ids[known:].tolist():
            hashes.append((hashes[-1] * _PRIME + token_id + 1) & _MASK)
        self._shadow[self._slots(row, row.start, row.start + len(hashes))] = np.array(hashes, dtype=np.uint64)

    def _check(self, row: ScheduledRequest) -> None:
        """After all writes of the step, every position up to the newest known token holds this very prefix."""
        sequence = self._sequences[row.key]
        end = row.start + len(row.token_ids) - row.draft_count
        expected = np.array(sequence.prefix_hashes[:end], dtype=np.uint64)
        found = self._shadow[self._slots(row, 0, end)]
        if not np.array_equal(found, expected):
            wrong = int(np.flatnonzero(found != expected)[0])
            raise RuntimeError(f"{row.key} reads another prefix's keys and values at position {wrong}")
