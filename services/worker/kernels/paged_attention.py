"""Attention of a mixed batch (prefill chunks and decodes in one launch) over paged keys and values, in Triton.

Owns how work is cut: a program takes a few consecutive query tokens of one request with all query heads that share a
key/value head, and one part of that request's context; a second kernel joins the parts. Online softmax over tiles
(FlashAttention, arXiv 2205.14135), contexts in parts (Flash-Decoding). Called by `runtime/triton_forward`.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

# Rows of a tensor-core product; fewer are padded to this.
MIN_ROWS = 16
MAX_PARTS = 64
_LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True, slots=True)
class QueryTiles:
    """Which query tokens a program takes; int32 tensors on the device.

    `requests`, `firsts` (N,): tile i is at most `tokens` tokens of request `requests[i]`, from token row `firsts[i]`.
    Only the first `count[0]` tiles are real: the others of a padded step read and write nothing.
    """

    requests: torch.Tensor
    firsts: torch.Tensor
    count: torch.Tensor
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where T query tokens of R requests stand and where their keys and values lie; int32 tensors on the device.

    `positions` (T,) rise by one inside a request; `query_starts` (R + 1,) cut the tokens by request. Block `j` of
    request `r` is `tables[r * stride + j]` with `stride = table_stride[0]`, which also bounds j. Only the first
    `count[0]` tokens are real.
    """

    count: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    tables: torch.Tensor
    table_stride: torch.Tensor
    tiles: QueryTiles


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionShape:
    """Constants of a layer. `window` None lets a token see every position up to its own, else the last `window`."""

    scale: float
    window: int | None
    parts: int


