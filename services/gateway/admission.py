"""Admits requests: reserve at the tenant, enqueue at the pool, all or nothing; and cancels them by id.

Owns the order of admission and its undoing. Never decides limits (scripts do) and never touches tokens after the
entry is written. Implements the seam's Generator; called by the front.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from millrace.common.v1 import admission_pb2, common_pb2
from opentelemetry import trace

from services.common.admission_store import AdmissionStore
from services.common.admission_types import KeyRecord, PoolCaps, Refusal
from services.common.clock import Clock
from services.common.errors import Cancelled, MillraceError, NotFound, NoWorker, StoreUnavailable
from services.common.metrics import Metrics
from services.common.telemetry import traceparent_of, tracer
from services.gateway.entries import AdmissionSettings, EntryMaker
from services.gateway.generation import RequestLimits, ValidRequest
from services.gateway.live_requests import LiveRequest, LiveTable
from services.gateway.metering import ClientLabels
from services.gateway.request_facts import RequestFacts
from services.gateway.request_metrics import RequestMeter, label_of
from services.gateway.requests import RequestCore
from services.gateway.reservations import first_lease, has_budget, refused, reservation
from services.gateway.tasks import Tasks

RETRY_AFTER_S = 1.0
STORE_PATIENCE_S = 3.0
_WAITS = 10
_ULID_CHARS = 26
T = TypeVar("T")


class Workers(Protocol):
    """The part of the worker pool that admission asks."""

    def serves(self, model: str, version: str) -> bool: ...


class RemoteCancel(Protocol):
    """Tells another gateway to cancel a request it owns."""

    async def send(self, gateway_instance: str, tenant: str, request_id: str) -> bool:
        """False when that gateway does not listen."""
        ...


class AdmissionGenerator:
    """The seam's Generator. `gate` answers why nothing new may start now, or None."""

    def __init__(
        self,
        store: AdmissionStore,
        table: LiveTable,
        workers: Workers,
        remote: RemoteCancel,
        settings: AdmissionSettings,
        metrics: Metrics,
        *,
        gate: Callable[[], MillraceError | None],
    ) -> None:
        self._store = store
        self._table = table
        self._workers = workers
        self._remote = remote
        self._settings = settings
        self._entries = EntryMaker(settings)
        self._metrics = metrics
        self._gate = gate
        self._clock: Clock = table.clock
        self._tasks = Tasks()

    async def start(self, key: KeyRecord, request: ValidRequest) -> LiveRequest:
        """Reserve and enqueue. Raises a MillraceError of limits, queue or store; nothing is then left behind."""
        received_at = self._clock.monotonic()
        model = request.model.card.model
        span = tracer().start_span("gateway.request", kind=trace.SpanKind.SERVER, attributes=_attributes(key, request))
        try:
            closed = self._gate()
            if closed is not None:
                raise closed
            if not self._workers.serves(model.model, model.version):
                raise NoWorker(f"No worker serves `{model.model}` at the moment.", retry_after_s=RETRY_AFTER_S)
            live = await self._prepare(key, request, span, received_at)
            if span.is_recording():
                with trace.use_span(span), tracer().start_as_current_span("admission.enqueue"):
                    await self._admit(live)
            else:
                await self._admit(live)
        except BaseException as error:
            reason = error.row.reason if isinstance(error, MillraceError) else "CANCELLED"
            self._metrics.refusals_total.labels(reason).inc()
            span.set_attribute("error.type", reason)
            span.end()
            raise
        return live

    async def cancel(self, key: KeyRecord, request_id: str) -> bool:
        """Cancel a request of the key's tenant, wherever it runs; False when it had ended. Raises NotFound."""
        if len(request_id) != _ULID_CHARS or not request_id.isalnum() or not request_id.isascii():
            raise NotFound("There is no such request.")
        if self._table.get(request_id) is not None:
            return self.cancel_local(key.tenant, request_id)
        where = await self._store.get_where(key.tenant, request_id)
        if where is None:
            raise NotFound("There is no such request.")
        return await self._remote.send(where[1], key.tenant, request_id)

    def cancel_local(self, tenant: str, request_id: str) -> bool:
        """Cancel a live request of this gateway; False when it had ended. Raises NotFound for another tenant's."""
        live = self._table.get(request_id)
        if live is None:
            return False
        if live.facts.key.tenant != tenant:
            raise NotFound("There is no such request.")
        if live.core.ended or live.core.done or live.core.error is not None:
            return False
        self._table.fail(live, Cancelled("The request was cancelled."))
        return True

    async def close(self) -> None:
        """Drop background work."""
        await self._tasks.close()

    async def _prepare(
        self, key: KeyRecord, request: ValidRequest, span: trace.Span, received_at: float
    ) -> LiveRequest:
        entry = await self._entries.make(key, request)
        entry.traceparent = traceparent_of(span)
        span.set_attribute("millrace.request_id", entry.request_id)
        facts = RequestFacts(
            key, request.model.pool, entry, request, ClientLabels(request.user, request.metadata), span, received_at
        )
        sampling = request.sampling
        limits = RequestLimits(
            choice_count=sampling.choice_count,
            max_token_count=sampling.max_token_count,
            deadline=received_at + request.timeout_s,
            resumes=request.resume_policy != common_pb2.RESUME_POLICY_FAIL,
            budget_tokens=first_lease(entry) if has_budget(key) else None,
        )
        meter = RequestMeter(self._metrics, _labels(entry, self._metrics), received_at, self._settings.targets)
        return LiveRequest(facts, RequestCore(limits, now=received_at), self._table, meter)

    async def _admit(self, live: LiveRequest) -> None:
        facts, limits = live.facts, live.core.limits
        tenant = facts.key.tenant
        ask = reservation(facts.key, facts.entry, first_lease(facts.entry))
        try:
            refusal = await _patient(self._store.reserve(ask))
            if refusal is not None:
                raise refused(refusal)
        except (StoreUnavailable, asyncio.CancelledError):
            self._tasks.spawn(self._release(tenant, facts.request_id), name="release")
            raise
        self._table.add(live)
        remaining_ms = int((limits.deadline - self._clock.monotonic()) * 1000)
        try:
            caps = self._caps_of(facts)
            answer = await _patient(
                self._store.enqueue(facts.pool, facts.entry, caps, remaining_ms=max(1, remaining_ms))
            )
        except BaseException as error:
            # It may stand in the queue: end it the way of every admitted request, behind the caller's back.
            self._tasks.spawn(self._undo(live, error), name="undo-admission")
            raise
        if isinstance(answer, Refusal):
            self._table.forget(live)
            await self._release(tenant, facts.request_id)
            raise refused(answer)
        live.position = answer.position
        live.admitted = True
        live.watch_deadline()

    async def _undo(self, live: LiveRequest, error: BaseException) -> None:
        if isinstance(error, MillraceError):
            state, reason = common_pb2.TERMINAL_STATE_FAILED, error.row.reason
        else:
            state, reason = common_pb2.TERMINAL_STATE_CANCELLED, ""
        await live.finish(state, common_pb2.FINISH_REASON_ERROR, reason)

    async def _release(self, tenant: str, request_id: str) -> None:
        # A reservation that cannot be released expires by itself.
        try:
            await self._store.release(tenant, request_id)
        except StoreUnavailable:
            return

    def _caps_of(self, facts: RequestFacts) -> PoolCaps:
        caps, key, blocks = self._settings.caps, facts.key, facts.key.worker_blocks
        if (key.queued_requests, key.worker_slots, blocks) == (None, None, None):
            return caps
        queued = caps.tenant_requests if key.queued_requests is None else key.queued_requests
        return dataclasses.replace(
            caps,
            tenant_requests=min(caps.tenant_requests, queued),
            worker_slots=key.worker_slots,
            worker_tokens=None if blocks is None else blocks * facts.request.model.card.block_size,
        )


