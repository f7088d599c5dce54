"""Residual addition and RMS norm in one Triton kernel. Called by `runtime/triton_forward`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_and_norm(
    out: tl.tensor,
    residual: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    delta_weight: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    COLUMNS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    NORMS_DELTA: tl.constexpr,
) -> None:
    columns = tl.arange(0, COLUMNS)
    is_column = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    x = tl.load(residual + at, mask=is_column, other=0.0)
    if HAS_DELTA:
        added = tl.load(delta + at, mask=is_column, other=0.0).to(tl.float32)
        if NORMS_DELTA:
            inverse = tl.rsqrt(tl.sum(added * added, 0) / width + eps)
            added = added * inverse * tl.load(delta_weight + columns, mask=is_column, other=0.0)
        x += added
        tl.store(residual + at, x, mask=is_column)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    result = x * inverse * tl.load(weight + columns, mask=is_column, other=0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_column)


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    eps: float,
    delta_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Adds `delta` (T, width) to `residual` (T, width) float32 in place, and writes the sum's norm to `out`; gives it.

    With `delta_weight` the delta is normed before it is added. Weights are (width,) float32, all contiguous; `out`
    has the dtype of the products that follow. Enqueues only.
    """
    count, width = residual.shape
    columns = triton.next_power_of_2(width)
    _add_and_norm[(count,)](
        out,
        residual,
        residual if delta is None else delta,
        weight,
        weight if delta_weight is None else delta_weight,
        width,
        eps,
        COLUMNS=columns,
        HAS_DELTA=delta is not None,
        NORMS_DELTA=delta_weight is not None,
        num_warps=min(max(columns // 512, 1), 16),
        enable_fp_fusion=True,
    )
    return out
