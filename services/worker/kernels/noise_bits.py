"""The hash of `runtime/noise` as a Triton device function: the same 32 bits for the same key and token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_bits(ids: tl.tensor, low_key: tl.tensor, high_key: tl.tensor) -> tl.tensor:
    """uint32 bits for token `ids`; the keys are the halves of `noise.noise_key`, uint32."""
    x = ids.to(tl.uint32) * 0x9E3779B1 + low_key
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16)) + high_key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