async def _patient(asked: Awaitable[T]) -> T:
    """A Redis that hangs is away. A loop that is late is not Redis: after each wait it reads what was answered."""
    answer = asyncio.ensure_future(asked)
    try:
        for _ in range(_WAITS):
            await asyncio.wait((answer,), timeout=STORE_PATIENCE_S / _WAITS)
            if answer.done():
                return answer.result()
    finally:
        answer.cancel()
    raise StoreUnavailable("The admission store does not answer.", retry_after_s=RETRY_AFTER_S)


def _labels(entry: admission_pb2.AdmissionEntry, metrics: Metrics) -> tuple[str, str, str, str, str]:
    return (
        entry.model.model,
        entry.model.version,
        label_of(common_pb2.PriorityClass.Name(entry.priority_class)),
        label_of(common_pb2.LengthClass.Name(entry.length_class)),
        metrics.tenant_label(entry.tenant),
    )


def _attributes(key: KeyRecord, request: ValidRequest) -> dict[str, str | int]:
    generation = "chat" if request.model.template is not None else "text_completion"
    return {
        "gen_ai.operation.name": "embeddings" if request.sampling.embed else generation,
        "gen_ai.request.model": request.model.card.model.model,
        "millrace.model_version": request.model.card.model.version,
        "millrace.manifest_digest": request.model.card.model.manifest_digest.hex(),
        "gen_ai.request.max_tokens": request.sampling.max_token_count,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "millrace.tenant": key.tenant,
    }
