"""Sampling noise as a pure function of (seed, choice, position, token id), so nothing else can change an answer.

The counter-based hash is the same in `kernels/cpu/sample.h`, bit for bit. Mixing: SplitMix64 for the key,
then MurmurHash3's and Wellons' 32-bit finalisers for the token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1


def noise_key(seed: int, choice: int, position: int) -> int:
    """64-bit key of one sampled position; `position` counts from the first prompt token."""
    key = _splitmix(seed & _MASK)
    key = _splitmix(key ^ (choice * 0xD1342543DE82EF95 & _MASK))
    return _splitmix(key ^ (position * 0x9FB21C651E98DF25 & _MASK))


def gumbel(key: int, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise (n,) for `token_ids` (n,)."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    with np.errstate(over="ignore"):
        x = token_ids.astype(np.uint32) * np.uint32(0x9E3779B1) + low
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        x = (x ^ (x >> np.uint32(16))) + high
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        x = x ^ (x >> np.uint32(16))
    uniform = (x.astype(np.float64) + 0.5) * 2.0**-32
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
