"""Log-probabilities from unscaled logits: of one token, and of the most likely ones beside it.

Pure functions of a row of logits. Values are finite; a row that cannot give them raises ValueError.
"""

from __future__ import annotations

import math

import torch

from services.worker.engine.outputs import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token: int, top_count: int) -> TokenLogprobs:
    """Logprobs of `token` and of the `top_count` best of `logits` (vocab,), best first; nats."""
    total = float(torch.logsumexp(logits, dim=-1))
    if not math.isfinite(total):
        raise ValueError("logits are not finite")
    top: tuple[tuple[int, float], ...] = ()
    if top_count:
        values, ids = torch.topk(logits, min(top_count, len(logits)))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        top = tuple((index, value - total) for index, value in pairs)
    return TokenLogprobs(token, float(logits[token]) - total, top)
