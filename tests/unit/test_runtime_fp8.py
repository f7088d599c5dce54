"""Layers in fp8: what their products are, that a row stands alone, what a worker says, and who may not have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from services.worker.models.errors import ModelLoadError
from services.worker.models.registry import decoder_tensors
from services.worker.models.safetensors_loader import load_folder
from services.worker.runtime.devices import check_capability, device_forward
from services.worker.runtime.factory import RunnerOptions, load_runner
from services.worker.runtime.kv_store import KVStore
from services.worker.runtime.products import Fp8Product, PlainProduct, fp8_product
from tests.helpers.device_steps import blocks_of, step_inputs
from tests.helpers.kernel_checks import multiplies_what_was_rounded
from tests.helpers.paged import DEVICE, has_fp8
from tests.helpers.tiny_model import TinyShape, reference_logits, write_tiny_model
from tests.helpers.triton_engine import PLACE

BRAIN = torch.bfloat16
pytestmark = has_fp8


def random(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(BRAIN).to(DEVICE)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_a_product_is_that_of_the_rounded_rows_and_weights(has_bias: bool) -> None:
    multiplies_what_was_rounded(5, 64, 48, has_bias=has_bias)


def test_a_row_is_rounded_by_itself_whatever_its_mates_are() -> None:
    row, product = random(1, 64, seed=1), fp8_product(random(32, 64, seed=2), None)
    small, large = random(3, 64, seed=3), 1e4 * random(3, 64, seed=4)

    assert torch.equal(product(torch.cat((row, small)))[0], product(torch.cat((row, large)))[0])


def test_a_matrix_that_the_library_has_no_fp8_product_for_stays_as_it_is() -> None:
    product = fp8_product(random(40, 64, seed=1), None)

    assert isinstance(product, PlainProduct)
    assert product.weight_bytes == 40 * 64 * 2


def test_weights_count_a_byte_each_and_a_scale_an_output() -> None:
    product = fp8_product(random(48, 64, seed=1), None)

    assert isinstance(product, Fp8Product)
    assert product.weight_bytes == 48 * 64 + 48 * 4


def test_logits_are_near_those_of_float32(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", TinyShape("qwen2", layers=1))
    checkpoint = load_folder(folder)
    forward, _, _ = device_forward(
        decoder_tensors(checkpoint.config, checkpoint.tensors), DEVICE, "fp8", max_model_len=64
    )
    requests = [(0, 5)]
    store = KVStore(
        num_blocks=blocks_of(requests), layers=1, kv_heads=1, head_dim=32, block_size=16, dtype=BRAIN, device=DEVICE
    )
    step = step_inputs(requests, vocab_size=64)

    got = forward.logits(forward.hidden(step, store))[0].cpu()

    expected = reference_logits(folder, step.token_ids.tolist())[-1]
    assert F.cosine_similarity(got, expected, dim=0) > 0.99
    # Embedding, head and the product after attention keep two bytes a weight.
    sides = [(128, 64), (192, 64), (64, 96)]
    assert forward.weight_bytes == 3 * 64 * 64 * 2 + sum(rows * columns + 4 * rows for rows, columns in sides)


def test_the_card_says_fp8_and_keys_and_values_keep_more_bits(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", TinyShape(layers=1))
    options = RunnerOptions(model=str(folder), device=PLACE, dtype="fp8", num_blocks=4, max_model_len=64)

    loaded = load_runner(options)

    assert (loaded.card.dtype, loaded.card.kv_cache_dtype) == ("fp8", "bfloat16")
    assert loaded.runner.kv_layout.dtype == "bfloat16"
    assert not loaded.card.deterministic


def test_a_device_without_fp8_is_named_with_what_it_has_and_what_to_choose() -> None:
    check_capability("NVIDIA L4", (8, 9))
    check_capability("NVIDIA B200", (10, 0))

    with pytest.raises(
        ModelLoadError, match=r"fp8 needs .* capability 8\.9 or newer; NVIDIA A100 has 8\.0: choose bfloat16"
    ):
        check_capability("NVIDIA A100", (8, 0))


def test_a_build_of_torch_without_fp8_for_the_device_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("Rowwise scaling is not currently supported on your device")

    folder = write_tiny_model(tmp_path / "tiny", TinyShape(layers=1))
    monkeypatch.setattr(torch, "_scaled_mm", refuses)

    with pytest.raises(ModelLoadError, match=r"Rowwise scaling is not .*: choose bfloat16"):
        load_runner(RunnerOptions(model=str(folder), device=PLACE, dtype="fp8"))


def test_fp8_on_a_cpu_says_what_to_choose(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")

    with pytest.raises(ModelLoadError, match=r"fp8 needs a CUDA device.*choose int8 or float32"):
        load_runner(RunnerOptions(model=str(folder), device="cpu", dtype="fp8"))
