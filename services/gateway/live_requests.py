"""The requests this gateway runs: frames in from the attachments, events out to the front, one terminal each.

`LiveTable` is the attachments' listener; `LiveRequest` is the seam's Generation. Decisions are the core's
(requests.py), Redis work is the `Effects`' (store_effects.py). A request leaves the table when the front finishes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from millrace.common.v1 import admission_pb2, common_pb2
from millrace.usage.v1 import usage_event_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.clock import Clock
from services.common.errors import Draining, GatewayLost, Internal, MillraceError
from services.gateway.generation import ServedModel, TokenEvent, ValidRequest
from services.gateway.metering import Counts, Ending, Marks, usage_event
from services.gateway.outbox import OutboxRecord
from services.gateway.request_actions import Action, Own, Readmit, Reattach, Rechoose, SendCancel
from services.gateway.request_facts import RequestFacts
from services.gateway.request_metrics import RequestMeter
from services.gateway.requests import RequestCore


class Effects(Protocol):
    """What the core's actions and the end of a request need from the rest of the gateway. None of them blocks."""

    def cancel(self, instance: str, cancel: worker_service_pb2.Cancel) -> None: ...

    def acknowledge(self, instance: str, request_id: str) -> None: ...

    def confirm(self, instance: str, entry: worker_service_pb2.AckEntry) -> None: ...

    def reattach(self, instance: str) -> None: ...

    def own(self, request: LiveRequest, action: Own) -> None: ...

    def readmit(self, request: LiveRequest, action: Readmit) -> None: ...

    def rechoose(self, request: LiveRequest, action: Rechoose) -> None: ...

    def served_by(self, instance: str) -> ServedModel | None:
        """The version that a worker serves, or None where that is not known yet."""
        ...

    def renew_budget(self, request: LiveRequest, tokens: int) -> None: ...

    async def publish(self, request: LiveRequest, record: OutboxRecord) -> None:
        """Return once the record is in the outbox; Redis is told in the background."""
        ...


