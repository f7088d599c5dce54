"""The matrix products of a layer on a device, by precision: the device's library over weights as they are kept there.

Owns the weights of one product. Called by `triton_forward`, which knows nothing of precisions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from services.worker.kernels import reference
from services.worker.kernels.fp8_rows import quantise_rows

# What the library's fp8 products want both sides of a matrix to be a multiple of.
_FP8_SIDE = 16


class Product(Protocol):
    """Rows (T, inputs) in, rows (T, outputs) out, both in the dtype of the residual's norms. Enqueues only."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    @property
    def weight_bytes(self) -> int: ...


# Of a weight (outputs, inputs) and a bias (outputs,), on the device and in the rows' dtype.
ProductMaker = Callable[[torch.Tensor, torch.Tensor | None], Product]


class PlainProduct:
    """See `Product`. Weights in the dtype of the rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight, self._bias)

    @property
    def weight_bytes(self) -> int:
        return self._weight.nbytes


class Fp8Product:
    """See `Product`. Weights in e4m3 with a scale an output, rows rounded to it with a scale each; sums in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Both in bfloat16, the sides of `weight` multiples of 16."""
        self._weight, scales = reference.quantise_rows(weight)
        self._scales = scales.t()
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        values, scales = quantise_rows(rows)
        return torch._scaled_mm(
            values, self._weight.t(), scales, self._scales, bias=self._bias, out_dtype=torch.bfloat16
        )

    @property
    def weight_bytes(self) -> int:
        return self._weight.nbytes + self._scales.nbytes


def fp8_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """In fp8, but as it is where the library has no fp8 product for a matrix of these sides."""
    fits = all(side % _FP8_SIDE == 0 for side in weight.shape)
    return Fp8Product(weight, bias) if fits else PlainProduct(weight, bias)
