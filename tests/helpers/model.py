"""The embedded model behind a real engine, once a run, with a pool and settings of the test's choosing."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from services.worker.engine.engine import Engine
from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.kv_blocks import KVLayout
from services.worker.engine.kv_tiers import KVTiers
from services.worker.engine.model_runner import RunnerSpec
from services.worker.engine.outputs import EngineOutput
from services.worker.engine.proposer import Proposer
from services.worker.engine.request import (
    EngineRequest,
    KVRole,
    PriorityClass,
    RequestKey,
    SamplingParams,
    fresh_choices,
)
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.gguf_loader import load_gguf
from services.worker.models.registry import decoder_tensors
from services.worker.runtime.choosing import NumpyChooser
from services.worker.runtime.draft_proposer import DraftModelProposer
from services.worker.runtime.forward import Forward
from services.worker.runtime.kv_store import KVStore
from services.worker.runtime.sampler import Sampler
from services.worker.runtime.torch_forward import TorchForward
from services.worker.runtime.torch_model_runner import TorchModelRunner
from tests.golden.make_smollm2_greedy import model_path

CONTEXT = 1024
GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_greedy.json"


@dataclasses.dataclass(frozen=True)
class GoldenCase:
    """A prompt and what `transformers` says to it, greedily, in float32."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@functools.cache
def golden_cases() -> tuple[GoldenCase, ...]:
    cases = json.loads(GOLDEN.read_text())["cases"]
    return tuple(GoldenCase(tuple(case["prompt_ids"]), tuple(case["output_ids"])) for case in cases)


@functools.cache
def smollm2() -> tuple[Checkpoint, TorchForward]:
    """The embedded model's checkpoint and its float32 transformer."""
    torch.set_num_threads(1)
    checkpoint = load_gguf(model_path())
    tensors = decoder_tensors(checkpoint.config, checkpoint.tensors)
    return checkpoint, TorchForward(tensors, max_model_len=CONTEXT)


def self_draft(layers: int, *, slots: int = 2) -> DraftModelProposer:
    """The embedded model's first `layers` layers as its own draft model."""
    checkpoint = load_gguf(model_path())
    tensors = decoder_tensors(checkpoint.config, checkpoint.tensors)
    shape = dataclasses.replace(tensors.config, layer_count=layers)
    tensors = dataclasses.replace(tensors, config=shape, layers=tensors.layers[:layers])
    store = KVStore(
        num_blocks=slots * CONTEXT // 16,
        layers=layers,
        kv_heads=shape.kv_head_count,
        head_dim=shape.head_dim,
        block_size=16,
        dtype=torch.float32,
    )
    forward = TorchForward(tensors, max_model_len=CONTEXT)
    return DraftModelProposer(forward, NumpyChooser(), store, max_length=CONTEXT)


class ModelRig:
    """An engine over a loaded transformer that remembers what every choice said."""

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        model: tuple[Checkpoint, Forward] | None = None,
        proposer: Proposer | None = None,
        tiers: Callable[[KVLayout], KVTiers] | None = None,
        **config: object,
    ) -> None:
        checkpoint, forward = model or smollm2()
        shape = checkpoint.config
        store = KVStore(
            num_blocks=num_blocks,
            layers=shape.layer_count,
            kv_heads=shape.kv_head_count,
            head_dim=shape.head_dim,
            block_size=block_size,
            dtype=torch.float32,
        )
        spec = RunnerSpec(
            vocab_size=shape.vocab_size,
            max_model_len=min(CONTEXT, shape.context_length),
            block_size=block_size,
            num_blocks=num_blocks,
            eos_token_ids=checkpoint.tokenizer.eos_token_ids,
            deterministic=forward.deterministic,
        )
        sampler = Sampler(NumpyChooser(), checkpoint.tokenizer.eos_token_ids)
        self.runner = TorchModelRunner(spec=spec, forward=forward, store=store, sampler=sampler)
        base = EngineConfig(model_version="m@1", max_num_seqs=32)
        self.settings = dataclasses.replace(base, **config)  # type: ignore[arg-type]
        self.tiers = tiers(self.runner.kv_layout) if tiers is not None else None
        self.engine = Engine(self.runner, self.settings, proposer=proposer, tiers=self.tiers)
        self.now = 0.0
        self.outputs: dict[RequestKey, list[EngineOutput]] = {}

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int = 64,
        n: int = 1,
        salt: bytes = b"",
        sampling: SamplingParams | None = None,
        priority_class: PriorityClass = PriorityClass.INTERACTIVE,
        kv_role: KVRole = KVRole.LOCAL,
    ) -> None:
        """Queue a request: greedy and past the end of turn unless `sampling` says otherwise; no salt, no cache."""
        greedy = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True)
        request = EngineRequest(
            request_id=request_id,
            epoch=1,
            prompt_token_ids=np.array(prompt_ids, dtype=np.int32),
            sampling=sampling or greedy,
            choices=fresh_choices(n),
            cache_salt=salt,
            priority_class=priority_class,
            kv_role=kv_role,
        )
        self.engine.add_request(request, now=self.now)

    def step(self) -> None:
        self.now += 0.01
        for output in self.engine.step(self.now):
            self.outputs.setdefault(output.key, []).append(output)

    def run(self, *, limit: int = 5000) -> None:
        """Step until nothing is left, then check that nothing is held."""
        for _ in range(limit):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work(), f"work is left: {self.engine.stats(self.now)}"
        self.engine.check_invariants()

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        outputs = self.outputs[RequestKey(request_id, choice, 1)]
        assert all(output.error is None for output in outputs), outputs[-1].error
        return [token for output in outputs for token in output.token_ids]