class LiveRequest:
    """One running request; implements the seam's Generation."""

    def __init__(self, facts: RequestFacts, core: RequestCore, table: LiveTable, meter: RequestMeter) -> None:
        self.facts = facts
        self.core = core
        self.meter = meter
        self.marks = Marks(admit=table.clock.wall())
        self.position = 0
        self.admitted = False
        self.renewing = False
        # Of a mirrored request: how its answer compares.
        self.shadow: usage_event_pb2.ShadowReport | None = None
        self._news = asyncio.Event()
        self._on_more: Callable[[], bool] | None = None
        self._table = table
        self._worker = ""
        self._epoch = 0
        self._reasoned: dict[int, int] = {}
        self._deadline: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[common_pb2.TokenUsage] | None = None

    @property
    def request_id(self) -> str:
        return self.facts.request_id

    @property
    def request(self) -> ValidRequest:
        """The request as it runs."""
        return self.facts.request

    @property
    def queue_position(self) -> int:
        """Position at admission, 0 = next."""
        return self.position

    @property
    def cached_token_count(self) -> int:
        """Prompt tokens from the prefix cache."""
        return min(self.core.cached_token_count, len(self.facts.entry.token_ids))

    @property
    def embedding(self) -> bytes:
        """The vector of a request for one, once its events have ended."""
        return self.core.embedding

    @property
    def done(self) -> bool:
        """Every choice was told its end."""
        return self.core.done

    def pull(self) -> TokenEvent | None:
        """The next event that is there. Raises what the request failed of, once what came is out."""
        self._table.check_stall()
        event = self.core.pull()
        if event is not None:
            self._table.ask_budget(self)
        elif self.core.error is not None and not self.core.done:
            raise self.core.error
        return event

    async def more(self, on_more: Callable[[], bool] | None = None) -> None:
        """Return once there may be more to pull and `on_more` does not see to it."""
        self._news.clear()
        self._on_more = on_more
        try:
            await self._news.wait()
        finally:
            self._on_more = None

    def tell(self) -> None:
        """There may be more to pull."""
        # What its front does of this may end here again: it looks until it finds nothing.
        on_more, self._on_more = self._on_more, None
        if on_more is not None and on_more():
            self._on_more = on_more
        else:
            self._news.set()

    def stop_choice(self, choice: int, token_count: int) -> None:
        """The front ended a choice after `token_count` tokens."""
        self._table.perform(self, self.core.stop_choice(choice, token_count))

    def mark_delivered(self, choice: int, token_count: int, reasoning_count: int = 0) -> None:
        """The first `token_count` tokens of a choice, so many of them reasoning, went to the client's transport."""
        if self.core.mark_delivered(choice, token_count) and self.core.binding is not None:
            self._table.effects.acknowledge(self.core.binding.instance, self.request_id)
        self._reasoned[choice] = reasoning_count
        self.meter.delivered(self._table.clock.monotonic(), self.core.choices)

    async def finish(
        self,
        state: common_pb2.TerminalState.ValueType,
        finish_reason: common_pb2.FinishReason.ValueType,
        error_reason: str = "",
    ) -> common_pb2.TokenUsage:
        """End the request: cancel what runs, outbox, then finish and settle behind it. Idempotent."""
        if self._ending is None:
            work = self._finish(
                Ending(state, finish_reason, error_reason, self.core.attempt, self._epoch, self._worker)
            )
            self._ending = asyncio.ensure_future(work)
        # A client that cuts here must not cut the books.
        return await asyncio.shield(self._ending)

    def watch_deadline(self) -> None:
        """Fail the request when its time is over; ends with the request."""
        if self._ending is None:
            self._deadline = asyncio.create_task(self._expire(), name=f"deadline-{self.request_id}")

    def note(self, event: worker_service_pb2.Event, instance: str) -> None:
        """Remember times and the binding for the usage event."""
        if self._ending is not None:
            return
        bound = self.core.binding
        if bound is not None and bound.epoch != self._epoch:
            self._epoch, self._worker = bound.epoch, instance
            self._run_as(self._table.effects.served_by(instance))
            if self.marks.submit is None:
                self.marks.submit = self._table.clock.wall()
                if event.accepted.HasField("claim_time"):
                    self.marks.claim = event.accepted.claim_time.ToNanoseconds() / 1e9
                self.meter.accepted(self._table.clock.monotonic())
        if self.core.started and self.marks.start is None:
            self.marks.start = self._table.clock.wall()
            self.meter.started(self._table.clock.monotonic())
        if self.marks.first_token is None and event.WhichOneof("event") == "delta" and self.core.received_count:
            self.marks.first_token = self._table.clock.wall()

    def chosen_again(self, entry: admission_pb2.AdmissionEntry, request: ValidRequest) -> None:
        """Another version will run it, with tokens of its own."""
        self.facts = dataclasses.replace(self.facts, entry=entry, request=request, pool=request.model.pool)
        self.core.run_as(request.sampling.max_token_count)
        self.meter.version(entry.model)

    def _run_as(self, served: ServedModel | None) -> None:
        """A router may have sent the same tokens to another version: what is told and billed is what runs."""
        facts = self.facts
        if served is None or served.card.model == facts.entry.model or self.core.received_count:
            return
        facts.entry.model.CopyFrom(served.card.model)
        del facts.entry.block_hashes[:]
        model = dataclasses.replace(served, pool=facts.pool)
        self.facts = dataclasses.replace(facts, request=dataclasses.replace(facts.request, model=model))
        self.meter.version(served.card.model)

    async def _expire(self) -> None:
        await self._table.clock.sleep(max(0.0, self.core.limits.deadline - self._table.clock.monotonic()))
        self._table.perform(self, self.core.expire())

    async def _finish(self, ending: Ending) -> common_pb2.TokenUsage:
        self.marks.end = self._table.clock.wall()
        if self._deadline is not None:
            self._deadline.cancel()
        self._table.stop(self)
        counts = Counts(
            prompt=len(self.facts.entry.token_ids),
            cached=self.core.cached_token_count,
            delivered=tuple(choice.delivered for choice in self.core.choices),
            received=tuple(choice.received for choice in self.core.choices),
            started=self.core.started or self.core.received_count > 0,
            reasoning=sum(self._reasoned.values()),
        )
        event = usage_event(self.facts.entry, ending, counts, self.marks, self.facts.labels)
        if self.shadow is not None:
            event.shadow.CopyFrom(self.shadow)
        self.meter.ended(self._table.clock.monotonic(), event)
        self._end_span(event)
        await self._table.effects.publish(self, OutboxRecord(counts.computed, event))
        self._table.remove(self)
        return event.billed

    def _end_span(self, event: usage_event_pb2.UsageEvent) -> None:
        span = self.facts.span
        span.set_attribute("gen_ai.usage.output_tokens", event.delivered.completion_token_count)
        span.set_attribute("millrace.attempt", event.attempt)
        span.set_attribute("millrace.model_version", event.model.version)
        span.set_attribute("millrace.manifest_digest", event.model.manifest_digest.hex())
        span.set_attribute("millrace.terminal_state", common_pb2.TerminalState.Name(event.terminal_state))
        if event.error_reason:
            span.set_attribute("error.type", event.error_reason)
        span.end()


