"""The Triton kernels, compiled, in the shapes of real models: what the interpreter is too slow for."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.kernel_checks import (
    attends_as_the_reference,
    attention_shape,
    draws_as_the_reference,
    gates_as_the_reference,
    multiplies_what_was_rounded,
    norms_as_the_reference,
    rotates_as_the_reference,
    rounds_rows_as_the_reference,
)
from tests.helpers.paged import Heads, PagedCase, has_fp8

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of Llama 8B, Qwen2 0.5B, SmolLM2 135M, Gemma 3 1B, a model with a key/value head a head.
HEADS = [Heads(32, 8, 128), Heads(14, 2, 64), Heads(9, 3, 64), Heads(4, 1, 256), Heads(12, 12, 64)]
BATCHES = {
    "decodes": [(0, 1), (15, 1), (16, 1), (17, 1), (1000, 1), (2047, 1)],
    "one long decode": [(8191, 1)],
    "a prompt": [(0, 777)],
    "chunks beside decodes": [(2000, 1), (0, 130), (512, 256), (63, 2), (500, 1)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES.keys())
def test_attention_over_batches_and_heads(requests: list[tuple[int, int]], heads: Heads, dtype: torch.dtype) -> None:
    attends_as_the_reference(PagedCase(heads, requests, dtype=dtype), attention_shape())


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("parts", [1, 4, 32])
@pytest.mark.parametrize("window", [None, 512])
def test_attention_over_blocks_parts_and_windows(block_size: int, parts: int, window: int | None) -> None:
    case = PagedCase(
        Heads(32, 8, 128), [(3000, 1), (90, 1), (511, 3)], block_size=block_size, dtype=torch.bfloat16, padding=3
    )
    attends_as_the_reference(case, attention_shape(parts=parts, window=window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "normed heads"])
def test_rotary_and_cache_write(heads: Heads, dtype: torch.dtype, has_norms: bool) -> None:
    case = PagedCase(heads, BATCHES["chunks beside decodes"], dtype=dtype, padding=5)
    rotates_as_the_reference(case, has_norms=has_norms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [576, 896, 4096, 8192])
@pytest.mark.parametrize("delta", ["none", "plain", "normed"])
def test_norm_and_residual(delta: str, width: int, dtype: torch.dtype) -> None:
    norms_as_the_reference(300, width, dtype, delta)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1536, 4864, 14336])
@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])
def test_gate(is_gelu: bool, width: int, dtype: torch.dtype) -> None:
    gates_as_the_reference(300, width, dtype, is_gelu=is_gelu)


@has_fp8
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [576, 4096, 14336])
def test_rows_rounded_to_fp8(width: int, dtype: torch.dtype) -> None:
    rounds_rows_as_the_reference(300, width, dtype)


@has_fp8
@pytest.mark.parametrize("rows", [1, 8, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (14336, 4096), (576, 960)])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_fp8_product(rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    multiplies_what_was_rounded(rows, inputs, outputs, has_bias=has_bias)


@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
@pytest.mark.parametrize("has_ties", [False, True], ids=["distinct", "ties"])
def test_sampler(vocab_size: int, has_ties: bool) -> None:
    draws_as_the_reference(vocab_size, has_ties=has_ties)
