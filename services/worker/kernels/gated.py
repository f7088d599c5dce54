"""The gate of the feed-forward part, activation(gate) × up, in one Triton kernel.

Called by `runtime/triton_forward`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def _gate(out: tl.tensor, both: tl.tensor, width: tl.tensor, COLUMNS: tl.constexpr, IS_GELU: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    source = both + row * 2 * width + columns
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=is_column, other=0.0).to(tl.float32)
    if IS_GELU:
        # 0.5 × (1 + tanh y) is the sigmoid of 2y.
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= tl.sigmoid(gate)
    tl.store(out + row * width + columns, (gate * up).to(out.dtype.element_ty), mask=is_column)


def gated(both: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """(T, width) of `both` (T, 2 × width), gate then up, contiguous: SiLU, or GELU (tanh), times up. Enqueues only."""
    count, double = both.shape
    width = double // 2
    out = torch.empty((count, width), dtype=both.dtype, device=both.device)
    _gate[(count, triton.cdiv(width, _COLUMNS))](
        out, both, width, COLUMNS=_COLUMNS, IS_GELU=is_gelu, num_warps=4, enable_fp_fusion=True
    )
    return out
