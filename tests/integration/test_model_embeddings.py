"""Embeddings of the embedded model: the mean of the last hidden states, the same bits in any company and chunking."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from services.worker.engine.request import FinishReason, PriorityClass, RequestKey, SamplingParams
from services.worker.kernels.cpu import load_kernels
from services.worker.kernels.cpu_build import KernelUnavailableError
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.registry import decoder_tensors
from services.worker.runtime.forward import Forward
from services.worker.runtime.native_forward import NativeForward
from tests.helpers.model import CONTEXT, ModelRig, golden_cases, smollm2
from tests.helpers.transformers_model import transformers_model

pytestmark = [pytest.mark.model, pytest.mark.slow]
EMBED = SamplingParams(max_tokens=1, seed=0, embed=True)
PROMPT = golden_cases()[19].prompt_ids[:100]
SHORT = golden_cases()[7].prompt_ids


@functools.cache
def native() -> tuple[Checkpoint, Forward]:
    """The compiled kernels, as the worker runs them: weights in the bits that the file has."""
    checkpoint, _ = smollm2()
    try:
        kernels = load_kernels(Path.home() / ".cache" / "millrace" / "kernels", 1)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    tensors = decoder_tensors(checkpoint.config, checkpoint.tensors)
    return checkpoint, NativeForward(kernels, tensors, max_model_len=CONTEXT, quantised=True)


def vector(rig: ModelRig, request_id: str) -> bytes:
    last = rig.outputs[RequestKey(request_id, 0, 1)][-1]
    assert (last.finish_reason, last.error, last.cached_token_count) == (FinishReason.STOP, None, 0)
    return last.embedding


@functools.cache
def alone(prompt: tuple[int, ...]) -> bytes:
    rig = ModelRig(num_blocks=32, model=native(), max_num_batched_tokens=1024, max_prefill_chunk=1024)
    rig.add("e", prompt, sampling=EMBED)
    rig.run()
    return vector(rig, "e")


def values(packed: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(packed, dtype="<f4")


@torch.inference_mode()
def reference(prompt: Sequence[int]) -> npt.NDArray[np.float64]:
    """Mean of `last_hidden_state`, which is after the final norm, at unit length."""
    mean = transformers_model().model(torch.tensor([prompt])).last_hidden_state[0].double().mean(0).numpy()
    return np.asarray(mean / np.linalg.norm(mean))


@pytest.mark.parametrize("prompt", [SHORT, PROMPT], ids=["short", "chunked"])
def test_the_float32_transformer_agrees_with_the_reference_and_the_kernels_come_near(prompt: tuple[int, ...]) -> None:
    expected = reference(prompt)
    rig = ModelRig(num_blocks=32, max_prefill_chunk=33)
    rig.add("e", prompt, sampling=EMBED)
    rig.run()

    np.testing.assert_allclose(values(vector(rig, "e")), expected, atol=2e-5)
    assert float(values(alone(prompt)) @ expected) > 0.99


@pytest.mark.parametrize("chunk", [1, 7, 33, 99])
def test_chunks_change_no_bit(chunk: int) -> None:
    rig = ModelRig(num_blocks=32, model=native(), max_prefill_chunk=chunk)
    rig.add("e", PROMPT, sampling=EMBED)
    rig.run()

    assert vector(rig, "e") == alone(PROMPT)


def test_company_a_warm_cache_and_preemption_change_no_bit() -> None:
    rig = ModelRig(num_blocks=64, model=native(), max_num_seqs=3, max_num_batched_tokens=64, max_prefill_chunk=32)
    rig.add("warm", PROMPT, max_tokens=2, salt=b"s")
    rig.run()
    rig.add("e", PROMPT, sampling=EMBED, salt=b"s", priority_class=PriorityClass.BATCH)
    rig.add("other", SHORT, sampling=EMBED, salt=b"s", priority_class=PriorityClass.BATCH)
    rig.step()
    for index in range(3):
        rig.add(f"urgent{index}", golden_cases()[index + 6].prompt_ids, max_tokens=4)
    rig.run()

    assert rig.engine.stats(rig.now).preemption_total >= 1
    assert vector(rig, "e") == alone(PROMPT)
    assert vector(rig, "other") == alone(SHORT)
