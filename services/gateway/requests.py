"""One live request as its gateway sees it: binding, tokens by index, resume, poison, budget. Events in, actions out.

Pure and synchronous: no I/O, no clock (every call gets monotonic seconds). The seam's `LiveGeneration` owns one each
and performs the actions. Charter: rules of PROTOCOL §4, §5 and §7 only; text, transport and Redis stay out.

Ruler of one choice:   0 … delivered … handed … received     base = what this attempt was given as prefix
                       delivered ≤ confirmed to the worker + 16 and, over all choices, handed ≤ budget
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_types import RequestPhase, RequestRecord, first_epoch
from services.common.errors import (
    DeadlineExceeded,
    Draining,
    EngineError,
    MillraceError,
    Poisoned,
    PoolClosed,
    SlowReader,
    StoreUnavailable,
    WorkerLost,
    error_of,
)
from services.gateway.choice_tokens import ChoiceTokens
from services.gateway.end_errors import error_of_finish, error_of_record
from services.gateway.generation import RequestLimits, TokenEvent
from services.gateway.request_actions import Action, Binding, Own, Readmit, Reattach, Rechoose, SendCancel

UNCONFIRMED_TOKENS = 16
CONFIRM_TOKENS = 8
MAX_ATTEMPTS = 3
BUDGET_LEASE_TOKENS = 64
# An owner that said nothing for so long does not have the request.
_ACCEPTED_WITHIN_S = 5.0
_BUDGET_LOW_TOKENS = 32
_BYTES_PER_TOKEN = 16


class RequestCore:
    """State of one live request. `error` set means that it failed; `done` that every choice has ended."""

    def __init__(self, limits: RequestLimits, *, now: float) -> None:
        self.limits = limits
        self.choices = tuple(ChoiceTokens(index) for index in range(limits.choice_count))
        self.binding: Binding | None = None
        # Attempts given up whose workers keep what was delivered.
        self._left: list[Binding] = []
        self.attempt = 1
        self._lost: tuple[str, ...] = ()
        self._holder = ""
        self._failures = 0
        self.error: MillraceError | None = None
        self.ended = False
        self.started = False
        self.cached_token_count = 0
        self.embedding = b""
        self.queued_at = now
        self.heard_at = now
        self.budget = limits.budget_tokens
        self.budget_exhausted = False
        self._floor = 0
        self._owned: tuple[int, float] | None = None
        self._gap_at: tuple[int, int] | None = None
        self._prompt_logprobs: tuple[common_pb2.PositionLogprobs, ...] | None = None
        self._prompt_logprobs_handed = False

    # --- what the front asks -------------------------------------------------------------------------------------
    @property
    def done(self) -> bool:
        """Every choice was handed its end or was stopped by the front."""
        return all(choice.closed for choice in self.choices)

    @property
    def produced(self) -> bool:
        """Nothing more is wanted of any worker."""
        return all(choice.finish is not None or choice.stopped for choice in self.choices)

    @property
    def received_count(self) -> int:
        return sum(choice.received for choice in self.choices)

    @property
    def delivered_any(self) -> bool:
        return any(choice.delivered for choice in self.choices)

    def pull(self) -> TokenEvent | None:
        """The next event for the front, None when there is nothing to hand out yet."""
        for choice in self.choices:
            if choice.closed:
                continue
            event = choice.take(self._room(choice), self._fresh_prompt_logprobs(choice))
            if event is not None:
                return event
        return None

    def stop_choice(self, index: int, token_count: int) -> list[Action]:
        """The front ended a choice after `token_count` tokens."""
        choice = self.choices[index]
        if choice.stopped:
            return []
        choice.stop(token_count)
        if choice.finish is None and self.binding is not None:
            return [SendCancel(self.binding.instance, self.binding.epoch, index)]
        return []

    def mark_delivered(self, index: int, token_count: int) -> bool:
        """The first `token_count` tokens of a choice reached the client's transport; True: tell the worker."""
        choice = self.choices[index]
        choice.delivered = max(choice.delivered, min(token_count, choice.handed))
        return self.binding is not None and choice.delivered - choice.told >= CONFIRM_TOKENS

    def fail(self, error: MillraceError) -> list[Action]:
        """End the request with an error; the first one stands."""
        if self.error is None:
            self.error = error
        return self._cancel_running()

    def drop_unread(self) -> None:
        """Hand nothing more on: another may have ended the request already."""
        for choice in self.choices:
            choice.drop_unread()

    def end(self) -> list[Action]:
        """The front is finished with the request: whatever still runs is cancelled."""
        self.ended = True
        return self._cancel_running()

    def release(self) -> list[Action]:
        """Workers of attempts given up may forget them: another has it, or its end is recorded."""
        left, self._left = self._left, []
        return [SendCancel(binding.instance, binding.epoch) for binding in left]

    # --- what workers say ----------------------------------------------------------------------------------------
    def on_event(self, instance: str, event: worker_service_pb2.Event, now: float) -> list[Action]:
        """One event of a frame."""
        offered = Binding(event.epoch, instance)
        if self.ended or self.error is not None:
            if self.binding is None and event.epoch >= self._floor:
                self.binding = offered
            return [SendCancel(instance, event.epoch, keep=offered == self.binding or offered in self._left)]
        actions = self._bind(offered, now)
        if self.binding != offered:
            return actions
        self.heard_at = now
        kind = event.WhichOneof("event")
        if kind == "started":
            if not self.started:
                self.started = True
                self.cached_token_count = max(0, event.started.cached_token_count)
        elif kind == "delta":
            actions += self._on_delta(event.delta)
        elif kind == "failed":
            actions += self._on_failed(event.failed, now)
        elif kind == "prompt_logprobs" and self._prompt_logprobs is None:
            self._prompt_logprobs = tuple(event.prompt_logprobs.positions)
        elif kind == "embedding":
            self.embedding = event.embedding.vector
        return actions

    def on_worker_lost(self, instance: str, now: float) -> list[Action]:
        """The stream to this worker is given up."""
        if self.binding is None or self.binding.instance != instance or self.ended or self.error is not None:
            return []
        self._lose(instance)
        return self._run_elsewhere(WorkerLost("The worker that ran the request was lost."), now)

    def on_acked(self, epoch: int, delivered_counts: Sequence[int]) -> None:
        """The bound worker was told what was delivered."""
        if self.binding is not None and self.binding.epoch == epoch:
            for choice, count in zip(self.choices, delivered_counts, strict=True):
                choice.confirmed = max(choice.confirmed, count)

    def ack(self, request_id: str) -> worker_service_pb2.AckEntry | None:
        """What is held and what of it was delivered, to be told to the bound worker; None while unbound."""
        if self.binding is None:
            return None
        entry = worker_service_pb2.AckEntry(request_id=request_id, epoch=self.binding.epoch)
        for choice in self.choices:
            choice.told = choice.delivered
            entry.next_indices.append(choice.received)
            entry.delivered_counts.append(choice.delivered)
        return entry

    @property
    def worker_ended(self) -> bool:
        """The bound worker runs no choice any more."""
        return all(choice.worker_ended for choice in self.choices)

    # --- what the store says -------------------------------------------------------------------------------------
    def on_record(self, record: RequestRecord | None, now: float, *, worker_alive: bool) -> list[Action]:
        """The store's view of a request that is unbound or silent. `worker_alive`: its owner is attached here."""
        if self.ended or self.error is not None:
            return []
        if record is None:
            lost = StoreUnavailable.row.reason
            return [] if self.binding is not None else [self.readmission(lost, again=True)]
        if record.phase is RequestPhase.FINISHED:
            return self.fail(error_of_record(record))
        if record.phase is RequestPhase.CLOSED and self.binding is None and record.attempt >= self.attempt:
            return self._choose_again(now)
        unheard = record.phase is RequestPhase.OWNED and self.binding is None and record.attempt >= self.attempt
        if unheard and (not worker_alive or now - self._owned_since(record.epoch, now) > _ACCEPTED_WITHIN_S):
            self._floor = max(self._floor, record.epoch + 1)
            if not worker_alive:
                self._lose(record.worker_instance)
            return self._run_elsewhere(WorkerLost("The worker that took the request was lost."), now)
        return []

    def _owned_since(self, epoch: int, now: float) -> float:
        """When the store first said that a worker has this attempt; how long it was queued before does not count."""
        if self._owned is None or self._owned[0] != epoch:
            self._owned = (epoch, now)
        return self._owned[1]

    def run_as(self, max_token_count: int) -> None:
        """The version that was chosen again gives room for so many tokens a choice."""
        self.limits = dataclasses.replace(self.limits, max_token_count=max_token_count)

    def on_superseded(self) -> list[Action]:
        """The store refused a re-admission: the request has ended there."""
        return self.fail(WorkerLost("The request was ended elsewhere."))

    def on_poisoned(self) -> list[Action]:
        """The store refused a re-admission: the request is what its workers died of."""
        return self.fail(Poisoned("Workers died of this request; it is not tried again."))

    def expire(self) -> list[Action]:
        """The deadline passed."""
        return self.fail(DeadlineExceeded("The deadline passed before the answer was complete."))

    # --- budget --------------------------------------------------------------------------------------------------
    def budget_wanted(self) -> int:
        """Completion tokens to lease now; 0 while there is enough or the budget is exhausted."""
        if self.budget is None or self.budget_exhausted or self.produced or self.ended:
            return 0
        rest = self.limits.max_token_count * self.limits.choice_count - self.budget
        low = self.budget - self.received_count < _BUDGET_LOW_TOKENS
        return min(BUDGET_LEASE_TOKENS, rest) if low else 0

    def on_budget(self, granted: int) -> None:
        """A renewal came back; 0 means that the budget is used up."""
        if self.budget is not None:
            self.budget += granted
            self.budget_exhausted = granted == 0

    # --- inside --------------------------------------------------------------------------------------------------
    def _bind(self, offered: Binding, now: float) -> list[Action]:
        bound, instance, epoch = self.binding, offered.instance, offered.epoch
        if offered == bound:
            return []
        if epoch < self._floor or (bound is not None and epoch <= bound.epoch):
            return [SendCancel(instance, epoch, keep=offered in self._left)]
        if bound is not None:
            if any(choice.handed_since_base for choice in self.choices):  # Now only the gateway raises the epoch.
                gone: list[Action] = []
                if instance == bound.instance:  # It has one epoch of a request at a time: the bound one is gone.
                    self._floor = epoch + 1
                    gone = self._run_elsewhere(WorkerLost("The worker was given the request anew."), now)
                return [SendCancel(instance, epoch), *gone]
            for choice in self.choices:
                choice.restart()
        self.binding = offered
        self._gap_at = None
        actions: list[Action] = [Own(offered), *self.release()]
        if bound is not None:
            actions.append(SendCancel(bound.instance, bound.epoch))
        actions += [SendCancel(instance, epoch, c.index) for c in self.choices if c.stopped and c.finish is None]
        return actions

    def _on_delta(self, delta: worker_service_pb2.Delta) -> list[Action]:
        bound = self.binding
        if bound is None:
            return []
        if not 0 <= delta.choice < len(self.choices):
            return self.fail(EngineError("The worker answered for a choice that was not asked for."))
        choice = self.choices[delta.choice]
        if choice.stopped or choice.finish is not None:
            choice.worker_ended = choice.worker_ended or delta.HasField("finish")
            return []
        if delta.first_index > choice.received:
            return self._on_gap(choice)
        logprob_count = len(delta.logprobs)
        broken = delta.first_index < 0 or logprob_count not in (0, len(delta.token_ids))
        if broken or delta.first_index + len(delta.token_ids) > self.limits.max_token_count:
            return self.fail(EngineError("The worker sent tokens that were not asked for."))
        choice.add(delta)
        if delta.HasField("finish") and delta.first_index + len(delta.token_ids) == choice.received:
            error = error_of_finish(delta.finish.reason)
            if error is not None:
                return self.fail(error)
            choice.finish, choice.worker_ended = delta.finish.reason, True
            choice.stop_token_id = delta.finish.stop_token_id if delta.finish.HasField("stop_token_id") else None
        unread = sum(c.unread_logprob_bytes + (c.received - c.handed) * _BYTES_PER_TOKEN for c in self.choices)
        if unread > self.limits.unread_bytes:
            return self.fail(SlowReader("The client reads too slowly."))
        return []

    def _on_gap(self, choice: ChoiceTokens) -> list[Action]:
        bound, place = self.binding, (choice.index, choice.received)
        if bound is None:
            return []
        if self._gap_at == place:
            # The worker no longer has what is missing.
            return self._run_elsewhere(WorkerLost("The worker lost tokens of the answer."), self.heard_at)
        self._gap_at = place
        return [Reattach(bound.instance)]

    def _on_failed(self, failed: worker_service_pb2.Failed, now: float) -> list[Action]:
        error = error_of(failed.reason, failed.detail or "The worker failed.")
        if not failed.retryable:
            return self.fail(error)
        holder = ""
        if self.binding is not None and failed.reason == Draining.row.reason:
            # A worker that leaves in order says nothing about the request, and hands it over.
            self._failures -= 1
            holder = self.binding.instance if self.started else ""
        if self.binding is not None and failed.reason == EngineError.row.reason:
            self._lose(self.binding.instance)
        return self._run_elsewhere(error, now, holder=holder)

    def _lose(self, instance: str) -> None:
        """A worker died with the request in hand: no failure of an attempt, but the store may find it poison."""
        if instance not in self._lost:
            self._lost += (instance,)
            self._failures -= 1

    def _run_elsewhere(self, error: MillraceError, now: float, *, holder: str = "") -> list[Action]:
        bound, self.binding = self.binding, None
        self._holder = holder
        cancel: list[Action] = []
        if bound is not None:
            self._floor = max(self._floor, bound.epoch + 1)
            self._left.append(bound)
            cancel = [SendCancel(bound.instance, bound.epoch, keep=True)]
        for choice in self.choices:
            if choice.finish is None and choice.received >= self.limits.max_token_count:
                choice.finish = common_pb2.FINISH_REASON_LENGTH
        if self.produced:
            return cancel
        if now >= self.limits.deadline:
            return cancel + self.expire()
        self._failures += 1
        if self._failures >= MAX_ATTEMPTS or (self.delivered_any and not self.limits.resumes):
            return cancel + self.fail(error)
        self.attempt += 1
        self.queued_at = self.heard_at = now
        handed = any(choice.handed or choice.closed for choice in self.choices)
        for choice in self.choices:
            choice.rebase(keep=handed)
        return [*cancel, self.readmission(error.row.reason)]

    def _choose_again(self, now: float) -> list[Action]:
        """Its version is withdrawn. Tokens of it are not continued by another."""
        if self.received_count or any(choice.base for choice in self.choices):
            return self.fail(PoolClosed("The version that began this answer was withdrawn."))
        self.attempt += 1
        self.queued_at = self.heard_at = now
        # A worker that took an earlier attempt unseen has tokens of another tokenizer.
        self._floor = max(self._floor, first_epoch(self.attempt))
        return [Rechoose(self.attempt)]

    def readmission(self, cause: str, *, again: bool = False) -> Readmit:
        """What queues this attempt, from what was received on."""
        return Readmit(self.attempt, self._prefix(), again, self._lost, cause, self._holder)

    def _prefix(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        open_choices = [c for c in self.choices if c.finish is None and not c.stopped]
        if len(open_choices) == len(self.choices) and not any(c.base for c in self.choices):
            return ()
        return tuple((c.index, tuple(c.token_ids[: c.base])) for c in open_choices)

    def _cancel_running(self) -> list[Action]:
        if self.binding is None or self.worker_ended:
            return []
        return [SendCancel(self.binding.instance, self.binding.epoch, keep=True)]

    def _room(self, choice: ChoiceTokens) -> int:
        room = choice.received - choice.handed
        if self.binding is not None:
            # Should this gateway die, its worker knows what was delivered but for so many.
            room = min(room, UNCONFIRMED_TOKENS - (choice.delivered - choice.confirmed))
        if self.budget is None:
            return room
        left = self.budget - sum(c.handed for c in self.choices)
        if left <= 0 and self.budget_exhausted and not (choice.finish is not None and choice.handed == choice.received):
            choice.cut(common_pb2.FINISH_REASON_BUDGET)
        return min(room, left)

    def _fresh_prompt_logprobs(self, choice: ChoiceTokens) -> tuple[common_pb2.PositionLogprobs, ...]:
        if choice.index != 0 or self._prompt_logprobs is None or self._prompt_logprobs_handed:
            return ()
        self._prompt_logprobs_handed = True
        return self._prompt_logprobs
