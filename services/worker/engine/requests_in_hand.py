"""Every choice from its `add` to its end, whatever its state: by key, by the id of its request, by its deadline.

Owns the indexes, never the life of a request. Told the time, reads none. Called by the scheduler only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from services.worker.engine.request import Request, RequestKey

# Deadlines of ended requests that are kept, besides as many as there are requests.
_MAX_STALE = 1024


class RequestsInHand:
    """The requests that have not ended."""

    def __init__(self) -> None:
        self._by_key: dict[RequestKey, Request] = {}
        self._by_id: dict[str, list[Request]] = {}
        self._deadlines: list[tuple[float, int, RequestKey]] = []

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        """In the order of `add`. Take a list of it before ending any."""
        return iter(self._by_key.values())

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._by_key

    def add(self, request: Request) -> None:
        """Take in a request whose key is not in hand."""
        self._by_key[request.key] = request
        self._by_id.setdefault(request.key.request_id, []).append(request)
        deadline = request.group.source.deadline
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request.sequence, request.key))

    def remove(self, request: Request) -> None:
        """The request has ended. Raises KeyError when it is not in hand."""
        del self._by_key[request.key]
        same_id = self._by_id[request.key.request_id]
        same_id.remove(request)
        if not same_id:
            del self._by_id[request.key.request_id]

    def matching(self, request_id: str, *, epoch: int | None, choice: int | None) -> list[Request]:
        """The choices of a request; None matches any epoch, any choice."""
        return [
            request
            for request in self._by_id.get(request_id, ())
            if epoch in (None, request.key.epoch) and choice in (None, request.key.choice)
        ]

    def take_due(self, now: float) -> list[Request]:
        """Those whose deadline has come, each once. The caller ends them."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence, key = heapq.heappop(self._deadlines)
            if self._is_in_hand(key, sequence):
                due.append(self._by_key[key])
        if len(self._deadlines) > 2 * len(self._by_key) + _MAX_STALE:
            self._deadlines = [each for each in self._deadlines if self._is_in_hand(each[2], each[1])]
            heapq.heapify(self._deadlines)
        return due

    def check_invariants(self) -> None:
        """Raise AssertionError when the indexes disagree."""
        assert sum(map(len, self._by_id.values())) == len(self._by_key), "the index by id is off"

    def _is_in_hand(self, key: RequestKey, sequence: int) -> bool:
        request = self._by_key.get(key)
        return request is not None and request.sequence == sequence
