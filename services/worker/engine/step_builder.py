"""One step under construction: its rows, what is left of the token budget, and how long a chunk may be.

Owns nothing beyond the step. Called by the scheduler only.
"""

from __future__ import annotations

import numpy as np

from services.worker.engine.outputs import NewRequest, ScheduledRequest, TokenArray
from services.worker.engine.request import Request


class StepBuilder:
    """Rows and new requests of a step; a step takes at most one chunk of at most one long prefill."""

    def __init__(self, *, budget: int, max_prefill_chunk: int) -> None:
        self.budget = budget
        self.rows: list[ScheduledRequest] = []
        self.requests: list[Request] = []
        self.new_requests: list[NewRequest] = []
        self._max_prefill_chunk = max_prefill_chunk
        self._has_long_chunk = False

    def is_long(self, request: Request) -> bool:
        """True when `request` has more left to compute than one chunk."""
        return request.num_tokens - request.num_computed_tokens > self._max_prefill_chunk

    def chunk_size(self, request: Request, *, others_wait: bool) -> int:
        """Tokens of a prefill that go into this step, possibly 0; the first long one asked for gets the long chunk.

        While others wait a long chunk leaves them half of the budget.
        """
        remaining = request.num_tokens - request.num_computed_tokens
        if remaining <= self._max_prefill_chunk:
            return min(remaining, self.budget)
        if self._has_long_chunk or self.budget == 0:
            return 0
        self._has_long_chunk = True
        return min(self._max_prefill_chunk, (self.budget + 1) // 2 if others_wait else self.budget)

    def introduce(self, request: Request) -> None:
        """Tell the runner of a request that it does not know (any more)."""
        outputs = request.tokens(request.num_prompt_tokens, request.num_tokens)
        prompt = request.tokens(0, request.num_prompt_tokens)
        self.new_requests.append(NewRequest(request.key, prompt, outputs, request.sampling))

    def add_chunk(self, request: Request, size: int) -> None:
        """Compute the next `size` known tokens."""
        start = request.num_computed_tokens
        end = start + size
        samples = end == request.num_tokens
        self.rows.append(ScheduledRequest(request.key, start, request.tokens(start, end), request.block_table, samples))
        self.requests.append(request)
        self.budget -= size

    def add_token(self, request: Request) -> None:
        """Compute the newest token: `add_chunk` of one, for the many rows that decode."""
        start = request.num_computed_tokens
        token_ids = request.tokens(start, start + 1)
        self.rows.append(ScheduledRequest(request.key, start, token_ids, request.block_table, True))
        self.requests.append(request)
        self.budget -= 1

    def add_drafts(self, request: Request, drafts: TokenArray) -> None:
        """Compute the newest token and verify `drafts` after it."""
        start = request.num_computed_tokens
        token_ids = np.concatenate((request.tokens(start, request.num_tokens), drafts))
        self.rows.append(ScheduledRequest(request.key, start, token_ids, request.block_table, True, len(drafts)))
        self.requests.append(request)
        self.budget -= len(token_ids)
