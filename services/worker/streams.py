"""One request's output as its gateway sees it: what was produced, sent and acknowledged, per choice.

Pure values and arithmetic; builds the wire events of what is unsent. Owned by the request table.

Ruler of one choice:   start … base=acked … sent … end      ids[i] has index base + i; below base nothing is kept.
"""

from __future__ import annotations

import dataclasses

from google.protobuf import timestamp_pb2
from millrace.common.v1 import admission_pb2, common_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_types import SUSPECT_DEATHS
from services.worker import wire
from services.worker.engine.outputs import EngineOutput, TokenLogprobs
from services.worker.engine.request import FinishReason

# What a position of a frame takes, about: an embedding counts as that many.
_POSITION_BYTES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class RequestFacts:
    """What stays true of one attempt. `entry` has no prompt tokens; `prompt_block_count` is the prompt's room.

    `claimed_at` is when a router claimed it, by its clock.
    """

    request_id: str
    attempt: int
    epoch: int
    gateway_instance: str
    entry: admission_pb2.AdmissionEntry
    prompt_token_count: int
    prompt_block_count: int
    traceparent: str
    claimed_at: timestamp_pb2.Timestamp | None = None

    @property
    def suspect(self) -> bool:
        """Two workers died with it in hand."""
        return len(self.entry.lost_workers) >= SUSPECT_DEATHS


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt ended for all its choices. `reason` is of the error table; `detail` has no content."""

    reason: str
    detail: str
    retryable: bool


@dataclasses.dataclass(slots=True)
class Marks:
    """Unix seconds of what happened; None until it does."""

    submit: float
    start: float | None = None
    first_token: float | None = None
    end: float | None = None
    cancel: float | None = None

    @property
    def phase(self) -> str:
        """What is done for it now, in a word."""
        if self.start is None:
            return "queued"
        return "prefill" if self.first_token is None else "decode"


class ChoiceStream:
    """Output of one choice from its first index on."""

    def __init__(self, index: int, start: int) -> None:
        self.index = index
        self.start = start
        self.base = start
        self.sent = start
        self.delivered = 0
        self.finish: tuple[FinishReason, int | None] | None = None
        self.finish_sent = False
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def end(self) -> int:
        """Index after the newest token."""
        return self.base + len(self._ids)

    @property
    def unsent(self) -> bool:
        return self.sent < self.end or (self.finish is not None and not self.finish_sent)

    def append(self, first_index: int, ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Take new tokens. Raises ValueError when they leave a gap or overlap."""
        if first_index != self.end:
            raise ValueError(f"choice {self.index} expected index {self.end}, got {first_index}")
        self._ids.extend(ids)
        self._logprobs.extend(logprobs)

    def ack(self, next_index: int) -> None:
        """Forget tokens below `next_index`; what was not sent cannot be acknowledged."""
        count = min(next_index, self.sent) - self.base
        if count > 0:
            del self._ids[:count]
            del self._logprobs[:count]
            self.base += count

    def confirm(self, count: int) -> None:
        """The client has the first `count` tokens; never more than there are."""
        self.delivered = max(self.delivered, min(count, self.end))

    def rewind(self, next_index: int) -> bool:
        """Send again from `next_index`; False when tokens from there are no longer kept or were never made."""
        if not self.base <= next_index <= self.end:
            return False
        self.sent = next_index
        self.finish_sent = False
        self.ack(next_index)
        return True

    def fill(self, delta: worker_service_pb2.Delta, limit: int) -> int:
        """Put up to `limit` unsent tokens into `delta`, advance `sent` and return how many."""
        low = self.sent - self.base
        ids = self._ids[low : low + limit]
        delta.choice = self.index
        delta.first_index = self.sent
        delta.token_ids.extend(ids)
        for value in self._logprobs[low : low + limit]:
            delta.logprobs.append(wire.position_logprobs(value))
        self.sent += len(ids)
        return len(ids)


