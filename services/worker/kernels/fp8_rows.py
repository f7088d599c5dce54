"""Rows rounded to e4m3, each by a scale of its own, in one Triton kernel: what fp8 products take.

A row's values and scale follow from that row alone. Called by `runtime/products`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
# The largest value of e4m3. A row's largest magnitude becomes it; less than the other counts as that.
LARGEST = 448.0
LEAST = 1e-12


@triton.jit
def _round_rows(
    out: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < width
    x = tl.load(rows + row * width + columns, mask=is_column, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(x), 0), LEAST)
    tl.store(scales + row, tl.div_rn(top, LARGEST))
    x *= tl.div_rn(LARGEST, top)
    # Three bits of a value's own power of two, or of the least normal one, are kept: the sum with 1.5 × 2^20 of it
    # has no room for more. The cast is then exact everywhere; the interpreter's loses the carry of a rounding.
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    coarse = tl.maximum(power, 0.015625) * 1572864.0
    tl.store(out + row * width + columns, ((x + coarse) - coarse).to(out.dtype.element_ty), mask=is_column)


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` (T, width), contiguous, as e4m3 values, and the float32 scales (T, 1) that they are to be multiplied by.

    Enqueues only.
    """
    count, width = rows.shape
    out = torch.empty((count, width), dtype=FP8, device=rows.device)
    scales = torch.empty((count, 1), dtype=torch.float32, device=rows.device)
    columns = triton.next_power_of_2(width)
    _round_rows[(count,)](
        out,
        scales,
        rows,
        width,
        LARGEST=LARGEST,
        LEAST=LEAST,
        COLUMNS=columns,
        num_warps=min(max(columns // 512, 1), 16),
    )
    return out, scales
