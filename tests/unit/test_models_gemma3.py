"""Gemma 3: the same logits as transformers' own model with a window shorter than the text, and llama.cpp's answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from services.worker.models.decoder import DecoderTensors
from services.worker.models.gemma3 import gemma3_config
from services.worker.models.gguf_loader import load_gguf
from services.worker.models.model_config import ModelConfig, RopeConfig
from services.worker.models.registry import decoder_tensors
from services.worker.models.tensors import GGMLType, NamedTensors, StoredTensor
from services.worker.runtime import factory
from services.worker.runtime.factory import RunnerOptions
from services.worker.runtime.forward import StepInputs
from services.worker.runtime.kv_store import KVStore
from services.worker.runtime.torch_forward import TorchForward
from tests.helpers.gemma import gemma_path

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma3_greedy.json"
WINDOW, LAYERS, BLOCK = 5, 7, 16
# llama.cpp rounds activations to eight bits for these weights, so a near tie may fall the other way.
NEAR_TIE = 0.2
_NAMES = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "post_norm",
    "post_feedforward_layernorm": "feed_forward_out_norm",
}


def shape() -> ModelConfig:
    plain = ModelConfig(
        family="gemma3",
        vocab_size=64,
        embedding_rows=64,
        hidden_size=32,
        intermediate_size=48,
        layer_count=LAYERS,
        head_count=4,
        kv_head_count=2,
        head_dim=16,
        context_length=64,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1e6, dimension=16),
        tied_embeddings=True,
    )
    return gemma3_config(plain, WINDOW)


def reference() -> Gemma3ForCausalLM:
    """Transformers' own model of that shape with random weights."""
    torch.manual_seed(3)
    ours = shape()
    config = Gemma3TextConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.layer_count,
        num_attention_heads=ours.head_count,
        num_key_value_heads=ours.kv_head_count,
        head_dim=ours.head_dim,
        query_pre_attn_scalar=ours.head_dim,
        max_position_embeddings=ours.context_length,
        sliding_window=WINDOW,
        attn_implementation="eager",
        initializer_range=0.3,
    )
    model = Gemma3ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(weight, std=0.3)
    return model


def tensors_of(model: Gemma3ForCausalLM) -> DecoderTensors:
    stored = {}
    for name, weight in model.model.named_parameters():
        value = (weight.detach() + 1 if name.endswith("norm.weight") else weight.detach()).numpy()
        parts = name.removeprefix("model.").replace("embed_tokens", "embed").split(".")
        parts[-2] = _NAMES.get(parts[-2], parts[-2])
        ours = ".".join([*parts[:2], *parts[-2:]] if parts[0] == "layers" else parts)
        data = np.ascontiguousarray(value).view(np.uint8).reshape(value.size // value.shape[-1], -1)
        stored[ours] = StoredTensor(ours, value.shape, GGMLType.F32, data)
    return decoder_tensors(shape(), NamedTensors(stored))


def logits(forward: TorchForward, config: ModelConfig, token_ids: list[int], chunks: tuple[int, ...]) -> torch.Tensor:
    """Logits (tokens, vocab) after every token of one request, computed in `chunks` that add up to the text."""
    blocks = -(-len(token_ids) // BLOCK)
    store = KVStore(
        num_blocks=blocks,
        layers=config.layer_count,
        kv_heads=config.kv_head_count,
        head_dim=config.head_dim,
        block_size=BLOCK,
        dtype=torch.float32,
    )
    rows, start = [], 0
    for count in chunks:
        step = StepInputs(
            token_ids=np.array(token_ids[start : start + count], dtype=np.int32),
            positions=np.arange(start, start + count, dtype=np.int32),
            query_starts=np.array([0, count], dtype=np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            selected=np.arange(count, dtype=np.int32),
        )
        rows.append(forward.hidden(step, store))
        start += count
    return forward.logits(torch.cat(rows))


@pytest.mark.parametrize("chunks", [(40,), (7, 1, 20, 12)])
def test_logits_are_those_of_transformers(chunks: tuple[int, ...]) -> None:
    model = reference()
    token_ids = [(7 * at * at + 3 * at + 1) % 64 for at in range(40)]

    got = logits(TorchForward(tensors_of(model), max_model_len=64), shape(), token_ids, chunks)

    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    assert torch.allclose(got, expected, atol=2e-4, rtol=1e-3)


def test_the_compiled_kernels_say_that_they_do_not_know_the_family() -> None:
    kernels, reason = factory._kernels(RunnerOptions(), shape(), threads=1)

    assert kernels is None
    assert reason == "they do not know the blocks of the family gemma3"


def test_greedy_answers_are_those_of_llama_cpp() -> None:
    checkpoint = load_gguf(gemma_path())
    forward = TorchForward(decoder_tensors(checkpoint.config, checkpoint.tensors), max_model_len=1024)

    for case in json.loads(GOLDEN.read_text()):
        prompt, said = case["prompt_ids"], case["output_ids"]
        text = [*prompt, *said[:-1]]
        rows = logits(forward, checkpoint.config, text, (len(text),))[len(prompt) - 1 :]
        behind = rows.max(-1).values - rows[torch.arange(len(said)), torch.tensor(said)]
        assert len(said) == 32
        assert float(behind.max()) < NEAR_TIE
        assert int((behind > 0).sum()) <= 1
