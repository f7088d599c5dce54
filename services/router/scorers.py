"""How good a worker is for a request: each scorer gives a number in [0, 1], higher is better. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from services.router.endpoint import Endpoint, Needs

Scorer = Callable[[Needs, Endpoint, float], float]
_BACKLOG_HALF_TOKENS = 2_048


def least_loaded(needs: Needs, endpoint: Endpoint, now: float) -> float:
    """Share of the batch that is free, submits under way counted as load."""
    slots, _ = endpoint.free(now)
    load = (endpoint.view.in_flight_count if endpoint.view is not None else 0) + endpoint.debit_count
    return slots / (slots + load) if slots + load else 0.0


def short_backlog(needs: Needs, endpoint: Endpoint, now: float) -> float:
    """1 with nothing left to compute, 0.5 at 2,048 tokens."""
    backlog = endpoint.view.backlog_token_count if endpoint.view is not None else 0
    return _BACKLOG_HALF_TOKENS / (_BACKLOG_HALF_TOKENS + max(0, backlog))


WEIGHTED_SCORERS: Final[tuple[tuple[Scorer, float], ...]] = ((least_loaded, 1.0), (short_backlog, 0.5))


def score(needs: Needs, endpoint: Endpoint, now: float) -> float:
    """Weighted mean of the scorers."""
    total = sum(weight for _, weight in WEIGHTED_SCORERS)
    return sum(weight * scorer(needs, endpoint, now) for scorer, weight in WEIGHTED_SCORERS) / total
