"""Tokens of one choice between worker and front: received by index, handed on once, delivered. Pure."""

from __future__ import annotations

from collections import deque

from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2

from services.gateway.generation import TokenEvent


class ChoiceTokens:
    """One choice. `finish` is the worker's or the budget's end; `closed` once the front was told or stopped it.

    `worker_ended`: the worker of the current attempt runs it no more. `told` of what was delivered is on its way to
    that worker, `confirmed` was written to it.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.handed = 0
        self.delivered = 0
        self.told = 0
        self.confirmed = 0
        self.base = 0
        self.finish: common_pb2.FinishReason.ValueType | None = None
        self.stop_token_id: int | None = None
        self.stopped = False
        self.worker_ended = False
        self.finish_handed = False
        self.unread_logprob_bytes = 0
        self._finished_at_base = False
        self._logprobs: deque[common_pb2.PositionLogprobs] = deque()

    @property
    def received(self) -> int:
        return len(self.token_ids)

    @property
    def closed(self) -> bool:
        return self.finish_handed or self.stopped

    @property
    def handed_since_base(self) -> bool:
        """The front has seen something of the current attempt."""
        return self.handed > self.base or (self.finish_handed and not self._finished_at_base)

    def add(self, delta: worker_service_pb2.Delta) -> None:
        """Take what is new of a delta that leaves no gap."""
        skip = self.received - delta.first_index
        self.token_ids.extend(delta.token_ids[skip:])
        for value in delta.logprobs[skip:]:
            self._logprobs.append(value)
            self.unread_logprob_bytes += value.ByteSize()

    def take(self, room: int, prompt_logprobs: tuple[common_pb2.PositionLogprobs, ...]) -> TokenEvent | None:
        """Hand on up to `room` tokens, with the end once all are out; None when there is nothing to say."""
        count = max(0, min(room, self.received - self.handed))
        ends = self.finish is not None and self.handed + count == self.received
        if not count and not ends and not prompt_logprobs:
            return None
        first, self.handed = self.handed, self.handed + count
        logprobs = tuple(self._logprobs.popleft() for _ in range(min(count, len(self._logprobs))))
        self.unread_logprob_bytes -= sum(value.ByteSize() for value in logprobs)
        self.finish_handed = ends
        return TokenEvent(
            self.index,
            first,
            tuple(self.token_ids[first : self.handed]),
            logprobs,
            prompt_logprobs,
            self.finish if ends else None,
            self.stop_token_id if ends else None,
        )

    def stop(self, token_count: int) -> None:
        """The front ended the choice; what comes later is ignored."""
        self.stopped = True
        self.delivered = min(self.delivered, token_count)

    def cut(self, reason: common_pb2.FinishReason.ValueType) -> None:
        """End the choice at exactly what was handed on."""
        self.drop_unread()
        self.finish = reason

    def drop_unread(self) -> None:
        """Forget what was not handed on, and the end if it was not."""
        del self.token_ids[self.handed :]
        self._logprobs.clear()
        self.unread_logprob_bytes = 0
        if not self.finish_handed:
            self.finish = None
            self.stop_token_id = None

    def restart(self) -> None:
        """Forget what the current attempt sent (nothing of it was handed on)."""
        if self.stopped:
            return
        for _ in range(min(len(self._logprobs), self.received - self.base)):
            self.unread_logprob_bytes -= self._logprobs.pop().ByteSize()
        del self.token_ids[self.base :]
        if not self._finished_at_base:
            self.finish = None
            self.stop_token_id = None
            self.worker_ended = False

    def rebase(self, *, keep: bool) -> None:
        """A new attempt begins: what was received is its prefix, or nothing is kept."""
        if not keep:
            self.base = 0
            self._finished_at_base = False
            self.restart()
            return
        self.base = self.received
        self.told = self.confirmed = self.delivered
        self._finished_at_base = self.finish is not None
        self.worker_ended = self._finished_at_base or self.stopped
