"""What every Triton kernel here computes, in plain torch and float32: the meaning they are tested against.

Same arguments, same results; slow, and on any device. Never called in a step.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from services.worker.kernels.fp8_rows import FP8, LARGEST, LEAST
from services.worker.kernels.paged_attention import AttentionShape, PagedBatch
from services.worker.kernels.rotary_kv import HeadNorms, RotaryTables, WritePlaces


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PagedBatch, shape: AttentionShape
) -> torch.Tensor:
    """See `paged_attention.paged_attention`; takes `batch.query_starts` for all that is real."""
    group = query.shape[1] // keys.shape[1]
    stride = int(batch.table_stride)
    out = torch.empty_like(query)
    starts = batch.query_starts.tolist()
    for request, (first, end) in enumerate(itertools.pairwise(starts)):
        if first == end:
            continue
        position = batch.positions[first:end].long()
        length = int(position[-1]) + 1
        blocks = batch.tables[request * stride :][: -(-length // keys.shape[3])].long()
        key = keys[blocks].permute(1, 2, 0, 3).flatten(2)[:, :, :length].float().repeat_interleave(group, 0)
        value = values[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float().repeat_interleave(group, 0)
        scores = query[first:end].float().transpose(0, 1) @ key * shape.scale
        columns = torch.arange(length, device=query.device)
        is_seen = columns <= position[:, None]
        if shape.window is not None:
            is_seen &= columns > position[:, None] - shape.window
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
        out[first:end] = (weights @ value).transpose(0, 1).to(out.dtype)
    return out


def rotary_kv(
    mixed: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: WritePlaces,
    tables: RotaryTables,
    *,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """See `rotary_kv.rotary_kv`; rows that are not real come out as 0."""
    kv_heads, head_dim, block_size = keys.shape[1:]
    count = int(places.count)
    heads = mixed[:count].float().reshape(count, -1, head_dim)
    turned, value = heads[:, :-kv_heads], heads[:, -kv_heads:]
    if norms is not None:
        query_heads = turned.shape[1] - kv_heads
        weights = norms.weights[torch.arange(turned.shape[1], device=mixed.device).ge(query_heads).long()]
        turned = turned * torch.rsqrt(turned.pow(2).mean(-1, keepdim=True) + norms.eps) * weights
    at = places.positions[:count].long()
    cosine, sine = tables.cosines[at, None], tables.sines[at, None]
    first, second = turned.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    slots = places.slots[:count].long()
    blocks, offsets = slots // block_size, slots % block_size
    keys[blocks, :, :, offsets] = turned[:, -kv_heads:].to(keys.dtype)
    values[blocks, :, offsets] = value.to(values.dtype)
    query = torch.zeros((len(mixed), turned.shape[1] - kv_heads, head_dim), dtype=mixed.dtype, device=mixed.device)
    query[:count] = turned[:, :-kv_heads].to(mixed.dtype)
    return query


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    eps: float,
    delta_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `rms_norm.add_rms_norm`."""

    def normed(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * by

    if delta is not None:
        residual += delta.float() if delta_weight is None else normed(delta.float(), delta_weight)
    return out.copy_(normed(residual, weight))


def gated(both: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """See `gated.gated`."""
    gate, up = both.float().chunk(2, dim=-1)
    opened = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
    return (opened * up).to(both.dtype)


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fp8_rows.quantise_rows`."""
    top = rows.float().abs().amax(1, keepdim=True).clamp_min(LEAST)
    # Tensors on both sides: a number over a tensor is its reciprocal times the number.
    return (rows * (torch.full_like(top, LARGEST) / top)).to(FP8), top / LARGEST
