"""The runner over Triton kernels, end to end: the tokens of plain torch, in the interpreter or on a device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.models.errors import ModelLoadError
from services.worker.runtime.device_step import StepSize, decode_size, pack, step_size, unpack
from services.worker.runtime.factory import RunnerOptions, load_runner
from services.worker.runtime.forward import StepInputs
from services.worker.runtime.graphs import bucket_sizes
from tests.helpers.tiny_model import TinyShape, reference_greedy, write_tiny_model
from tests.helpers.triton_engine import GREEDY, PLACE, PROMPT, say


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_greedy_answers_are_those_of_plain_torch(tmp_path: Path, model_type: str) -> None:
    """Grouped heads, a padded vocabulary, biases; chunks of a prefill beside a decode."""
    shape = TinyShape(
        model_type, vocab_size=61, padded_rows=3, heads=3, kv_heads=1, layers=1 if model_type == "qwen2" else 2
    )
    folder = write_tiny_model(tmp_path / "tiny", shape)
    prompts = {"short": PROMPT[:3], "long": PROMPT}

    said = say(folder, prompts, GREEDY, dtype="float32")

    for name, prompt in prompts.items():
        assert said[name] == reference_greedy(folder, prompt, GREEDY.max_tokens, vocab_size=61), name


def test_seeded_answers_and_rules_are_those_of_the_cpu(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", TinyShape(layers=1))
    sampling = dataclasses.replace(
        GREEDY, temperature=0.9, top_p=0.8, top_k=20, seed=11, repetition_penalty=1.3, logprob_count=2
    )

    got = say(folder, {"r": PROMPT[:7]}, sampling, dtype="float32")

    assert got == say(folder, {"r": PROMPT[:7]}, sampling, device="cpu", compiled_kernels=False)


def test_int8_is_refused_on_a_device_and_bfloat16_without_one(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")

    with pytest.raises(ModelLoadError, match="int8 is for a CPU"):
        load_runner(RunnerOptions(model=str(folder), device=PLACE, dtype="int8"))
    with pytest.raises(ModelLoadError, match="needs a CUDA device"):
        load_runner(RunnerOptions(model=str(folder), device="cpu", dtype="bfloat16"))


def inputs(*requests: tuple[int, int]) -> StepInputs:
    """Requests as (positions before, tokens); block b of request r is 10 r + b."""
    lengths = [count for _, count in requests]
    width = max(-(-(start + count) // 16) for start, count in requests)
    positions = np.concatenate([np.arange(start, start + count, dtype=np.int32) for start, count in requests])
    return StepInputs(
        token_ids=positions + 100,
        positions=positions,
        query_starts=np.cumsum([0, *lengths]).astype(np.int32),
        block_tables=np.array([[10 * r + b for b in range(width)] for r in range(len(requests))], dtype=np.int32),
        selected=np.array([0], dtype=np.int32),
    )


def test_a_step_is_packed_in_aligned_parts_that_come_out_again() -> None:
    step = inputs((40, 1), (0, 70), (15, 2))
    size = step_size(step, 3)

    got = unpack(torch.from_numpy(pack(step, size, 16)), size)

    assert size == StepSize(73, 3, 6, 21)
    assert [int(part) for part in (got.places.count, got.batch.tiles.count, got.batch.table_stride)] == [73, 6, 5]
    assert got.token_ids.tolist() == step.token_ids.tolist()
    assert got.places.slots[[0, 1, 17, 71, 72]].tolist() == [2 * 16 + 8, 160, 176, 335, 336]
    assert got.batch.query_starts.tolist() == [0, 1, 71, 73]
    assert got.batch.tiles.requests.tolist() == [0, 1, 1, 1, 1, 2]
    assert got.batch.tiles.firsts.tolist() == [0, 1, 22, 43, 64, 71]
    assert got.batch.tables.tolist() == step.block_tables.flatten().tolist()
    offsets = [part.storage_offset() for part in (got.token_ids, got.places.slots, got.batch.tables)]
    assert [offset % 4 for offset in offsets] == [0, 0, 0]


def test_a_decode_packed_for_more_rows_says_how_many_are_real() -> None:
    step, size = inputs((40, 1), (3, 1)), decode_size(8)

    got = unpack(torch.from_numpy(pack(step, size, 16)), size)

    assert (int(got.places.count), int(got.batch.tiles.count), len(got.token_ids)) == (2, 2, 8)
    assert got.batch.tiles.firsts[:2].tolist() == [0, 1]
    assert got.batch.tables.tolist() == [0, 1, 2, 10, 11, 12]


def test_every_batch_size_has_a_graph_that_is_not_much_larger() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_sizes(32)[-2:] == [24, 32]