def tile_tokens(group: int, *, rows: int) -> int:
    """Query tokens of a tile of `rows` rows when `group` query heads share a key/value head; at least one."""
    return max(rows // group, 1)


def tile_rows(group: int, *, tokens: int, requests: int) -> int:
    """Rows of a tile for a step: as few as go when every request decodes, more the longer its queries are."""
    least = max(MIN_ROWS, _power_of_two(group))
    if tokens <= requests:
        return least
    return max(least, 128 if tokens >= 32 * requests else 64)


def context_parts(tiles: int, kv_heads: int, *, multiprocessors: int) -> int:
    """Parts of each context so that a step of few tiles still fills the device; a power of two."""
    wanted = 2 * multiprocessors // max(tiles * kv_heads, 1)
    return min(_power_of_two(wanted + 1) // 2, MAX_PARTS) if wanted > 1 else 1


def _power_of_two(number: int) -> int:
    """The least that is not below `number`, which is positive."""
    return 1 << (number - 1).bit_length()


@triton.jit
def _attend(
    out: tl.tensor,
    part_out: tl.tensor,
    part_max: tl.tensor,
    part_sum: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    positions: tl.tensor,
    query_starts: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    tile_requests: tl.tensor,
    tile_firsts: tl.tensor,
    tile_count: tl.tensor,
    scale: tl.tensor,
    heads: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDENS: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    if tile >= tl.load(tile_count):
        return
    request = tl.load(tile_requests + tile)
    first = tl.load(tile_firsts + tile)
    last = tl.minimum(first + TOKENS, tl.load(query_starts + request + 1)) - 1
    width = tl.load(table_stride)
    table = tables + request.to(tl.int64) * width

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    token = first + rows // GROUP
    is_row = (token <= last) & (rows < TOKENS * GROUP)
    at = token.to(tl.int64) * heads + kv_head * GROUP + rows % GROUP
    is_value = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query + at[:, None] * HEAD_DIM + dims[None, :], mask=is_value, other=0.0)
    if WIDENS:
        q = q.to(tl.float32)
    position = tl.load(positions + token, mask=is_row, other=0)

    end = tl.load(positions + last) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(tl.load(positions + first) - WINDOW + 1, 0) // COLUMNS * COLUMNS
    share = tl.cdiv(tl.cdiv(end - begin, COLUMNS), PARTS) * COLUMNS
    begin += part * share
    end = tl.minimum(end, begin + share)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    for start in tl.range(begin, end, COLUMNS):
        column = tl.multiple_of(start, COLUMNS) + tl.arange(0, COLUMNS)
        # One block's columns share an entry, so loads stay as wide as a block; entries beyond a row's own are 0.
        entry = column // BLOCK_SIZE
        block = tl.load(table + entry, mask=entry < width, other=0).to(tl.int64)
        base = block * block_stride + kv_head * head_stride
        offset = column % BLOCK_SIZE
        k = tl.load(
            keys + base[None, :] + dims[:, None] * BLOCK_SIZE + offset[None, :],
            mask=(dims < HEAD_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
        is_seen = (column[None, :] <= position[:, None]) & is_row[:, None]
        if WINDOW > 0:
            is_seen &= column[None, :] > position[:, None] - WINDOW
        scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet keeps -inf as its top; 0 in its place keeps its weights 0 and not NaN.
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(top - pivot)
        total = total * shrink + tl.sum(weights, 1)
        # What lies behind the context is another's or nobody's: it must not reach the product, not even times 0.
        is_known = (column < end)[:, None] & (dims < HEAD_DIM)[None, :]
        v = tl.load(values + base[:, None] + offset[:, None] * HEAD_DIM + dims[None, :], mask=is_known, other=0.0)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), mixed, input_precision=PRECISION)
        top = new_top
    if PARTS == 1:
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=is_value)
    else:
        slot = at * PARTS + part
        tl.store(part_max + slot, top, mask=is_row)
        tl.store(part_sum + slot, total, mask=is_row)
        tl.store(part_out + slot[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_value)


@triton.jit
def _join(
    out: tl.tensor,
    part_out: tl.tensor,
    part_max: tl.tensor,
    part_sum: tl.tensor,
    count: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    if tl.program_id(0) >= tl.load(count):
        return
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    parts = row * PARTS + tl.arange(0, PARTS)
    dims = tl.arange(0, DIM)
    top = tl.load(part_max + parts)
    is_used = top != float("-inf")
    best = tl.max(top, 0)
    factors = tl.where(is_used, tl.exp2(tl.where(is_used, top, best) - best), 0.0)
    total = tl.sum(factors * tl.load(part_sum + parts), 0)
    is_value = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    mixed = tl.load(part_out + parts[:, None] * HEAD_DIM + dims[None, :], mask=is_value, other=0.0)
    result = tl.sum(mixed * factors[:, None], 0) / total
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: PagedBatch, shape: AttentionShape
) -> torch.Tensor:
    """Attention of `query` (T, heads, head_dim), contiguous; returns the same shape and dtype.

    `keys` (blocks, kv_heads, head_dim, block_size) and `values` (blocks, kv_heads, block_size, head_dim) are views of
    one layer's cache; each head's part of a block is contiguous. Enqueues only; `parts` > 1 takes float32 scratch of
    that many times the result.
    """
    count, heads, head_dim = query.shape
    parts = shape.parts
    out = torch.empty_like(query)
    scratch = torch.empty((count, heads, parts, head_dim if parts > 1 else 0), dtype=torch.float32, device=query.device)
    stats = torch.empty((2, count, heads, parts), dtype=torch.float32, device=query.device)
    _launch(query, keys, values, batch, shape, (out, scratch, *stats))
    if parts > 1:
        _join[(count, heads)](
            out,
            scratch,
            stats[0],
            stats[1],
            batch.count,
            HEAD_DIM=head_dim,
            DIM=_padded(head_dim),
            PARTS=parts,
            enable_fp_fusion=True,
        )
    return out


def _launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: PagedBatch,
    shape: AttentionShape,
    results: tuple[torch.Tensor, ...],
) -> None:
    _, heads, head_dim = query.shape
    kv_heads, block_size = keys.shape[1], keys.shape[3]
    group = heads // kv_heads
    tiles = batch.tiles
    rows = max(MIN_ROWS, _power_of_two(tiles.tokens * group))
    dim = _padded(head_dim)
    is_wide = dim * query.element_size() > 256
    _attend[(len(tiles.requests), kv_heads, shape.parts)](
        *results,
        query,
        keys,
        values,
        batch.positions,
        batch.query_starts,
        batch.tables,
        batch.table_stride,
        tiles.requests,
        tiles.firsts,
        tiles.count,
        shape.scale * _LOG2_E,
        heads,
        keys.stride(0),
        keys.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=block_size,
        TOKENS=tiles.tokens,
        ROWS=rows,
        COLUMNS=max(32 if is_wide else 64, block_size),
        WINDOW=shape.window or 0,
        PARTS=shape.parts,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        # Triton's interpreter multiplies bfloat16 operands as if their bits were integers.
        WIDENS=triton.knobs.runtime.interpret and query.dtype is torch.bfloat16,
        num_warps=8 if rows >= 128 else 4,
        num_stages=2 if is_wide else 3,
        enable_fp_fusion=True,
    )


def _padded(head_dim: int) -> int:
    return max(_power_of_two(head_dim), MIN_ROWS)
