"""Every Triton kernel against `kernels/reference.py`: in Triton's interpreter, or compiled where there is a device."""

from __future__ import annotations

import math

import pytest
import torch

from services.worker.kernels.paged_attention import context_parts, tile_rows, tile_tokens
from services.worker.kernels.sampling import choose_tokens
from tests.helpers.kernel_checks import (
    attends_as_the_reference,
    attention_shape,
    draw,
    draw_table,
    draws_as_the_reference,
    gates_as_the_reference,
    norms_as_the_reference,
    rotates_as_the_reference,
    rounds_rows_as_the_reference,
)
from tests.helpers.paged import DEVICE, Heads, PagedCase, has_fp8

HALF, BRAIN = torch.float16, torch.bfloat16
DECODES = [(0, 1), (15, 1), (16, 1), (70, 1)]
MIXED = [(31, 1), (0, 9), (17, 22), (63, 2)]
CASES = {
    "decodes": PagedCase(Heads(4, 2, 64), DECODES),
    "decodes of seven heads a group": PagedCase(Heads(14, 2, 64), DECODES[2:], dtype=BRAIN),
    "one head each": PagedCase(Heads(2, 2, 128), MIXED[:2], dtype=HALF),
    "mixed": PagedCase(Heads(6, 2, 64), MIXED),
    "mixed in blocks of 32": PagedCase(Heads(4, 1, 64), MIXED, block_size=32, dtype=HALF),
    "mixed in blocks of 128": PagedCase(Heads(2, 1, 64), MIXED[:2], block_size=128),
    "mixed, wide heads": PagedCase(Heads(2, 1, 256), MIXED[1:3], dtype=BRAIN),
    "odd heads": PagedCase(Heads(3, 1, 80), MIXED[:3]),
    "padded": PagedCase(Heads(4, 2, 64), DECODES, padding=3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_says_what_the_reference_says(case: PagedCase) -> None:
    attends_as_the_reference(case, attention_shape())


@pytest.mark.parametrize("window", [1, 16, 23])
def test_a_window_hides_what_is_too_old(window: int) -> None:
    attends_as_the_reference(PagedCase(Heads(4, 2, 64), [(80, 1), (130, 3), (0, 9)]), attention_shape(window=window))


@pytest.mark.parametrize(("parts", "window"), [(2, None), (8, None), (4, 70)])
def test_a_context_in_parts_is_the_same_context(parts: int, window: int | None) -> None:
    """Contexts shorter than one part among them, and padding that belongs to nobody."""
    case = PagedCase(Heads(4, 2, 64), [(250, 1), (3, 1), (129, 2)], padding=2)
    attends_as_the_reference(case, attention_shape(parts=parts, window=window))


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_the_cut_into_tiles_is_invisible(rows: int) -> None:
    attends_as_the_reference(PagedCase(Heads(6, 2, 64), MIXED), attention_shape(), rows=rows)


def test_tiles_grow_with_the_queries_and_parts_with_idle_processors() -> None:
    assert [tile_rows(4, tokens=n, requests=8) for n in (8, 9, 256)] == [16, 64, 128]
    assert tile_rows(33, tokens=2, requests=2) == 64
    assert [tile_tokens(group, rows=64) for group in (1, 3, 64, 100)] == [64, 21, 1, 1]
    assert [context_parts(n, 8, multiprocessors=132) for n in (1, 2, 16, 33, 1000)] == [32, 16, 2, 1, 1]


@pytest.mark.parametrize(
    ("heads", "dtype", "has_norms"),
    [
        (Heads(3, 1, 64), torch.float32, False),
        (Heads(2, 2, 80), HALF, False),
        (Heads(2, 1, 128), BRAIN, True),
        (Heads(1, 1, 256), torch.float32, True),
    ],
)
def test_rotary_turns_and_writes_what_the_reference_does(heads: Heads, dtype: torch.dtype, has_norms: bool) -> None:
    case = PagedCase(heads, [(31, 1), (0, 5), (14, 4)], dtype=dtype, padding=2)
    rotates_as_the_reference(case, has_norms=has_norms)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN])
@pytest.mark.parametrize("delta", ["none", "plain", "normed"])
def test_norm_and_residual_are_the_reference_s(delta: str, dtype: torch.dtype) -> None:
    norms_as_the_reference(5, 96, dtype, delta)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN])
@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])
def test_the_gate_is_the_reference_s(is_gelu: bool, dtype: torch.dtype) -> None:
    gates_as_the_reference(3, 1100, dtype, is_gelu=is_gelu)


@has_fp8
@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_rows_are_rounded_to_fp8_as_the_reference_rounds_them(dtype: torch.dtype) -> None:
    rounds_rows_as_the_reference(4, 1100, dtype)


@pytest.mark.parametrize("has_ties", [False, True], ids=["distinct", "ties"])
def test_the_sampler_draws_the_token_that_the_reference_draws(has_ties: bool) -> None:
    draws_as_the_reference(300, has_ties=has_ties)


def test_a_row_without_an_allowed_token_gives_none() -> None:
    logits = torch.zeros((4, 40))
    logits[0] = -math.inf
    logits[1, 7] = math.nan
    logits[2, 9] = math.inf
    logits[3, 8] = -math.inf

    assert choose_tokens(
        logits.to(DEVICE), draw_table([draw(), draw(), draw(temperature=0.0), draw(top_k=1)])
    ).tolist() == [
        -1,
        -1,
        -1,
        0,
    ]
