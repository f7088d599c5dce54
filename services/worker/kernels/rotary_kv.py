"""Rotary embedding of queries and keys, with the write of keys and values into the paged cache, in one Triton kernel.

Owns the split of the fused projection and, where the family has them, the norms of each head. Called by
`runtime/triton_forward`.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl


@dataclasses.dataclass(frozen=True, slots=True)
class RotaryTables:
    """`cosines` and `sines` (positions, head_dim / 2) float32, of `models/rope`, on the device."""

    cosines: torch.Tensor
    sines: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class HeadNorms:
    """`weights` (2, head_dim) float32: RMS norm of each query head and of each key head, before the rotation."""

    weights: torch.Tensor
    eps: float


@dataclasses.dataclass(frozen=True, slots=True)
class WritePlaces:
    """Where T tokens go: `positions` (T,) int32; `slots` (T,) int32, block × block_size + place in the block.

    Only the first `count[0]` tokens are real: the others of a padded step write nothing, neither here nor there.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    count: torch.Tensor


@triton.jit
def _rotate_and_write(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    mixed: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    norms: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    mixed_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    head = tl.program_id(1)
    if token >= tl.load(count):
        return
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, DIM // 2)
    is_dim = dims < HALF
    source = mixed + token.to(tl.int64) * mixed_stride + head * HEAD_DIM
    first = tl.load(source + dims, mask=is_dim, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_NORM:
        weights = norms + (head >= HEADS).to(tl.int32) * HEAD_DIM
        inverse = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / HEAD_DIM + eps)
        first = first * inverse * tl.load(weights + dims, mask=is_dim, other=0.0)
        second = second * inverse * tl.load(weights + HALF + dims, mask=is_dim, other=0.0)
    turn = tl.load(positions + token).to(tl.int64) * HALF + dims
    cosine = tl.load(cosines + turn, mask=is_dim, other=0.0)
    sine = tl.load(sines + turn, mask=is_dim, other=0.0)
    low = first * cosine - second * sine
    high = second * cosine + first * sine
    if head < HEADS:
        target = query + (token.to(tl.int64) * HEADS + head) * HEAD_DIM
        tl.store(target + dims, low.to(query.dtype.element_ty), mask=is_dim)
        tl.store(target + HALF + dims, high.to(query.dtype.element_ty), mask=is_dim)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        place = slot // BLOCK_SIZE * block_stride + (head - HEADS) * head_stride
        offset = slot % BLOCK_SIZE
        target = keys + place + offset
        tl.store(target + dims * BLOCK_SIZE, low.to(keys.dtype.element_ty), mask=is_dim)
        tl.store(target + (HALF + dims) * BLOCK_SIZE, high.to(keys.dtype.element_ty), mask=is_dim)
        all_dims = tl.arange(0, DIM)
        value = tl.load(source + KV_HEADS * HEAD_DIM + all_dims, mask=all_dims < HEAD_DIM)
        target = values + place + offset * HEAD_DIM
        tl.store(target + all_dims, value.to(values.dtype.element_ty), mask=all_dims < HEAD_DIM)


def rotary_kv(
    mixed: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: WritePlaces,
    tables: RotaryTables,
    *,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """Rotated queries (T, heads, head_dim); writes rotated keys, and values, of the T tokens to one layer's cache.

    `mixed` (T, (heads + 2 × kv_heads) × head_dim) is the fused projection, heads in the order query, key, value;
    `keys` and `values` as in `paged_attention`, written in their own dtype. Enqueues only.
    """
    kv_heads, head_dim, block_size = keys.shape[1:]
    heads = mixed.shape[1] // head_dim - 2 * kv_heads
    query = torch.empty((len(mixed), heads, head_dim), dtype=mixed.dtype, device=mixed.device)
    _rotate_and_write[(len(mixed), heads + kv_heads)](
        query,
        keys,
        values,
        mixed,
        tables.cosines,
        tables.sines,
        tables.cosines if norms is None else norms.weights,
        places.positions,
        places.slots,
        places.count,
        mixed.stride(0),
        keys.stride(0),
        keys.stride(1),
        0.0 if norms is None else norms.eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size,
        HAS_NORM=norms is not None,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return query
