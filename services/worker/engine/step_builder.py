"""One step under construction: its rows, what is left of the token budget, and how long a chunk may be.

Owns nothing beyond the step. Called by the scheduler only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from services.worker.engine.decode_columns import DecodeColumns
from services.worker.engine.outputs import NewRequest, ScheduledRequest, TokenArray
from services.worker.engine.request import Request, RequestKey


class StepBuilder:
    """Rows and new requests of a step; a step takes at most one chunk of at most one long prefill."""

    def __init__(self, columns: DecodeColumns, *, budget: int, max_prefill_chunk: int) -> None:
        """`columns` outlive the step: they are those of the step before."""
        self.budget = budget
        self.token_count = 0
        # In the order of `requests`.
        self.rows: list[ScheduledRequest] = []
        self.decode_keys: list[RequestKey] = []
        self.drafts: Mapping[RequestKey, TokenArray] = {}
        self.requests: list[Request] = []
        self.new_requests: list[NewRequest] = []
        self._columns = columns
        self._max_prefill_chunk = max_prefill_chunk
        self._has_long_chunk = False

    def is_long(self, request: Request) -> bool:
        """True when `request` has more left to compute than one chunk."""
        return request.num_pending_tokens > self._max_prefill_chunk

    def chunk_size(self, request: Request, *, others_wait: bool) -> int:
        """Tokens of a prefill that go into this step, possibly 0; the first long one asked for gets the long chunk.

        While others wait a long chunk leaves them half of the budget.
        """
        remaining = request.num_pending_tokens
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
        self.rows.append(ScheduledRequest(request.key, start, request.tokens(start, end), request.blocks, samples))
        self.requests.append(request)
        self._take(size)

    def add_decodes(self, requests: list[Request], drafts: Mapping[RequestKey, TokenArray]) -> None:
        """Compute the newest token of each of `requests`, and verify after it the drafts that some of them have.

        Before any chunk of the step.
        """
        self.rows = self._columns.advance(requests)
        self.requests += requests
        self._take(len(requests))
        if drafts:
            self.drafts = drafts
            self.rows = [_with_drafts(row, drafts.get(row.key)) for row in self.rows]
            self._columns.forget()
            self._take(sum(map(len, drafts.values())))
        self.decode_keys = self._columns.keys

    def _take(self, count: int) -> None:
        self.budget -= count
        self.token_count += count


def _with_drafts(row: ScheduledRequest, drafts: TokenArray | None) -> ScheduledRequest:
    if drafts is None:
        return row
    token_ids = np.concatenate((row.token_ids, drafts))
    return ScheduledRequest(row.key, row.start, token_ids, row.block_table, True, len(drafts))
