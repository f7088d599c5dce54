"""Hands one claimed request to one worker: Submit under a fresh epoch, ownership on acceptance, spans, queue time.

Never chooses the worker and never retries by itself; says what came of the try. Called by the claim loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Final

import grpc
import structlog
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2
from millrace.worker.v1 import worker_service_pb2
from opentelemetry import trace

from services.common.admission_store import BATCH, AdmissionStore, priority_name
from services.common.admission_types import Claimed, Ownership, Pool, Terminal
from services.common.clock import Clock
from services.common.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, StoreUnavailable
from services.common.metrics import Metrics
from services.common.telemetry import context_from, traceparent_of, tracer
from services.router.disaggregation import Placing
from services.router.endpoint import Endpoint, Needs
from services.router.registry import EndpointRegistry
from services.router.submit_link import Answer

_MAX_TRY = 255
REST_S = 0.1
MAX_REST_S = 1.0


class Outcome(enum.Enum):
    """What came of a try: done with the claim, another worker may be tried, no other worker need be tried, or the
    claim goes back to the queue (which ends it when its time is over)."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNFIT = "unfit"
    SUPERSEDED = "superseded"
    GIVE_BACK = "give_back"


_OUTCOMES: Final = {
    worker_service_pb2.SUBMIT_REFUSAL_STALE_EPOCH: Outcome.SUPERSEDED,
    worker_service_pb2.SUBMIT_REFUSAL_EXPIRED: Outcome.GIVE_BACK,
    worker_service_pb2.SUBMIT_REFUSAL_NEVER_FITS: Outcome.UNFIT,
    worker_service_pb2.SUBMIT_REFUSAL_INVALID: Outcome.UNFIT,
    worker_service_pb2.SUBMIT_REFUSAL_UNKNOWN_ADAPTER: Outcome.UNFIT,
}
# The worker's view says more than it has: trust none of it until the next one.
_FULL: Final = {worker_service_pb2.SUBMIT_REFUSAL_NO_ROOM, worker_service_pb2.SUBMIT_REFUSAL_DRAINING}
_REASONS: Final = {
    worker_service_pb2.SUBMIT_REFUSAL_NEVER_FITS: ContextLengthExceeded.row.reason,
    worker_service_pb2.SUBMIT_REFUSAL_UNKNOWN_ADAPTER: ModelNotFound.row.reason,
}


# The worker's own fault: no connection, no answer in time, a crash inside. All else says nothing about the worker.
_GUILTY: Final = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DATA_LOSS,
}
_UNFIT_CODES: Final = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE}


@dataclasses.dataclass(slots=True, eq=False)
class HeldClaim:
    """A claim in this router's hands. `excluded` workers refused it for good, `resting` ones until that time; `unfit`:
    the last refusal left none to try. `placing` says who computes the prompt of the try under way, `reserved` whose
    next room it waits for."""

    pool: Pool
    claim: Claimed
    needs: Needs
    since: float
    tries: int = 0
    excluded: set[str] = dataclasses.field(default_factory=set)
    resting: dict[str, float] = dataclasses.field(default_factory=dict)
    unfit_reason: str = ""
    unfit: bool = False
    placing: Placing | None = None
    reserved: Endpoint | None = None

    @property
    def request_id(self) -> str:
        return self.claim.entry.request_id

    def rest(self, instance: str, now: float) -> None:
        """Leave this worker alone for a while, longer after each try."""
        self.resting[instance] = now + min(MAX_REST_S, REST_S * self.tries)

    def waits_for_room(self) -> bool:
        """The next room of some worker is kept for it."""
        return self.reserved is not None and self.reserved.reserved_for == self.request_id

    def unreserve(self) -> None:
        """Nobody keeps room for it any more."""
        if self.reserved is not None and self.waits_for_room():
            self.reserved.reserve(None)
        self.reserved = None

    def avoided(self, now: float) -> set[str]:
        """Workers not to be tried now."""
        if not self.resting:
            return self.excluded
        return self.excluded | {instance for instance, until in self.resting.items() if now < until}


@dataclasses.dataclass(frozen=True, slots=True)
class _Try:
    """A submit under way; accepted, it makes `ownership` true."""

    held: HeldClaim
    endpoint: Endpoint
    ownership: Ownership
    span: trace.Span | None
    done: Callable[[HeldClaim, Outcome], None]


