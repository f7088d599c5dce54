"""Answers that outlive their client's connection: one run for an Idempotency-Key, and streams read again after a cut.

Owns which log belongs to which key and request, and how long a log lives without a client. Where the run is elsewhere,
the other gateway is asked (peers.py). Called by the doors.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol

from millrace.gateway.v1 import gateway_service_pb2 as pb
from starlette.types import Send

from services.common.clock import Clock
from services.common.errors import (
    IdempotencyConflict,
    MillraceError,
    NotFound,
    SlowReader,
    StoreUnavailable,
    Unsupported,
)
from services.common.lifecycle import end_tasks, new_ulid
from services.gateway.answer_log import AnswerLog, Head, KeptAnswer, LogRoom
from services.gateway.answer_sink import PING_S, ClientSink, Sink, pinging
from services.gateway.come_back import ComeBack, EventId
from services.gateway.http_errors import error_body
from services.gateway.idempotency_store import RESULT_BYTES, IdempotencyStore, Record
from services.gateway.peers import Peers
from services.gateway.tasks import Tasks

GRACE_S = 30.0
_CLAIM_TRIES = 8
Parts = AsyncGenerator[Head | bytes, None]


class Run(Protocol):
    """A generation under way, its answer not yet written. `timeout_s` is until its deadline."""

    @property
    def request_id(self) -> str: ...

    @property
    def timeout_s(self) -> float: ...

    def write(self, sink: Sink) -> Coroutine[Any, Any, None]:
        """Write the whole answer and end the generation, whatever comes."""
        ...


class Job(Protocol):
    """A request that may start a run."""

    async def validate(self) -> None:
        """Raises MillraceError; nothing has begun."""
        ...

    async def begin(self) -> Run:
        """Start the generation. Raises MillraceError; nothing is then left behind."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Claim:
    """This gateway's right to run a key."""

    tenant: str
    key: str
    body: str
    token: str


