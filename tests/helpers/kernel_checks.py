"""One check a kernel: it gives what `kernels/reference.py` gives, for any shape, on the device that this machine has.

Small shapes run in Triton's interpreter (tests/unit), those of real models on a device (tests/gpu).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from services.worker.kernels import reference
from services.worker.kernels.fp8_rows import quantise_rows
from services.worker.kernels.gated import gated
from services.worker.kernels.paged_attention import AttentionShape, paged_attention
from services.worker.kernels.rms_norm import add_rms_norm
from services.worker.kernels.rotary_kv import HeadNorms, RotaryTables, rotary_kv
from services.worker.kernels.sampling import choose_tokens
from services.worker.models.model_config import RopeConfig
from services.worker.models.rope import rope_tables
from services.worker.runtime.choosing import Draw, NumpyChooser
from services.worker.runtime.noise import noise_key
from services.worker.runtime.products import Fp8Product
from tests.helpers.paged import DEVICE, PagedCase, close


def attention_shape(*, window: int | None = None, parts: int = 1) -> AttentionShape:
    return AttentionShape(scale=0.11, window=window, parts=parts)


def attends_as_the_reference(case: PagedCase, wanted: AttentionShape, *, rows: int | None = None) -> None:
    store, batch = case.store(), case.batch(rows=rows)
    views = store.keys(1), store.values(1)

    got = paged_attention(case.query(), *views, batch, wanted)

    real = slice(case.token_count)
    close(got[real], reference.paged_attention(case.query(), *views, batch, wanted)[real])


def rotates_as_the_reference(case: PagedCase, *, has_norms: bool) -> None:
    """Queries turned, keys and values written where they belong and nowhere else."""
    heads, dtype, count = case.heads, case.dtype, case.token_count + case.padding
    noise = torch.Generator().manual_seed(3)
    width = (heads.query + 2 * heads.kv) * heads.dim
    mixed = torch.randn((count, width), generator=noise).to(dtype).to(DEVICE)
    rope = RopeConfig(theta=1e4, dimension=heads.dim)
    tables = RotaryTables(*(t.to(DEVICE) for t in rope_tables(rope, max(case.positions()) + 1)))
    norms = HeadNorms((1 + torch.randn((2, heads.dim), generator=noise)).to(DEVICE), 1e-6) if has_norms else None
    got, expected = case.store(), case.store()

    query = rotary_kv(mixed, got.keys(1), got.values(1), case.places(), tables, norms=norms)

    real = slice(case.token_count)
    wanted = reference.rotary_kv(mixed, expected.keys(1), expected.values(1), case.places(), tables, norms=norms)
    close(query[real], wanted[real])
    close(got.data[1:], expected.data[1:])
    assert torch.equal(got.data[1:, 0], case.store().data[1:, 0]), "another layer was written"
    assert torch.isnan(got.data[0]).all(), "the padding was written"


def norms_as_the_reference(rows: int, width: int, dtype: torch.dtype, delta: str) -> None:
    """`delta`: "none", "plain" (added to the residual) or "normed" (normed before it is added)."""
    noise = torch.Generator().manual_seed(4)
    sizes = ((rows, width), (rows, width), (width,), (width,))
    residual, added, weight, delta_weight = (torch.randn(size, generator=noise).to(DEVICE) for size in sizes)
    given = None if delta == "none" else added.to(dtype)
    by = delta_weight if delta == "normed" else None
    sums = residual.clone(), residual.clone()
    outs = (torch.empty((rows, width), dtype=dtype, device=DEVICE) for _ in range(2))

    got, expected = (
        norm(each, given, weight, out, eps=1e-5, delta_weight=by)
        for norm, each, out in zip((add_rms_norm, reference.add_rms_norm), sums, outs, strict=True)
    )

    close(got, expected)
    close(*sums)
    assert torch.equal(sums[0], residual) == (given is None)


def gates_as_the_reference(rows: int, width: int, dtype: torch.dtype, *, is_gelu: bool) -> None:
    both = (2 * torch.randn((rows, 2 * width), generator=torch.Generator().manual_seed(5))).to(dtype).to(DEVICE)

    close(gated(both, is_gelu=is_gelu), reference.gated(both, is_gelu=is_gelu))


def rounds_rows_as_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    """To the value, zero's sign apart; a row alone to the bit. Among them one of zeros and one of twelve magnitudes."""
    x = torch.randn((rows, width), generator=torch.Generator().manual_seed(7))
    x[0] = 0
    x[1] *= torch.logspace(-12, 0, width)
    x = x.to(dtype).to(DEVICE)

    values, scales = quantise_rows(x)

    expected, expected_scales = reference.quantise_rows(x)
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(scales, expected_scales)
    alone, scale_alone = quantise_rows(x[1:2])
    assert torch.equal(alone.view(torch.uint8), values[1:2].view(torch.uint8))
    assert torch.equal(scale_alone, scales[1:2])


def multiplies_what_was_rounded(rows: int, inputs: int, outputs: int, *, has_bias: bool) -> None:
    """An fp8 product is the exact one of the rounded rows and weights, and near that of the unrounded."""
    noise = torch.Generator().manual_seed(8)
    sizes = ((rows, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(size, generator=noise).to(torch.bfloat16).to(DEVICE) for size in sizes)

    got = Fp8Product(weight, bias if has_bias else None)(x).float()

    left, right = (values.float() * scales for values, scales in map(reference.quantise_rows, (x, weight)))
    added = bias.float() if has_bias else torch.zeros_like(bias).float()
    exact, unrounded = torch.addmm(added, left, right.t()), torch.addmm(added, x.float(), weight.float().t())
    assert torch.linalg.norm(got - exact) < 0.005 * torch.linalg.norm(exact)
    assert torch.linalg.norm(got - unrounded) < 0.06 * torch.linalg.norm(unrounded)


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


def draws_as_the_reference(vocab_size: int, *, has_ties: bool) -> None:
    """A row each filter; of every fourth row from the second, half the tokens are not allowed."""
    draws = [
        Draw(each.temperature, each.top_k, each.top_p, each.min_p, noise_key(seed, 0, 17))
        for seed, each in enumerate(FILTERS)
    ]
    logits = 3 * torch.randn((len(draws), vocab_size), generator=torch.Generator().manual_seed(6))
    logits = logits.round() if has_ties else logits
    logits[1::4, ::2] = -math.inf

    got = choose_tokens(logits.to(DEVICE), draw_table(draws)).tolist()

    assert got == NumpyChooser().choose(logits, draws)


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