class LiveTable:
    """Live requests by id. `stall_limit_s`: a loop that slept longer has lost its lease and ends its streams."""

    def __init__(self, clock: Clock, *, stall_limit_s: float = 5.0) -> None:
        self.clock = clock
        self.effects: Effects
        self._requests: dict[str, LiveRequest] = {}
        self._stall_limit_s = stall_limit_s
        self._ticked_at = clock.monotonic()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> list[LiveRequest]:
        """All of them, now."""
        return list(self._requests.values())

    def get(self, request_id: str) -> LiveRequest | None:
        """The live request with this id."""
        return self._requests.get(request_id)

    def add(self, request: LiveRequest) -> None:
        """Know a request from before its admission on, so that no frame of it is unknown."""
        self._requests[request.request_id] = request
        self._empty.clear()

    def stop(self, request: LiveRequest) -> None:
        """Nothing more is wanted of it; it stays known until its end is recorded, and its worker keeps it so long:
        to settle for this gateway, should that die."""
        self.perform(request, request.core.end())

    def remove(self, request: LiveRequest) -> None:
        """Forget a request whose end is recorded: now its workers may."""
        self.perform(request, request.core.release())
        bound, entry = request.core.binding, request.core.ack(request.request_id)
        if bound is not None and entry is not None:
            entry.done = True
            self.effects.confirm(bound.instance, entry)
        self.forget(request)

    def forget(self, request: LiveRequest) -> None:
        """Drop a request: of one that was refused no worker can have it."""
        self._requests.pop(request.request_id, None)
        if not self._requests:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Return once nothing is live."""
        await self._empty.wait()

    def perform(self, request: LiveRequest, actions: Sequence[Action]) -> None:
        """Do what the core decided."""
        for action in actions:
            match action:
                case SendCancel(instance):
                    self.effects.cancel(instance, action.message(request.request_id))
                case Own(bound):
                    self.effects.own(request, action)
                    if request.core.delivered_any:
                        self.effects.acknowledge(bound.instance, request.request_id)
                case Readmit(prefix=prefix, cause=cause):
                    request.meter.readmitted(cause, "resumed" if prefix else "restarted")
                    self.effects.readmit(request, action)
                case Rechoose():
                    self.effects.rechoose(request, action)
                case Reattach(instance):
                    self.effects.reattach(instance)
        request.tell()

    def fail(self, request: LiveRequest, error: MillraceError) -> None:
        """End a request with an error; its front learns it at once."""
        self.perform(request, request.core.fail(error))

    def fail_all(self, error: MillraceError | None = None) -> None:
        """End everything with an error (drain, stall)."""
        for request in list(self._requests.values()):
            self.fail(request, error or Draining("The gateway is shutting down."))

    def ask_budget(self, request: LiveRequest) -> None:
        """Lease more of the budget before it runs out."""
        wanted = request.core.budget_wanted()
        if wanted and not request.renewing:
            request.renewing = True
            self.effects.renew_budget(request, wanted)

    # --- time ----------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        """Called each half second."""
        self.check_stall()
        self._ticked_at = self.clock.monotonic()

    def check_stall(self) -> None:
        """After a stall, others may have ended our requests: end the streams before a byte is written."""
        now = self.clock.monotonic()
        if now - self._ticked_at > self._stall_limit_s:
            self._ticked_at = now
            for request in list(self._requests.values()):
                request.core.drop_unread()
            self.fail_all(GatewayLost("The gateway was stopped for too long."))

    # --- AttachListener ------------------------------------------------------------------------------------------
    def continued(self, instance: str) -> list[worker_service_pb2.Continue]:
        """What is held of the requests bound to this worker."""
        return [
            worker_service_pb2.Continue(
                request_id=request_id,
                epoch=request.core.binding.epoch,
                next_indices=[choice.received for choice in request.core.choices],
            )
            for request_id, request in self._requests.items()
            if request.core.binding is not None and request.core.binding.instance == instance
        ]

    def on_frame(self, instance: str, events: Iterable[worker_service_pb2.Event]) -> None:
        """Events of one frame. Unknown requests are answered by Cancel."""
        self.check_stall()
        now = self.clock.monotonic()
        for event in events:
            request = self._requests.get(event.request_id)
            if request is None:
                self.effects.cancel(instance, SendCancel(instance, event.epoch).message(event.request_id))
                continue
            try:
                actions = request.core.on_event(instance, event, now)
            except Exception:
                # One bad answer ends one request; the others of the frame go on.
                actions = request.core.fail(Internal("Internal error."))
            request.note(event, instance)
            self.perform(request, actions)
            self.ask_budget(request)

    def ack_entries(self, instance: str, request_ids: Iterable[str]) -> list[worker_service_pb2.AckEntry]:
        """What to confirm of requests that are still bound to this worker."""
        entries = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            bound = None if request is None else request.core.binding
            if request is not None and bound is not None and bound.instance == instance:
                entry = request.core.ack(request_id)
                entries += [entry] if entry is not None else []
        return entries

    def on_acked(self, entries: Iterable[worker_service_pb2.AckEntry]) -> None:
        """Confirmations were written: tokens up to 16 further may go out."""
        for entry in entries:
            request = self._requests.get(entry.request_id)
            if request is not None:
                request.core.on_acked(entry.epoch, entry.delivered_counts)
                request.tell()

    def on_worker_lost(self, instance: str) -> None:
        """The worker is given up: its requests run elsewhere or fail."""
        now = self.clock.monotonic()
        for request in list(self._requests.values()):
            self.perform(request, request.core.on_worker_lost(instance, now))