class RequestStream:
    """One attempt of one request. `slot_count` is how many of its choices still run in the engine."""

    def __init__(self, facts: RequestFacts, starts: dict[int, int], *, now_wall: float) -> None:
        self.facts = facts
        self.choices = {index: ChoiceStream(index, start) for index, start in starts.items()}
        self.marks = Marks(submit=now_wall)
        self.slot_count = len(starts)
        self.cached_token_count = 0
        self.failure: Failure | None = None
        self.abandoned = False
        self.cancelled_in = ""
        self._accepted_sent = False
        self._started_sent = False
        self._failure_sent = False
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs_sent = False
        self._embedding = b""
        self._embedding_sent = False

    @property
    def ended(self) -> bool:
        """Nothing more will be produced."""
        return self.marks.end is not None

    @property
    def started(self) -> bool:
        return self.marks.start is not None

    @property
    def unsent(self) -> bool:
        if self.failure is not None:
            return not self._failure_sent
        return (
            not self._accepted_sent
            or (self.started and not self._started_sent)
            or any(choice.unsent for choice in self.choices.values())
        )

    def apply(self, output: EngineOutput, *, now_wall: float) -> bool:
        """Take one engine output of this attempt; True when it must go out at once.

        Raises ValueError when its indices do not follow on.
        """
        choice = self.choices[output.key.choice]
        if choice.finish is not None or self.failure is not None:
            return False
        urgent = output.finish_reason is not None or (bool(output.token_ids) and choice.end == choice.start)
        if output.started and not self.started:
            self.marks.start = now_wall
            self.cached_token_count = output.cached_token_count
            urgent = True
        choice.append(output.first_index if output.token_ids else choice.end, output.token_ids, output.logprobs)
        self._prompt_logprobs.extend(output.prompt_logprobs)
        self._embedding = output.embedding
        if output.token_ids and self.marks.first_token is None:
            self.marks.first_token = now_wall
        if output.finish_reason is FinishReason.ERROR:
            self.fail(Failure("ENGINE_ERROR", "The engine could not compute this request.", retryable=False), now_wall)
        elif output.finish_reason is not None:
            choice.finish = (output.finish_reason, output.stop_token_id)
            self.slot_count -= 1
            if all(choice.finish is not None for choice in self.choices.values()):
                self.marks.end = now_wall
        return urgent

    def note_cancel(self, now_wall: float) -> None:
        """The gateway wants no more of it."""
        if self.marks.cancel is None:
            self.marks.cancel = now_wall
            self.cancelled_in = self.marks.phase

    def fail(self, failure: Failure, now_wall: float) -> None:
        """End the attempt for all choices; the first failure stands, an ended attempt stays as it is."""
        if not self.ended:
            self.failure = failure
            self.marks.end = now_wall
            self.slot_count = 0

    def ack(self, entry: worker_service_pb2.AckEntry) -> None:
        """Take the gateway's next wanted index and its delivered tokens per choice, in the order of choice numbers."""
        for index, next_index in enumerate(entry.next_indices):
            if index in self.choices:
                self.choices[index].ack(next_index)
        # A gateway of an older release says only what it holds.
        for index, count in enumerate(entry.delivered_counts or entry.next_indices):
            if index in self.choices:
                self.choices[index].confirm(count)

    def continue_from(self, next_indices: list[int]) -> bool:
        """The gateway holds everything below these indices; False when the rest is not kept here."""
        self._accepted_sent = True
        self._started_sent = self._failure_sent = self._prompt_logprobs_sent = self._embedding_sent = False
        wanted = dict(enumerate(next_indices))
        return all(choice.rewind(wanted.get(index, choice.start)) for index, choice in self.choices.items())

    def restart_sending(self) -> None:
        """The gateway does not know this request yet: send again from the first unacknowledged token."""
        self._accepted_sent = False
        self._started_sent = self._failure_sent = self._prompt_logprobs_sent = self._embedding_sent = False
        for choice in self.choices.values():
            choice.rewind(choice.base)

    def take_events(self, limit: int) -> tuple[list[worker_service_pb2.Event], int]:
        """Unsent events, holding at most `limit` positions; returns them and the positions used."""
        events: list[worker_service_pb2.Event] = []
        if not self._accepted_sent:
            accepted = self._event(events).accepted
            accepted.SetInParent()
            if self.facts.claimed_at is not None:
                accepted.claim_time.CopyFrom(self.facts.claimed_at)
            self._accepted_sent = True
        if self.started and not self._started_sent:
            self._event(events).started.cached_token_count = self.cached_token_count
            self._started_sent = True
        used = self._take_prompt_logprobs(events) + self._take_embedding(events)
        weight = 1 + self._alternative_count()
        for choice in self.choices.values():
            if used >= limit:
                break
            if choice.unsent:
                delta = self._event(events).delta
                used += weight * max(1, choice.fill(delta, max(1, (limit - used) // weight)))
                self._add_finish(choice, delta)
        if (
            self.failure is not None
            and not self._failure_sent
            and not any(c.sent < c.end for c in self.choices.values())
        ):
            failure = self.failure
            event = self._event(events)
            event.failed.reason = failure.reason
            event.failed.detail = failure.detail
            event.failed.retryable = failure.retryable
            self._failure_sent = True
        return events, used

    def delivered_counts(self) -> list[int]:
        """Tokens of each choice that reached the client, as far as the gateway said, in the order of choice numbers."""
        return [choice.delivered for _, choice in sorted(self.choices.items())]

    def produced_count(self) -> int:
        """Output tokens of all choices, those of earlier attempts included."""
        return sum(choice.end for choice in self.choices.values())

    def _alternative_count(self) -> int:
        sampling = self.facts.entry.sampling
        return 1 + sampling.logprob_count if sampling.HasField("logprob_count") else 0

    def _event(self, events: list[worker_service_pb2.Event]) -> worker_service_pb2.Event:
        facts = self.facts
        event = worker_service_pb2.Event(request_id=facts.request_id, attempt=facts.attempt, epoch=facts.epoch)
        events.append(event)
        return event

    def _take_prompt_logprobs(self, events: list[worker_service_pb2.Event]) -> int:
        # Prefill may come in chunks: the positions go out once, whole, before the first token.
        # A prompt of one token has no value, but its place.
        alone = self.facts.prompt_token_count == 1 and self.facts.entry.sampling.HasField("prompt_logprob_count")
        ready = self.marks.first_token is not None and (alone or bool(self._prompt_logprobs))
        if not ready or self._prompt_logprobs_sent:
            return 0
        message = self._event(events).prompt_logprobs
        if len(self._prompt_logprobs) == self.facts.prompt_token_count - 1:
            message.positions.append(common_pb2.PositionLogprobs())
        for value in self._prompt_logprobs:
            message.positions.append(wire.position_logprobs(value))
        self._prompt_logprobs_sent = True
        return len(message.positions) * (1 + self.facts.entry.sampling.prompt_logprob_count)

    def _take_embedding(self, events: list[worker_service_pb2.Event]) -> int:
        if not self._embedding or self._embedding_sent:
            return 0
        self._event(events).embedding.vector = self._embedding
        self._embedding_sent = True
        return len(self._embedding) // _POSITION_BYTES

    def _add_finish(self, choice: ChoiceStream, delta: worker_service_pb2.Delta) -> None:
        if choice.finish is None or choice.sent < choice.end:
            return
        reason, stop_token_id = choice.finish
        delta.finish.reason = wire.finish_reason(reason)
        if stop_token_id is not None:
            delta.finish.stop_token_id = stop_token_id
        delta.finish.usage.CopyFrom(
            wire.token_usage(self.facts.prompt_token_count, self.cached_token_count, choice.end)
        )
        choice.finish_sent = True