class ResumableAnswers:
    """The logs of this gateway."""

    def __init__(self, records: IdempotencyStore, peers: Peers, clock: Clock, *, instance: str) -> None:
        self._records = records
        self._peers = peers
        self._clock = clock
        self._instance = instance
        self._room = LogRoom()
        self._logs: dict[tuple[str, str], AnswerLog] = {}
        self._keyed: dict[tuple[str, str], tuple[_Claim, AnswerLog]] = {}
        self._opening: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}
        self._tasks = Tasks()

    def __len__(self) -> int:
        return len(self._logs)

    async def answer(self, tenant: str, ask: ComeBack, job: Job, send: Send) -> None:
        """Start, join or replay. Raises IdempotencyConflict, NotFound, and what the job raises, before any byte."""
        async with self.opened(tenant, ask, job) as parts:
            await relay(parts, send)

    @contextlib.asynccontextmanager
    async def opened(self, tenant: str, ask: ComeBack, job: Job) -> AsyncGenerator[Parts, None]:
        """The answer that `answer` writes, read while the context is open. Raises as `answer`."""
        async with contextlib.AsyncExitStack() as reading:
            if ask.key:
                async with self._alone((tenant, ask.key)):
                    parts = await self._keyed_parts(reading, tenant, ask, job)
            else:
                await job.validate()
                log = self._keep(tenant, await job.begin(), None)
                reading.enter_context(log.reading())
                parts = log.read(-1)
            yield parts

    async def resume(
        self, tenant: str, request_id: str, last_event: EventId | None, authorization: str, send: Send
    ) -> None:
        """Go on after `last_event`. Raises NotFound, NotReady."""
        async with contextlib.AsyncExitStack() as reading:
            log = self._logs.get((tenant, request_id))
            parts: Parts | None = None
            if log is not None:
                reading.enter_context(log.reading())
                parts = log.read(_after(last_event, request_id))
            else:
                _after(last_event, request_id)
                owner = await self._records.holder(tenant, request_id)
                if owner not in (None, self._instance):
                    request = pb.ContinueRequest(request_id=request_id, last_event=_wire_event(last_event))
                    parts = await self._peers.open(str(owner), request, authorization)
            if parts is None:
                raise NotFound("There is no such stream.")
            await relay(parts, send)

    @contextlib.asynccontextmanager
    async def held(self, tenant: str, request: pb.ContinueRequest) -> AsyncGenerator[Parts, None]:
        """For another gateway: parts of an answer of this one. Raises NotFound, IdempotencyConflict."""
        last_event = EventId(request.last_event.request_id, request.last_event.number)
        asked = last_event if request.HasField("last_event") else None
        if request.WhichOneof("answer") == "key_digest":
            async with self._alone((tenant, request.key_digest)):
                claim, log = self._keyed.get((tenant, request.key_digest), (None, None))
            if claim is not None and claim.body != request.body_digest:
                raise _conflict()
        else:
            log = self._logs.get((tenant, request.request_id))
        if log is None:
            raise NotFound("This gateway does not hold that answer.")
        with log.reading():
            yield log.read(_after(asked, log.request_id))

    async def close(self) -> None:
        """End every run."""
        await self._tasks.close()
        await self._peers.close()

    # --- keys ----------------------------------------------------------------------------------------------------
    async def _keyed_parts(self, reading: contextlib.AsyncExitStack, tenant: str, ask: ComeBack, job: Job) -> Parts:
        for _ in range(_CLAIM_TRIES):
            claim, log = self._keyed.get((tenant, ask.key), (None, None))
            if claim is not None and log is not None:
                if claim.body != ask.body:
                    raise _conflict()
                reading.enter_context(log.reading())
                return log.read(_after(ask.last_event, log.request_id))
            record = await self._records.read(tenant, ask.key)
            if record is not None:
                found = await self._recorded(record, ask)
                if found is not None:
                    return found
            if ask.last_event is not None:
                raise NotFound("That stream is gone. Post again without `Last-Event-ID` for a new answer.")
            await job.validate()
            log = await self._claimed(_Claim(tenant, ask.key, ask.body, new_ulid(self._clock.wall())), record, job)
            if log is not None:
                reading.enter_context(log.reading())
                return log.read(-1)
        raise StoreUnavailable("The state of this `Idempotency-Key` changes too fast.", retry_after_s=1.0)

    async def _recorded(self, record: Record, ask: ComeBack) -> Parts | None:
        """The answer of a record; None when its owner is dead."""
        if record.body != ask.body:
            raise _conflict()
        if record.done:
            if record.result is None:
                raise IdempotencyConflict(
                    f"The answer to this `Idempotency-Key` is not kept: the limit is {RESULT_BYTES} bytes.",
                    param="idempotency-key",
                )
            return record.result.read(_after(ask.last_event, record.result.request_id))
        if record.owner == self._instance:
            return None
        request = pb.ContinueRequest(key_digest=ask.key, body_digest=ask.body, last_event=_wire_event(ask.last_event))
        return await self._peers.open(record.owner, request, ask.authorization)

    async def _claimed(self, claim: _Claim, stale: Record | None, job: Job) -> AnswerLog | None:
        """The log of a run that this call began; None when another gateway was first."""
        try:
            expected = None if stale is None else stale.token
            if not await self._records.claim(
                claim.tenant, claim.key, claim.token, body=claim.body, owner=self._instance, instead_of=expected
            ):
                return None
            run = await job.begin()
        except BaseException:
            self._tasks.spawn(self._release(claim), name="release-key")
            raise
        return self._keep(claim.tenant, run, claim)

    @contextlib.asynccontextmanager
    async def _alone(self, place: tuple[str, str]) -> AsyncGenerator[None, None]:
        """One at a time for a key, in this process."""
        lock, waiting = self._opening.get(place, (asyncio.Lock(), 0))
        self._opening[place] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            lock, waiting = self._opening.pop(place)
            if waiting > 1:
                self._opening[place] = lock, waiting - 1

    # --- logs ----------------------------------------------------------------------------------------------------
    def _keep(self, tenant: str, run: Run, claim: _Claim | None) -> AnswerLog:
        async def store(answer: KeptAnswer) -> bool:
            assert claim is not None
            try:
                return await self._records.complete(claim.tenant, claim.key, claim.token, answer)
            except StoreUnavailable:
                return False

        log = AnswerLog(run.request_id, self._room, keep=None if claim is None else store)
        self._logs[tenant, run.request_id] = log
        if claim is not None:
            self._keyed[tenant, claim.key] = claim, log
        self._tasks.spawn(self._live(tenant, run, log, claim), name="resumable-answer")
        return log

    async def _live(self, tenant: str, run: Run, log: AnswerLog, claim: _Claim | None) -> None:
        """Write the answer, and give it up once no client has come for the grace."""
        writing = asyncio.create_task(self._write(run, log, claim), name="write-answer")
        try:
            with contextlib.suppress(StoreUnavailable):
                await self._records.announce(tenant, run.request_id, self._instance, run.timeout_s + 2 * GRACE_S)
            await self._until_abandoned(log)
        finally:
            self._logs.pop((tenant, run.request_id), None)
            if claim is not None and self._keyed.get((tenant, claim.key), (None, log))[1] is log:
                self._keyed.pop((tenant, claim.key), None)
            await end_tasks([writing])
            log.drop()
        with contextlib.suppress(StoreUnavailable):
            await self._records.retract(tenant, run.request_id)

    async def _until_abandoned(self, log: AnswerLog) -> None:
        while True:
            await log.abandoned()
            coming = asyncio.ensure_future(log.wanted())
            grace = asyncio.ensure_future(self._clock.sleep(GRACE_S))
            try:
                await asyncio.wait({coming, grace}, return_when=asyncio.FIRST_COMPLETED)
                # One may have come and gone meanwhile: its leaving begins a new grace.
                if not coming.done():
                    return
            finally:
                await end_tasks([coming, grace])

    async def _write(self, run: Run, log: AnswerLog, claim: _Claim | None) -> None:
        try:
            await run.write(log)
        finally:
            log.end()
            if claim is not None and not log.kept:
                if not log.complete:
                    # Nothing to replay: the next post of the key is a new run.
                    self._keyed.pop((claim.tenant, claim.key), None)
                self._tasks.spawn(self._settle_key(claim, log), name="settle-key")

    async def _settle_key(self, claim: _Claim, log: AnswerLog) -> None:
        if log.complete:
            with contextlib.suppress(StoreUnavailable):
                await self._records.complete(claim.tenant, claim.key, claim.token, None)
        else:
            await self._release(claim)

    async def _release(self, claim: _Claim) -> None:
        # A record that cannot be freed is found to be of no living run.
        with contextlib.suppress(StoreUnavailable):
            await self._records.release(claim.tenant, claim.key, claim.token)


