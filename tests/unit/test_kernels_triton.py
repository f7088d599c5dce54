"""Every Triton kernel against `kernels/reference.py`: in Triton's interpreter, or compiled where there is a device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.worker.kernels import reference
from services.worker.kernels.gated import gated
from services.worker.kernels.paged_attention import (
    AttentionShape,
    context_parts,
    paged_attention,
    tile_rows,
    tile_tokens,
)
from services.worker.kernels.rms_norm import add_rms_norm
from services.worker.kernels.rotary_kv import HeadNorms, RotaryTables, rotary_kv
from services.worker.kernels.sampling import choose_tokens
from services.worker.models.model_config import RopeConfig
from services.worker.models.rope import rope_tables
from services.worker.runtime.choosing import Draw, NumpyChooser
from services.worker.runtime.noise import noise_key
from tests.helpers.paged import DEVICE, Heads, PagedCase, close

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


def shape(*, window: int | None = None, parts: int = 1) -> AttentionShape:
    return AttentionShape(scale=0.11, window=window, parts=parts)


def attends_as_the_reference(case: PagedCase, wanted: AttentionShape, *, rows: int | None = None) -> None:
    store, batch = case.store(), case.batch(rows=rows)
    views = store.keys(1), store.values(1)

    got = paged_attention(case.query(), *views, batch, wanted)

    real = slice(case.token_count)
    close(got[real], reference.paged_attention(case.query(), *views, batch, wanted)[real])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_says_what_the_reference_says(case: PagedCase) -> None:
    attends_as_the_reference(case, shape())


@pytest.mark.parametrize("window", [1, 16, 23])
def test_a_window_hides_what_is_too_old(window: int) -> None:
    attends_as_the_reference(PagedCase(Heads(4, 2, 64), [(80, 1), (130, 3), (0, 9)]), shape(window=window))


@pytest.mark.parametrize(("parts", "window"), [(2, None), (8, None), (4, 70)])
def test_a_context_in_parts_is_the_same_context(parts: int, window: int | None) -> None:
    """Contexts shorter than one part among them, and padding that belongs to nobody."""
    case = PagedCase(Heads(4, 2, 64), [(250, 1), (3, 1), (129, 2)], padding=2)
    attends_as_the_reference(case, shape(parts=parts, window=window))


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_the_cut_into_tiles_is_invisible(rows: int) -> None:
    attends_as_the_reference(PagedCase(Heads(6, 2, 64), MIXED), shape(), rows=rows)


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
    noise = torch.Generator().manual_seed(3)
    width = (heads.query + 2 * heads.kv) * heads.dim
    mixed = torch.randn((case.token_count + 2, width), generator=noise).to(dtype).to(DEVICE)
    tables = RotaryTables(*(t.to(DEVICE) for t in rope_tables(RopeConfig(theta=1e4, dimension=heads.dim), 96)))
    norms = HeadNorms((1 + torch.randn((2, heads.dim), generator=noise)).to(DEVICE), 1e-6) if has_norms else None
    got, expected = case.store(), case.store()

    query = rotary_kv(mixed, got.keys(1), got.values(1), case.places(), tables, norms=norms)

    real = slice(case.token_count)
    wanted = reference.rotary_kv(mixed, expected.keys(1), expected.values(1), case.places(), tables, norms=norms)
    close(query[real], wanted[real])
    close(got.data[1:], expected.data[1:])
    assert torch.equal(got.data[1:, 0], case.store().data[1:, 0]), "another layer was written"
    assert torch.isnan(got.data[0]).all(), "the padding was written"


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN])
@pytest.mark.parametrize("delta", ["none", "plain", "normed"])
def test_norm_and_residual_are_the_reference_s(delta: str, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(4)
    residual, added, weight, delta_weight = (
        torch.randn(size, generator=noise).to(DEVICE) for size in ((5, 96), (5, 96), (96,), (96,))
    )
    given = None if delta == "none" else added.to(dtype)
    by = delta_weight if delta == "normed" else None
    sums = residual.clone(), residual.clone()
    outs = (torch.empty((5, 96), dtype=dtype, device=DEVICE) for _ in range(2))

    got, expected = (
        norm(each, given, weight, out, eps=1e-5, delta_weight=by)
        for norm, each, out in zip((add_rms_norm, reference.add_rms_norm), sums, outs, strict=True)
    )

    close(got, expected)
    close(*sums)
    assert torch.equal(sums[0], residual) == (given is None)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN])
@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])
def test_the_gate_is_the_reference_s(is_gelu: bool, dtype: torch.dtype) -> None:
    both = (2 * torch.randn((3, 2 * 1100), generator=torch.Generator().manual_seed(5))).to(dtype).to(DEVICE)

    close(gated(both, is_gelu=is_gelu), reference.gated(both, is_gelu=is_gelu))


def draw(**changes: float) -> Draw:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "noise_key": 0, **changes}
    return Draw(**values)  # type: ignore[arg-type]


FILTERS = [
    draw(temperature=0.0),
    draw(top_k=1),
    draw(),
    draw(temperature=0.4, min_p=0.05),
    draw(top_k=5),
    draw(top_k=9, top_p=0.6),
    draw(top_p=0.9, temperature=1.7),
    draw(top_p=0.0),
    draw(top_k=400, top_p=0.5, min_p=0.01),
]


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
def test_the_sampler_draws_the_token_that_the_reference_draws(rounded: bool) -> None:
    draws = [
        Draw(each.temperature, each.top_k, each.top_p, each.min_p, noise_key(seed, 0, 17))
        for seed, each in enumerate(FILTERS)
    ]
    logits = 3 * torch.randn((len(draws), 300), generator=torch.Generator().manual_seed(6))
    logits = logits.round() if rounded else logits
    logits[1::4, ::2] = -math.inf

    got = choose_tokens(logits.to(DEVICE), draw_table(draws)).tolist()

    assert got == NumpyChooser().choose(logits, draws)


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


def draw_table(draws: list[Draw]) -> torch.Tensor:
    rows = [
        (
            each.temperature,
            each.top_p,
            math.log(each.min_p) if each.min_p else -math.inf,
            each.top_k,
            each.noise_key & 0xFFFFFFFF,
            each.noise_key >> 32,
        )
        for each in draws
    ]
    return torch.from_numpy(np.array(rows, dtype=np.float64)).to(DEVICE)
