"""Speculation by a draft model: a cheaper transformer guesses what comes next, the model itself verifies.

Owns the draft model's keys and values: a fixed run of blocks for each request, rolled back by counting. Never decides
when drafting pays. Called by the engine's speculation, on its thread. A fault in here ends drafting, never a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import structlog
import torch

from services.worker.engine.outputs import ScheduledRequest
from services.worker.engine.proposer import DraftRequest
from services.worker.engine.request import RequestKey, TokenArray, no_tokens
from services.worker.runtime.choosing import Chooser
from services.worker.runtime.forward import Forward, IntArray
from services.worker.runtime.input_batch import flatten
from services.worker.runtime.kv_store import KVStore
from services.worker.runtime.sampler import draw_at

# Known tokens that one call computes for requests which the draft model has not kept up with: a long prompt must not
# hold up the step.
CATCH_UP_TOKENS = 256


class _Slot:
    """One request's part of the store. Positions 0 … length - 1 hold keys and values of `tokens[:length]`.

    Up to `verified` those tokens are the request's own; what follows was drafted and may have been rejected since.
    """

    __slots__ = ("index", "length", "tokens", "verified")

    def __init__(self, index: int, max_length: int) -> None:
        self.index = index
        self.length = 0
        self.verified = 0
        self.tokens: IntArray = np.empty(max_length, dtype=np.int32)

    def roll_back(self, known: TokenArray) -> None:
        """Keep what agrees with `known`, all of whose tokens but the newest may stay computed."""
        end = min(self.length, len(known) - 1)
        wrong = np.flatnonzero(self.tokens[self.verified : end] != known[self.verified : end])
        self.length = self.verified = self.verified + int(wrong[0]) if len(wrong) else end


@dataclasses.dataclass(slots=True)
class _Draft:
    """A request that has been kept up with, and its drafts so far."""

    request: DraftRequest
    slot: _Slot
    token_ids: list[int]

    @property
    def is_done(self) -> bool:
        return len(self.token_ids) >= self.request.max_draft_count


class DraftModelProposer:
    """See `Proposer`. Draws with each request's own parameters and noise, so a seeded answer is met like a greedy one.

    `store` is cut into equal runs, one for each of the requests kept at once; longer sequences get no drafts.
    """

    def __init__(self, forward: Forward, chooser: Chooser, store: KVStore, *, max_length: int) -> None:
        self._forward = forward
        self._chooser = chooser
        self._store = store
        self._max_length = max_length
        self._width = -(-max_length // store.block_size)
        self._free = list(range(store.num_blocks // self._width))
        self._slots: dict[RequestKey, _Slot] = {}
        self._is_broken = False

    @property
    def weight_bytes(self) -> int:
        return self._forward.weight_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values when every run is in use."""
        return self._store.num_blocks * self._store.block_bytes

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenArray]:
        """See `Proposer.propose`; blocks for a forward pass of the draft model for each draft of a row."""
        if self._is_broken:
            return [no_tokens()] * len(requests)
        try:
            drafts = {draft.request.key: draft.token_ids for draft in self._draft(requests)}
        except Exception as error:
            structlog.get_logger().error("draft_model_failed", error=type(error).__name__, exc_info=error)
            self._is_broken = True
            drafts = {}
        return [np.array(drafts.get(request.key, ()), dtype=np.int32) for request in requests]

    def release(self, key: RequestKey) -> None:
        """See `Proposer.release`."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot.index)

    def _draft(self, requests: Sequence[DraftRequest]) -> list[_Draft]:
        drafts, hidden = self._catch_up(requests)
        running = self._choose(drafts, hidden)
        while running:
            rows = [(draft.slot, np.array(draft.token_ids[-1:], dtype=np.int32)) for draft in running]
            running = self._choose(running, self._compute(rows))
        return drafts

    def _catch_up(self, requests: Sequence[DraftRequest]) -> tuple[list[_Draft], torch.Tensor]:
        """Compute what is known and not computed, as far as one call goes; what is kept up with can be drafted."""
        budget = CATCH_UP_TOKENS
        rows: list[tuple[_Slot, TokenArray]] = []
        drafts: list[_Draft] = []
        complete: list[int] = []
        for request in requests:
            known = request.token_ids
            slot = self._slot(request)
            if slot is None or not budget:
                continue
            slot.roll_back(known)
            missing = known[slot.length : slot.length + budget]
            budget -= len(missing)
            if slot.length + len(missing) == len(known):
                complete.append(len(rows))
                drafts.append(_Draft(request, slot, []))
            rows.append((slot, missing))
        hidden = self._compute(rows)[complete] if rows else torch.empty(0)
        for draft in drafts:
            draft.slot.verified = draft.slot.length
        return drafts, hidden

    def _slot(self, request: DraftRequest) -> _Slot | None:
        if len(request.token_ids) + request.max_draft_count > self._max_length:
            return None
        slot = self._slots.get(request.key)
        if slot is None and self._free:
            slot = self._slots[request.key] = _Slot(self._free.pop(), self._max_length)
        return slot

    def _compute(self, rows: Sequence[tuple[_Slot, TokenArray]]) -> torch.Tensor:
        """Write keys and values of each row's next tokens; the hidden state (rows, hidden) of each row's last one."""
        scheduled = []
        for slot, token_ids in rows:
            end = slot.length + len(token_ids)
            table = tuple(range(slot.index * self._width, slot.index * self._width + -(-end // self._store.block_size)))
            scheduled.append(ScheduledRequest(_NO_KEY, slot.length, token_ids, table, True))
            slot.tokens[slot.length : end] = token_ids
            slot.length = end
        last = [np.array([len(token_ids) - 1], dtype=np.int32) for _, token_ids in rows]
        return self._forward.hidden(flatten(scheduled, last), self._store)

    def _choose(self, drafts: Sequence[_Draft], hidden: torch.Tensor) -> list[_Draft]:
        """Add the next draft to each row; those that want more."""
        if not drafts:
            return []
        draws = [draw_at(draft.request.sampling, draft.request.key.choice, draft.slot.length) for draft in drafts]
        going_on = []
        for draft, token_id in zip(drafts, self._chooser.choose(self._forward.logits(hidden), draws), strict=True):
            if token_id is None:
                continue
            draft.token_ids.append(token_id)
            if not draft.is_done:
                going_on.append(draft)
        return going_on


# Rows of the draft model are told apart by their place.
_NO_KEY = RequestKey("", 0, 0)
