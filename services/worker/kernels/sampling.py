"""One token from each row of logits in one Triton kernel: the meaning is `runtime/choosing`, the noise `runtime/noise`.

No row is sorted. A token's rank is one integer, its logit's order above its id's, so that there are no ties; the rank
at which top-k or top-p cuts is found four bits at a time, each with one pass over the row. Called by
`runtime/triton_forward`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from services.worker.kernels.noise_bits import noise_bits

# Columns of `draws`; counts and keys are whole numbers below 2 ** 32, exact in float64.
DRAW_COLUMNS = ("temperature", "top_p", "least", "top_k", "key_low", "key_high")
NONE = -1
# A rank has 32 bits of the logit above 24 of the id: the vocabulary is smaller.
MAX_VOCABULARY = 1 << 24
_COLUMNS = 512
_DIGITS: tl.constexpr = tl.constexpr(14)
_LOWEST: tl.constexpr = tl.constexpr(-(1 << 55))
# Above the rank of any token whose logit is minus infinity.
_FINITE: tl.constexpr = tl.constexpr((-2139095041 + 1) << 24)
# `choosing.NOISE_SPAN`
_NOISE_SPAN: tl.constexpr = tl.constexpr(26.5)


@triton.jit
def _rank(logits: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Integers (int64) that order as logits do, equals (both zeros are) by the lower id first; none is given twice."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return (order << 24) + (0xFFFFFF - ids)


@triton.jit
def _cut(
    row: tl.tensor,
    count: tl.tensor,
    top: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    kept: tl.tensor,
    share: tl.tensor,
    wanted: tl.tensor,
    IS_MASS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """The highest rank from which up the kept tokens, or their weights, come to `wanted`, or to `share` of them all."""
    low = tl.full((), _LOWEST, tl.int64)
    step = tl.full((), 1 << 52, tl.int64)
    target = wanted
    for digit in tl.range(0, _DIGITS):
        cuts = low + step * tl.arange(0, 16).to(tl.int64)
        totals = tl.zeros((16,), tl.float64)
        for start in tl.range(0, count, COLUMNS):
            ids = start + tl.arange(0, COLUMNS)
            logits = tl.load(row + ids, mask=ids < count, other=float("-inf"))
            rank = _rank(logits, ids)
            # After the first digits hardly a run of tokens reaches up to the cut.
            if tl.max(rank, 0) >= tl.maximum(low, kept):
                scaled = (logits.to(tl.float64) - top) / temperature
                is_kept = (rank >= kept) & (scaled >= least)
                if IS_MASS:
                    weights = tl.where(is_kept, tl.exp(tl.where(is_kept, scaled, 0.0)), 0.0)
                else:
                    weights = is_kept.to(tl.float64)
                totals += tl.sum(tl.where(rank[None, :] >= cuts[:, None], weights[None, :], 0.0), 1)
        if digit == 0:
            target = tl.minimum(target, tl.max(totals, 0) * share)
        low += step * tl.maximum(tl.sum((totals >= target).to(tl.int64), 0) - 1, 0)
        step = step >> 4
    return tl.maximum(low, kept)


@triton.jit
def _choose(
    out: tl.tensor,
    logits: tl.tensor,
    draws: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    draw = draws + index * 6
    temperature = tl.load(draw)
    top_p = tl.load(draw + 1)
    least = tl.load(draw + 2)
    top_k = tl.load(draw + 3)
    low_key = tl.load(draw + 4).to(tl.int64).to(tl.uint32)
    high_key = tl.load(draw + 5).to(tl.int64).to(tl.uint32)

    best = float("-inf")
    first = count
    faults = 0
    for start in tl.range(0, count, COLUMNS):
        ids = start + tl.arange(0, COLUMNS)
        values = tl.load(row + ids, mask=ids < count, other=float("-inf"))
        faults += tl.sum((values != values).to(tl.int32), 0)
        values = tl.where(values == values, values, float("-inf"))
        highest = tl.max(values, 0)
        at = tl.min(tl.where(values == highest, ids, count), 0)
        first = tl.where(highest > best, at, first)
        best = tl.maximum(best, highest)
    if (faults > 0) | (best == float("inf")) | (best == float("-inf")):
        tl.store(out + index, -1)
        return
    if (temperature == 0.0) | (top_k == 1.0):
        tl.store(out + index, first)
        return

    top = tl.cast(best, tl.float64)
    kept = tl.full((), _FINITE, tl.int64)
    if (top_k == 0.0) & (top_p >= 1.0):
        least = tl.maximum(least, -_NOISE_SPAN)
    whole = tl.full((), 1.0, tl.float64)
    no_limit = tl.full((), float("inf"), tl.float64)
    if top_k > 0.0:
        kept = _cut(row, count, top, temperature, least, kept, whole, top_k, False, COLUMNS)
    if top_p < 1.0:
        kept = _cut(row, count, top, temperature, least, kept, top_p, no_limit, True, COLUMNS)
        # The best one stays, however small its share.
        kept = tl.minimum(kept, _rank(best, first))

    loudest = tl.full((), float("-inf"), tl.float64)
    winner = first
    for start in tl.range(0, count, COLUMNS):
        ids = start + tl.arange(0, COLUMNS)
        values = tl.load(row + ids, mask=ids < count, other=float("-inf"))
        scaled = (values.to(tl.float64) - top) / temperature
        passes = (_rank(values, ids) >= kept) & (scaled >= least)
        uniform = (noise_bits(ids, low_key, high_key).to(tl.float64) + 0.5) * 2.3283064365386963e-10
        scores = tl.where(passes, scaled - tl.log(-tl.log(uniform)), float("-inf"))
        highest = tl.max(scores, 0)
        at = tl.min(tl.where(scores == highest, ids, count), 0)
        winner = tl.where(highest > loudest, at, winner)
        loudest = tl.maximum(loudest, highest)
    tl.store(out + index, winner)


def choose_tokens(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Token ids (rows,) int32 for `logits` (rows, vocab) float32, NONE where no token is allowed or a logit is NaN.

    `draws` (rows, 6) float64 holds DRAW_COLUMNS, `least` being the logarithm of min-p (minus infinity for none).
    Enqueues only.
    """
    rows, count = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        _choose[(rows,)](
            out,
            logits,
            draws,
            count,
            logits.stride(0),
            COLUMNS=min(triton.next_power_of_2(count), _COLUMNS),
            num_warps=8,
        )
    return out