class Dispatcher:
    """Submits, and records ownership; ownership that Redis did not take is written when Redis is back."""

    def __init__(
        self,
        store: AdmissionStore,
        registry: EndpointRegistry,
        metrics: Metrics,
        clock: Clock,
        *,
        router_instance: str,
    ) -> None:
        self._store = store
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        self._router_instance = router_instance
        self._unrecorded: dict[Pool, list[Ownership]] = {}
        self._accepted = asyncio.Event()
        self._recording = asyncio.Lock()
        self._observers: dict[tuple[str | int, ...], Callable[[float], None]] = {}

    def send(self, held: HeldClaim, endpoint: Endpoint, done: Callable[[HeldClaim, Outcome], None]) -> None:
        """One try, whose outcome `done` is told once. The endpoint has been debited by the caller; this settles the
        debit."""
        submits = self._registry.submits(endpoint.instance)
        now = self._clock.monotonic()
        remaining_ms = held.claim.remaining_ms - int((now - held.since) * 1000)
        if submits is None or remaining_ms <= 0 or held.tries >= _MAX_TRY:
            endpoint.refused(held.request_id, now, full=False)
            done(held, Outcome.REFUSED if submits is None else Outcome.GIVE_BACK)
            return
        held.tries += 1
        head = worker_service_pb2.SubmitRequest(
            attempt=max(1, held.claim.entry.attempt),
            epoch=held.claim.claim_number << 8 | held.tries,
            router_instance=self._router_instance,
        )
        head.remaining.FromMilliseconds(remaining_ms)
        claimed_at = self._clock.wall() - (now - held.since)
        head.claim_time.FromMilliseconds(int(claimed_at * 1000))
        if held.placing is not None and (peer := held.placing.peer) is not None:
            head.prefill_peer.worker_instance = peer.instance
            head.prefill_peer.address = peer.record.address
        span = _span_of(held, head, endpoint)
        ownership = Ownership(held.request_id, head.epoch, endpoint.instance)
        this = _Try(held, endpoint, ownership, span, done)
        submits.send(held.request_id, head, held.claim.entry_bytes, functools.partial(self._answered, this))

    def _answered(self, this: _Try, answer: Answer) -> None:
        if isinstance(answer, grpc.StatusCode):
            outcome, said = self._failed(this.held, this.endpoint, answer), answer.name
        else:
            outcome = self._read(this.held, this.endpoint, answer)
            said = outcome.value
        if this.span is not None:
            this.span.set_attribute("millrace.outcome", said)
            this.span.end()
        if outcome is Outcome.ACCEPTED:
            self._observe(this.held)
            self._count_placing(this.held)
            self._unrecorded.setdefault(this.held.pool, []).append(this.ownership)
            self._accepted.set()
        this.done(this.held, outcome)

    async def run(self) -> None:
        """Write ownership as workers accept, those that come meanwhile in one go, until cancelled."""
        while True:
            await self._accepted.wait()
            self._accepted.clear()
            with contextlib.suppress(StoreUnavailable):
                await self.record_owners()

    async def fail(self, held: HeldClaim) -> bool:
        """End a request that no worker can ever take; nothing is billed. False when that is not this router's to say:
        a later attempt may have delivered tokens, so its gateway ends it."""
        if max(1, held.claim.entry.attempt) > 1:
            return False
        [record] = await self._store.read_requests(held.pool, [held.request_id])
        if record is None or not record.prebuilt_event:
            return True
        event = usage_event_pb2.UsageEvent.FromString(record.prebuilt_event)
        event.terminal_state = common_pb2.TERMINAL_STATE_FAILED
        event.error_reason = held.unfit_reason
        event.times.end_time.FromMilliseconds(int(self._clock.wall() * 1000))
        await self._store.finish(
            held.pool, [Terminal(record.tenant, held.request_id, 0, event.terminal_state, 0, event)]
        )
        structlog.get_logger().warning("request_unfit", request_id=held.request_id, reason=held.unfit_reason)
        return True

    async def record_owners(self) -> None:
        """Write ownership that Redis has not taken so far. Raises StoreUnavailable."""
        async with self._recording:
            for pool, ownerships in list(self._unrecorded.items()):
                while batch := ownerships[:BATCH]:
                    await self._store.own(pool, batch)
                    del ownerships[: len(batch)]

    def _read(self, held: HeldClaim, endpoint: Endpoint, reply: worker_service_pb2.SubmitResponse) -> Outcome:
        now = self._clock.monotonic()
        if reply.accepted:
            endpoint.accepted(held.request_id, now, reply.watch_sequence if reply.HasField("watch_sequence") else None)
            return Outcome.ACCEPTED
        if reply.refusal == worker_service_pb2.SUBMIT_REFUSAL_INTERNAL:
            return self._failed(held, endpoint, grpc.StatusCode.INTERNAL)
        endpoint.refused(held.request_id, now, full=reply.refusal in _FULL)
        outcome = _OUTCOMES.get(reply.refusal, Outcome.REFUSED)
        if outcome is Outcome.UNFIT:
            held.unfit_reason = _REASONS.get(reply.refusal, InvalidRequest.row.reason)
            held.excluded.add(endpoint.instance)
        elif reply.refusal == worker_service_pb2.SUBMIT_REFUSAL_WRONG_VERSION:
            held.excluded.add(endpoint.instance)
        else:
            held.rest(endpoint.instance, now)
        self._log(held, endpoint, "submit_refused", _name_of(reply.refusal))
        return outcome

    def _failed(self, held: HeldClaim, endpoint: Endpoint, code: grpc.StatusCode) -> Outcome:
        now = self._clock.monotonic()
        endpoint.failed(held.request_id, now, guilty=code in _GUILTY)
        self._log(held, endpoint, "submit_failed", code.name)
        if code in _UNFIT_CODES:
            held.unfit_reason = InvalidRequest.row.reason
            held.excluded.add(endpoint.instance)
            return Outcome.UNFIT
        held.rest(endpoint.instance, now)
        return Outcome.REFUSED

    def _observe(self, held: HeldClaim) -> None:
        entry = held.claim.entry
        waited_s = held.claim.waited_ms / 1000 + self._clock.monotonic() - held.since
        tenant = self._metrics.tenant_label(entry.tenant)
        key = (entry.model.model, entry.model.version, entry.priority_class, entry.length_class, tenant)
        observe = self._observers.get(key)
        if observe is None:
            length = common_pb2.LengthClass.Name(entry.length_class).removeprefix("LENGTH_CLASS_").lower()
            labels = (entry.model.model, entry.model.version, priority_name(entry.priority_class), length, tenant)
            observe = self._observers[key] = self._metrics.queue_seconds.labels(*labels).observe
        observe(waited_s)

    def _count_placing(self, held: HeldClaim) -> None:
        model = held.claim.entry.model
        if held.placing is not None:
            self._metrics.prefill_placings_total.labels(model.model, model.version, held.placing.reason.value).inc()

    def _log(self, held: HeldClaim, endpoint: Endpoint, event: str, cause: str) -> None:
        structlog.get_logger().info(
            event, request_id=held.request_id, worker=endpoint.instance, tries=held.tries, cause=cause
        )


def _name_of(refusal: worker_service_pb2.SubmitRefusal.ValueType) -> str:
    """A worker of a later release may refuse for a reason that is not known here."""
    known = refusal in worker_service_pb2.SubmitRefusal.values()
    return worker_service_pb2.SubmitRefusal.Name(refusal) if known else str(refusal)


def _span_of(held: HeldClaim, head: worker_service_pb2.SubmitRequest, endpoint: Endpoint) -> trace.Span | None:
    """The span of a try, which the worker's follow; None for a request that is not traced."""
    traceparent = held.claim.entry.traceparent
    if not traceparent:
        return None
    span = tracer().start_span("router.submit", context=context_from(traceparent))
    span.set_attribute("millrace.request_id", held.request_id)
    span.set_attribute("millrace.attempt", head.attempt)
    span.set_attribute("millrace.worker", endpoint.instance)
    span.set_attribute("millrace.prefill_worker", head.prefill_peer.worker_instance)
    head.traceparent = traceparent_of(span)
    return span