async def relay(parts: Parts, send: Send) -> None:
    """Write an answer to one client: 204 when a stream has nothing left, an error event when it breaks off.

    Raises MillraceError while nothing was sent (Unsupported for an answer of a gRPC call), and SlowReader.
    """
    reading = _Reading(ClientSink(send))
    try:
        await reading.write(parts)
    except SlowReader:
        raise
    except MillraceError as error:
        if not reading.started or reading.head is None or not reading.head.is_stream:
            raise
        await reading.sink.write([b"data: " + error_body(error) + b"\n\n"], more=False)


class _Reading:
    """How far one client has read an answer."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.head: Head | None = None
        self.started = False

    async def write(self, parts: Parts) -> None:
        async with pinging(self._ping, PING_S) as heard, contextlib.aclosing(parts):
            async for part in parts:
                heard()
                if isinstance(part, Head):
                    _check_readable(part)
                    self.head = part
                elif self.head is not None:
                    await self._start(self.head)
                    await self.sink.write([part])
        head = self.head
        if head is None:
            raise NotFound("That answer was given up.")
        if not self.started and head.is_stream:
            head = Head(204, [header for header in head.headers if header[0] != b"content-type"])
        await self._start(head)
        await self.sink.write([], more=False)

    async def _start(self, head: Head) -> None:
        if not self.started:
            self.started = True
            await self.sink.start(head.status, head.headers)

    async def _ping(self) -> None:
        if self.head is not None and self.head.is_stream:
            await self._start(self.head)
            await self.sink.ping()


def _check_readable(head: Head) -> None:
    if head.is_grpc:
        raise Unsupported(
            "That answer was asked for over gRPC: make the same call again, with its `idempotency-key`.",
            param="request_id",
        )


def _after(last_event: EventId | None, request_id: str) -> int:
    if last_event is None:
        return -1
    if last_event.request_id != request_id:
        raise NotFound("`Last-Event-ID` is of another stream.", param="last-event-id")
    return last_event.number


def _wire_event(last_event: EventId | None) -> pb.LastEvent | None:
    return None if last_event is None else pb.LastEvent(request_id=last_event.request_id, number=last_event.number)


def _conflict() -> IdempotencyConflict:
    return IdempotencyConflict("This `Idempotency-Key` was used for another request.", param="idempotency-key")
