"""How good a worker is for a request: each scorer gives a number in [0, 1], higher is better. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Final

from services.router.endpoint import Endpoint, Needs
from services.router.prefix_index import PrefixIndex

LoadScorer = Callable[[Endpoint, int], float]
_BACKLOG_HALF_TOKENS = 2_048
# Affinity yields on a worker that would have more than this many times the mean of the pool …
YIELD_FACTOR = 1.25
# … but not before its batch is so full, or it has so many tokens to compute, that waiting there costs more than
# computing a prefix anew, which also drives another prefix out of the cache of the one that does.
_YIELD_REQUESTS = 2
_YIELD_BATCH_SHARE = 0.25
_YIELD_TOKENS = 4_096


def least_loaded(endpoint: Endpoint, slots: int) -> float:
    """Share of the batch that is free, submits under way counted as load."""
    load = endpoint.load
    return slots / (slots + load) if slots + load else 0.0


def short_backlog(endpoint: Endpoint, slots: int) -> float:
    """1 with nothing left to compute, 0.5 at 2,048 tokens."""
    return _BACKLOG_HALF_TOKENS / (_BACKLOG_HALF_TOKENS + endpoint.token_load)


@dataclasses.dataclass(frozen=True, slots=True)
class PoolLoad:
    """Of all workers that serve such requests, with room or without: how many, their requests and their tokens."""

    count: int
    requests: int
    tokens: int

    @classmethod
    def of(cls, pool: Iterable[Endpoint]) -> PoolLoad:
        """Of these workers."""
        loads = [(endpoint.load, endpoint.token_load) for endpoint in pool]
        return cls(len(loads), sum(load for load, _ in loads), sum(tokens for _, tokens in loads))


class PrefixAffinity:
    """Share of the prompt's leading blocks that a worker has; 0 on one that is loaded above the mean of its pool."""

    def __init__(self, index: PrefixIndex, pool: PoolLoad) -> None:
        self._index = index
        count = max(1, pool.count)
        self._most_requests = max(_YIELD_REQUESTS, YIELD_FACTOR * (pool.requests + 1) / count)
        self._most_tokens = max(_YIELD_TOKENS, YIELD_FACTOR * pool.tokens / count)

    def __call__(self, needs: Needs, endpoint: Endpoint, now: float) -> float:
        if not needs.block_hashes or self.yields(endpoint):
            return 0.0
        return self._index.leading(endpoint.instance, needs.block_hashes, now) / len(needs.block_hashes)

    def yields(self, endpoint: Endpoint) -> bool:
        """One request more here would be too many for the sake of a prefix."""
        most_requests = max(self._most_requests, _YIELD_BATCH_SHARE * endpoint.slot_count)
        return endpoint.load + 1 > most_requests or endpoint.token_load > self._most_tokens


LOAD_SCORERS: Final[tuple[tuple[LoadScorer, float], ...]] = ((least_loaded, 1.0), (short_backlog, 0.5))
AFFINITY_WEIGHT: Final = 2.0
_WEIGHTS: Final = AFFINITY_WEIGHT + sum(weight for _, weight in LOAD_SCORERS)


def load_score(endpoint: Endpoint, slots: int) -> float:
    """What the endpoint, of which so many slots are free, scores with nothing of a prompt cached."""
    return sum([weight * scorer(endpoint, slots) for scorer, weight in LOAD_SCORERS]) / _WEIGHTS


def with_affinity(load: float, affinity: float) -> float:
    """Weighted mean of all scorers: `load` is a load score, `affinity` the share of a prompt that is cached."""
    return load + AFFINITY_WEIGHT * affinity / _WEIGHTS
