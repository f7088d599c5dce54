"""Builds small engines over the echo runner and checks what comes out of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from services.worker.engine.engine import Engine
from services.worker.engine.engine_config import EngineConfig, TenantLimits
from services.worker.engine.fake_model_runner import FakeModelRunner, FakeScript, echo_token
from services.worker.engine.kv_tiers import KVTiers
from services.worker.engine.model_runner import RunnerSpec
from services.worker.engine.outputs import EngineOutput, ModelRunnerOutput, SchedulerOutput
from services.worker.engine.proposer import Proposer
from services.worker.engine.request import (
    Choice,
    EngineRequest,
    FinishReason,
    PriorityClass,
    RequestKey,
    SamplingParams,
    TokenArray,
    fresh_choices,
)

VOCAB_SIZE = 1000


def tokens(*token_ids: int) -> TokenArray:
    """Token ids as the engine takes them."""
    return np.array(token_ids, dtype=np.int32)


def prompt(length: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> TokenArray:
    """The first `length` tokens of the seed's sequence: a shorter prompt is a prefix of a longer one."""
    return np.random.default_rng(seed).integers(0, vocab_size, 4096).astype(np.int32)[:length]


def echoes(request_id: str, count: int, *, choice: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The first `count` output tokens that the echo runner gives a choice."""
    return [echo_token(request_id, choice, index, vocab_size=vocab_size) for index in range(count)]


def make_spec(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 4096,
    eos_token_ids: Iterable[int] = (),
    vocab_size: int = VOCAB_SIZE,
) -> RunnerSpec:
    return RunnerSpec(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        eos_token_ids=frozenset(eos_token_ids),
        deterministic=True,
    )


def make_request(
    request_id: str,
    prompt_token_ids: TokenArray | None = None,
    *,
    max_tokens: int = 8,
    n: int = 1,
    sampling: SamplingParams | None = None,
    **fields: object,
) -> EngineRequest:
    """A request with a tenant salt made of its tenant's name. `fields` are those of EngineRequest."""
    base = EngineRequest(
        request_id=request_id,
        epoch=1,
        prompt_token_ids=prompt(8) if prompt_token_ids is None else prompt_token_ids,
        sampling=sampling if sampling is not None else SamplingParams(max_tokens=max_tokens, seed=1),
        choices=fresh_choices(n),
    )
    request = dataclasses.replace(base, **fields)  # type: ignore[arg-type]
    if "cache_salt" in fields:
        return request
    return dataclasses.replace(request, cache_salt=b"salt of " + request.tenant.encode())


class RecordingRunner(FakeModelRunner):
    """The echo runner, verifying block tables, that keeps every decision it was given."""

    def __init__(self, spec: RunnerSpec, *, script: FakeScript | None = None) -> None:
        super().__init__(spec, script=dataclasses.replace(script or FakeScript(), verify=True))
        self.decisions: list[SchedulerOutput] = []

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.decisions.append(scheduler_output)
        return super().execute(scheduler_output)


class EngineRig:
    """An engine, its runner, a clock that the test moves, and everything that came out, checked after every step."""

    def __init__(
        self,
        *,
        spec: RunnerSpec | None = None,
        script: FakeScript | None = None,
        proposer: Proposer | None = None,
        tiers: KVTiers | None = None,
        **config: object,
    ) -> None:
        self.runner = RecordingRunner(spec if spec is not None else make_spec(), script=script)
        settings = EngineConfig(model_version="echo@1")
        small = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_prefill_chunk": 16}
        self.engine = Engine(
            self.runner,
            dataclasses.replace(settings, **{**small, **config}),  # type: ignore[arg-type]
            proposer=proposer,
            tiers=tiers,
        )
        self.now = 0.0
        self.outputs: dict[RequestKey, list[EngineOutput]] = {}

    @property
    def last(self) -> SchedulerOutput:
        """The latest decision."""
        return self.runner.decisions[-1]

    def add(self, request: EngineRequest) -> EngineRequest:
        self.engine.add_request(request, now=self.now)
        return request

    def step(self, count: int = 1, *, seconds: float = 0.001) -> list[EngineOutput]:
        """Run steps; returns the last one's outputs."""
        outputs: list[EngineOutput] = []
        for _ in range(count):
            self.now += seconds
            outputs = self.engine.step(self.now)
            self.engine.check_invariants()
            for output in outputs:
                self._record(output)
        return outputs

    def run(self, *, limit: int = 2000) -> None:
        """Step until there is no work; fails when that takes more than `limit` steps."""
        for _ in range(limit):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"work is left after {limit} steps: {self.engine.stats(self.now)}")

    def token_ids(self, request_id: str, *, choice: int = 0, epoch: int = 1) -> list[int]:
        """All output tokens of a choice in this engine so far."""
        return [
            token_id
            for output in self.outputs.get(RequestKey(request_id, choice, epoch), [])
            for token_id in output.token_ids
        ]

    def finish(self, request_id: str, *, choice: int = 0, epoch: int = 1) -> FinishReason | None:
        """Why a choice ended; None while it runs."""
        outputs = self.outputs.get(RequestKey(request_id, choice, epoch), [])
        return outputs[-1].finish_reason if outputs else None

    def scheduled_tokens(self, request_id: str) -> list[int]:
        """How many tokens of the request each step so far computed."""
        return [
            sum(len(row.token_ids) for row in decision.scheduled if row.key.request_id == request_id)
            for decision in self.runner.decisions
        ]

    def computed_tokens(self, request_id: str) -> int:
        return sum(self.scheduled_tokens(request_id))

    def _record(self, output: EngineOutput) -> None:
        before = self.outputs.setdefault(output.key, [])
        assert not before or before[-1].finish_reason is None, f"{output.key} goes on after its end"
        assert not (output.started and any(each.started for each in before)), f"{output.key} starts twice"
        if before:
            expected = before[-1].first_index + len(before[-1].token_ids)
            assert output.first_index == expected, f"{output.key} jumps from {expected} to {output.first_index}"
        before.append(output)


def assert_engine_empty(rig: EngineRig) -> None:
    """Nothing is in hand: no request, no held block, no state in the runner, and every choice ended once."""
    rig.engine.check_invariants()
    stats = rig.engine.stats(rig.now)
    assert not rig.engine.has_work()
    assert (stats.running_count, stats.waiting_count, stats.held_block_count) == (0, 0, 0)
    assert stats.backlog_token_count == 0
    assert stats.free_block_count + stats.cached_block_count == stats.total_block_count
    for key, outputs in rig.outputs.items():
        assert sum(output.finish_reason is not None for output in outputs) == 1, f"{key} did not end once"


__all__ = [
    "VOCAB_SIZE",
    "Choice",
    "EngineRig",
    "FakeScript",
    "PriorityClass",
    "RecordingRunner",
    "TenantLimits",
    "assert_engine_empty",
    "echoes",
    "make_request",
    "make_spec",
    "prompt",
    "tokens",
]
