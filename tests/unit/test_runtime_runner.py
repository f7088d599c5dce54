"""The real runner against plain torch: padded rows, biases, half-precision keys, prompt logprobs; faults stay alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.worker.engine.engine import Engine
from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.outputs import EngineOutput
from services.worker.engine.request import EngineRequest, FinishReason, SamplingParams
from services.worker.runtime import sampler, torch_model_runner
from services.worker.runtime.factory import RunnerOptions, load_runner
from tests.helpers.tiny_model import TinyShape, reference_greedy, reference_logits, write_tiny_model

PROMPT = [5, 17, 3, 44, 21, 9, 9, 30, 2, 51, 8, 13, 26]
GREEDY = SamplingParams(max_tokens=24, seed=1, temperature=0.0, ignore_eos=True)
compiled_or_torch = pytest.mark.parametrize("compiled", [False, True], ids=["torch", "compiled"])


class Rig:
    """An engine over a folder's model; outputs by request."""

    def __init__(self, folder: Path, *, chunk: int = 256, **options: object) -> None:
        fixed = RunnerOptions(model=str(folder), num_blocks=64, threads=1, max_model_len=128)
        loaded = load_runner(dataclasses.replace(fixed, **options))  # type: ignore[arg-type]
        self.engine = Engine(loaded.runner, EngineConfig(model_version="tiny@1", max_prefill_chunk=chunk))
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(self, name: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> None:
        self.engine.add_request(EngineRequest(name, 1, np.array(prompt, dtype=np.int32), sampling), now=0.0)

    def run(self) -> None:
        for _ in range(500):
            for output in self.engine.step(0.0):
                self.outputs.setdefault(output.key.request_id, []).append(output)
            if not self.engine.has_work():
                break
        self.engine.check_invariants()

    def said(self, name: str) -> list[int]:
        return [token_id for output in self.outputs[name] for token_id in output.token_ids]

    def ending(self, name: str) -> tuple[FinishReason | None, str | None]:
        return self.outputs[name][-1].finish_reason, self.outputs[name][-1].error


@compiled_or_torch
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_the_runner_says_what_plain_torch_says(tmp_path: Path, model_type: str, kv_dtype: str, compiled: bool) -> None:
    folder = write_tiny_model(tmp_path / "tiny", TinyShape(model_type, kv_heads=1))
    rig = Rig(folder, chunk=5, kv_cache_dtype=kv_dtype, compiled_kernels=compiled)
    rig.add("a", PROMPT)
    rig.add("b", PROMPT[3:9])
    rig.run()

    for name, prompt in (("a", PROMPT), ("b", PROMPT[3:9])):
        expected = reference_greedy(folder, prompt, GREEDY.max_tokens, vocab_size=64)
        assert rig.said(name) == expected
        assert len(set(expected)) > 3


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_steps_of_one_row_give_the_same_bits_on_one_thread_and_on_all(tmp_path: Path, dtype: str) -> None:
    """With several threads the first sixteen steps of one row take turns between one thread and all."""
    folder = write_tiny_model(tmp_path / "tiny")
    sampling = dataclasses.replace(GREEDY, logprob_count=3)
    said = []
    for threads in (1, 3):
        rig = Rig(folder, threads=threads, dtype=dtype)
        rig.add("a", PROMPT, sampling)
        rig.run()
        said.append([(output.token_ids, output.logprobs) for output in rig.outputs["a"]])

    assert said[0] == said[1]
    assert len(said[0]) >= GREEDY.max_tokens


@compiled_or_torch
def test_padded_rows_of_the_vocabulary_are_never_said_nor_counted(tmp_path: Path, compiled: bool) -> None:
    """Rows beyond the tokenizer's words, one of them the likeliest of all."""
    shape = TinyShape(vocab_size=60, padded_rows=36)
    folder = write_tiny_model(tmp_path / "tiny", shape)
    logits = reference_logits(folder, PROMPT)[-1]
    assert int(logits.argmax()) >= 60
    rig = Rig(folder, compiled_kernels=compiled)
    rig.add("greedy", PROMPT, dataclasses.replace(GREEDY, logprob_count=20))
    for seed in range(8):
        rig.add(f"s{seed}", PROMPT, dataclasses.replace(GREEDY, seed=seed, temperature=2.0))
    rig.run()

    assert rig.said("greedy") == reference_greedy(folder, PROMPT, GREEDY.max_tokens, vocab_size=60)
    assert all(max(rig.said(f"s{seed}")) < 60 for seed in range(8))
    first = rig.outputs["greedy"][0].logprobs[0]
    assert first.logprob == pytest.approx(float(logits[:60].log_softmax(-1).max()), abs=1e-3)
    assert all(token_id < 60 for token_id, _ in first.top)


@compiled_or_torch
@pytest.mark.parametrize("chunk", [1, 4, 5, 256])
def test_prompt_logprobs_do_not_know_where_chunks_end(tmp_path: Path, chunk: int, compiled: bool) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    rig = Rig(folder, chunk=chunk, compiled_kernels=compiled)
    rig.add("r", PROMPT, dataclasses.replace(GREEDY, prompt_logprob_count=3))
    rig.add("beside", PROMPT[2:])
    rig.run()

    got = [entry for output in rig.outputs["r"] for entry in output.prompt_logprobs]
    expected = reference_logits(folder, PROMPT).log_softmax(-1)
    assert [entry.token_id for entry in got] == PROMPT[1:]
    for at, entry in enumerate(got):
        assert entry.logprob == pytest.approx(float(expected[at, PROMPT[at + 1]]), abs=1e-3)
        top = expected[at].topk(3)
        assert [token_id for token_id, _ in entry.top] == top.indices.tolist()
    assert rig.said("r") == reference_greedy(folder, PROMPT, GREEDY.max_tokens, vocab_size=64)


def _fails_for(marked: Callable[..., bool], original: Callable[..., object]) -> Callable[..., object]:
    """`original`, but for the call that `marked` picks out."""

    def hooked(*arguments: object, **named: object) -> object:
        if marked(*arguments):
            raise ZeroDivisionError("injected")
        return original(*arguments, **named)

    return hooked


STAGES: dict[str, tuple[object, str, Callable[..., bool], SamplingParams]] = {
    "rules": (
        sampler,
        "adjust",
        lambda logits, state, eos: state.sampling.frequency_penalty == 1.5,
        dataclasses.replace(GREEDY, frequency_penalty=1.5),
    ),
    "draw": (
        sampler,
        "draw_at",
        lambda sampling, choice, position: sampling.seed == 4711,
        dataclasses.replace(GREEDY, temperature=0.7, seed=4711),
    ),
    "logprobs": (
        sampler,
        "token_logprobs",
        lambda logits, token_id, count: count == 7,
        dataclasses.replace(GREEDY, logprob_count=7),
    ),
    "prompt logprobs": (
        torch_model_runner,
        "token_logprobs",
        lambda logits, token_id, count: count == 7,
        dataclasses.replace(GREEDY, prompt_logprob_count=7),
    ),
}


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_a_fault_at_any_stage_of_one_request_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    module, name, marked, sampling = STAGES[stage]
    monkeypatch.setattr(module, name, _fails_for(marked, getattr(module, name)))
    rig = Rig(folder, chunk=4, compiled_kernels=False)
    rig.add("before", PROMPT)
    rig.add("broken", PROMPT[1:], sampling)
    rig.add("after", PROMPT[2:], dataclasses.replace(GREEDY, logprob_count=2, prompt_logprob_count=1))
    rig.run()

    reason, error = rig.ending("broken")
    assert reason is FinishReason.ERROR
    assert error is not None
    assert "injected" in error
    for neighbour, prompt in (("before", PROMPT), ("after", PROMPT[2:])):
        assert rig.ending(neighbour) == (FinishReason.LENGTH, None)
        assert rig.said(neighbour) == reference_greedy(folder, prompt, GREEDY.max_tokens, vocab_size=64)


def test_a_row_that_is_out_of_bounds_computes_nothing_and_harms_no_block(tmp_path: Path) -> None:
    """Token ids that the check at the door should have caught are caught again before they index anything."""
    rig = Rig(write_tiny_model(tmp_path / "tiny"), compiled_kernels=False)
    request = EngineRequest("bad", 1, np.array([3, 64], dtype=np.int32), GREEDY)
    rig.engine._scheduler.add(request, now=0.0)
    rig.add("good", PROMPT)
    rig.run()

    assert rig.ending("bad") == (FinishReason.ERROR, "a token id is outside the vocabulary")
    assert rig.ending("good") == (FinishReason.LENGTH, None)
