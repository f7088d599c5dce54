"""The whole runner on a device: its tokens are plain torch's, and a step from a CUDA graph is the step itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.models.registry import decoder_tensors
from services.worker.models.safetensors_loader import load_folder
from services.worker.runtime.devices import device_forward, warm_up
from services.worker.runtime.kv_store import KVStore
from tests.helpers.device_steps import blocks_of, step_inputs
from tests.helpers.paged import DEVICE, has_fp8
from tests.helpers.tiny_model import TinyShape, reference_greedy, write_tiny_model
from tests.helpers.triton_engine import GREEDY, PROMPT, say

CONTEXT = 128
SHAPE = TinyShape(heads=4, kv_heads=2, context=CONTEXT)
MAX_REQUESTS = 12


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_greedy_answers_are_those_of_plain_torch(tmp_path: Path, model_type: str) -> None:
    """Seven requests, so that decoding steps run in a graph with a row that nobody owns."""
    folder = write_tiny_model(tmp_path / "tiny", TinyShape(model_type, vocab_size=61, padded_rows=3, heads=3))
    prompts = {f"r{count}": PROMPT[:count] for count in (1, 2, 3, 5, 8, 13, 19)}

    said = say(folder, prompts, GREEDY, dtype="float32", max_num_seqs=8)

    for name, prompt in prompts.items():
        assert said[name] == reference_greedy(folder, prompt, GREEDY.max_tokens, vocab_size=61), name


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 5e-2), pytest.param("fp8", 2e-1, marks=has_fp8)]
)
@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_a_step_from_a_graph_is_the_step_itself(tmp_path: Path, count: int, precision: str, tolerance: float) -> None:
    """In a graph of its own size and of a larger one; the hidden rows and the cache are compared."""
    checkpoint = load_folder(write_tiny_model(tmp_path / "tiny", SHAPE))
    tensors = decoder_tensors(checkpoint.config, checkpoint.tensors)
    forward, _, _ = device_forward(tensors, DEVICE, precision, max_model_len=CONTEXT)
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    requests = [(7 * index, 1) for index in range(count)]
    inputs = step_inputs(requests, vocab_size=SHAPE.vocab_size)
    eager, graphed = (random_store(blocks_of(requests), dtype) for _ in range(2))

    expected = forward.hidden(inputs, eager)
    warm_up(forward, graphed, max_requests=MAX_REQUESTS)
    got = forward.hidden(inputs, graphed)

    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(graphed.data.float(), eager.data.float(), atol=tolerance, rtol=tolerance)


def random_store(blocks: int, dtype: torch.dtype) -> KVStore:
    store = KVStore(
        num_blocks=blocks,
        layers=SHAPE.layers,
        kv_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        block_size=16,
        dtype=dtype,
        device=DEVICE,
    )
    store.data.copy_(torch.randn(store.data.shape, generator=torch.Generator().manual_seed(2)))
    return store
