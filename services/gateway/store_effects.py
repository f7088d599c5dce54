"""What the live requests ask of Redis and of the workers, done in the background. Implements `Effects`.

While Redis is away it tries again until the request has ended; running streams do not notice.
"""

from __future__ import annotations

import contextlib

import structlog
from millrace.common.v1 import admission_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Ownership, Pool, Refusal
from services.common.clock import Clock
from services.common.errors import MillraceError, NotReady, NoWorker, Poisoned, PoolClosed, StoreUnavailable
from services.common.routes import Target
from services.gateway.entries import AdmissionSettings, EntryMaker
from services.gateway.generation import ServedModel, ValidRequest
from services.gateway.live_requests import LiveRequest, LiveTable
from services.gateway.model_directory import WorkerDirectory
from services.gateway.outbox import OutboxRecord
from services.gateway.publisher import UsagePublisher
from services.gateway.request_actions import Own, Readmit, Rechoose
from services.gateway.reservations import reservation
from services.gateway.tasks import Tasks
from services.gateway.worker_pool import WorkerPool

RETRY_S = 0.5
# The router records the owner too, at once: what has ended after this time needs no second record.
OWN_DELAY_S = 0.1


class StoreEffects:
    """Runs each effect as a task of its own; ownership is written in batches."""

    def __init__(
        self,
        store: AdmissionStore,
        table: LiveTable,
        pool: WorkerPool,
        directory: WorkerDirectory,
        publisher: UsagePublisher,
        settings: AdmissionSettings,
    ) -> None:
        self._store = store
        self._table = table
        self._pool = pool
        self._directory = directory
        self._entries = EntryMaker(settings)
        self._publisher = publisher
        self._caps = settings.caps
        self._clock: Clock = table.clock
        self._tasks = Tasks()
        self._owning: dict[Pool, dict[str, Ownership]] = {}

    def cancel(self, instance: str, cancel: worker_service_pb2.Cancel) -> None:
        """Tell the worker, where there is a stream to it."""
        self._pool.cancel(instance, cancel)

    def acknowledge(self, instance: str, request_id: str) -> None:
        """Tell the worker soon what was delivered."""
        self._pool.acknowledge(instance, request_id)

    def confirm(self, instance: str, entry: worker_service_pb2.AckEntry) -> None:
        """Send the last ack."""
        self._pool.confirm(instance, entry)

    def reattach(self, instance: str) -> None:
        """Open the stream again from what is held."""
        self._pool.reopen(instance)

    def own(self, request: LiveRequest, action: Own) -> None:
        """Record who runs the request."""
        pool = request.facts.pool
        if not self._owning:
            self._tasks.spawn(self._write_ownership(), name="own")
        ownership = Ownership(request.request_id, action.binding.epoch, action.binding.instance)
        self._owning.setdefault(pool, {})[request.request_id] = ownership

    def readmit(self, request: LiveRequest, action: Readmit) -> None:
        """Queue the request again."""
        self._tasks.spawn(self._readmit(request, action), name="readmit")

    def rechoose(self, request: LiveRequest, action: Rechoose) -> None:
        """Choose the version, tokenise and queue again."""
        self._tasks.spawn(self._rechoose(request, action), name="rechoose")

    def served_by(self, instance: str) -> ServedModel | None:
        """The version that an attached worker serves."""
        record = self._pool.record(instance)
        return None if record is None else self._directory.known(Target(record.model, record.version))

    def renew_budget(self, request: LiveRequest, tokens: int) -> None:
        """Lease more of the budget."""
        self._tasks.spawn(self._renew_budget(request, tokens), name="renew-budget")

    async def publish(self, request: LiveRequest, record: OutboxRecord) -> None:
        """Outbox first; the rest follows in the background."""
        await self._publisher.add(request.facts.pool, record)

    async def close(self) -> None:
        """Drop what still runs."""
        await self._tasks.close()

    async def _write_ownership(self) -> None:
        while self._owning:
            await self._clock.sleep(OWN_DELAY_S)
            for pool in list(self._owning):
                owned = [o for o in self._owning[pool].values() if self._table.get(o.request_id) is not None]
                self._owning[pool] = {}
                try:
                    await self._store.own(pool, owned)
                except StoreUnavailable:
                    self._owning[pool] = {o.request_id: o for o in owned} | self._owning[pool]
                    await self._clock.sleep(RETRY_S)
                if not self._owning[pool]:
                    del self._owning[pool]

    async def _readmit(self, request: LiveRequest, action: Readmit) -> None:
        entry = admission_pb2.AdmissionEntry()
        entry.CopyFrom(request.facts.entry)
        entry.attempt = action.attempt
        entry.lost_workers.extend(action.lost)
        entry.kv_holder = action.holder
        for choice, token_ids in action.prefix:
            entry.prefix.add(choice=choice, token_ids=token_ids)
        while not self._over(request, action.attempt):
            remaining_ms = int((request.core.limits.deadline - self._clock.monotonic()) * 1000)
            try:
                answer = await self._store.enqueue(
                    request.facts.pool, entry, self._caps, readmit=True, remaining_ms=max(1, remaining_ms)
                )
            except StoreUnavailable:
                await self._clock.sleep(RETRY_S)
                continue
            if isinstance(answer, Refusal) and not self._over(request, action.attempt):
                poisoned = answer.reason == Poisoned.row.reason
                if poisoned:
                    structlog.get_logger().error("request_poisoned", request_id=request.request_id, workers=action.lost)
                self._table.perform(request, request.core.on_poisoned() if poisoned else request.core.on_superseded())
            return

    async def _rechoose(self, request: LiveRequest, action: Rechoose) -> None:
        """The reservation stays: it is the request's, whatever its tokens. What no version may take, fails."""
        old = request.facts
        while not self._over(request, action.attempt):
            try:
                chosen = await _validated_again(old.request)
            except (NoWorker, NotReady):
                await self._clock.sleep(RETRY_S)
                continue
            except MillraceError as error:
                self._table.fail(request, error)
                return
            entry = await self._entries.make(old.key, chosen)
            entry.traceparent = old.entry.traceparent
            request.chosen_again(entry, chosen)
            await self._readmit(request, request.core.readmission(PoolClosed.row.reason))
            if chosen.model.pool != old.pool:
                with contextlib.suppress(StoreUnavailable):
                    await self._store.forget_closed(old.pool, request.request_id)
            return

    def _over(self, request: LiveRequest, attempt: int) -> bool:
        core = request.core
        return core.ended or core.error is not None or core.attempt != attempt

    async def _renew_budget(self, request: LiveRequest, tokens: int) -> None:
        ask = reservation(request.facts.key, request.facts.entry, request.core.budget or 0)
        try:
            granted = await self._store.renew_budget(ask, tokens)
        except StoreUnavailable:
            # Running streams go on while Redis is away.
            granted = tokens
        finally:
            request.renewing = False
        request.core.on_budget(granted)
        request.tell()
        self._table.ask_budget(request)


async def _validated_again(request: ValidRequest) -> ValidRequest:
    """By the routes of now, with the seed that the client may have been told."""
    if request.again is None:
        raise PoolClosed("The version of this request was withdrawn.")
    chosen = await request.again()
    chosen.sampling.seed = request.sampling.seed
    return chosen
