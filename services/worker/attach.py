"""Joins engine and gateways: takes accepted requests, spreads engine reports, and runs the Attach streams.

Owns the request table and one session for each attached gateway. A session has no frame queue: it builds the next
frame from what is unsent once the previous write returned. The engine never waits for any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_types import Pool
from services.common.clock import Clock
from services.common.errors import InvalidRequest
from services.worker.attempt_records import AttemptRecorder
from services.worker.engine.request import EngineRequest
from services.worker.engine_loop import LoopReport
from services.worker.grammar_gate import GrammarGate
from services.worker.load_reporter import LoadBoard
from services.worker.requests import Abort, GatewayLink, RequestTable
from services.worker.streams import Failure, RequestStream
from services.worker.terminals import TerminalWriter, gateway_lost_terminal

SWEEP_S = 0.25
MAX_CONTINUED = 65_536
_Write = Callable[[worker_service_pb2.AttachResponse], Awaitable[None]]


class _Session:
    """One Attach stream. `closed` is set when a newer stream of the same gateway takes over."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.wake.set()


class GatewayHub:
    """The worker's side of every request, on the event loop."""

    def __init__(
        self,
        *,
        worker_instance: str,
        table: RequestTable,
        engine: GrammarGate,
        board: LoadBoard,
        recorder: AttemptRecorder,
        terminals: TerminalWriter,
        clock: Clock,
    ) -> None:
        self._instance = worker_instance
        self._table = table
        self._engine = engine
        self._board = board
        self._recorder = recorder
        self._terminals = terminals
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        self._empty = asyncio.Event()

    def check(self, request: EngineRequest) -> None:
        """Raise NeverFitsError or another EngineError for a request that could never run here."""
        self._engine.check(request)

    def submit(self, stream: RequestStream, request: EngineRequest) -> None:
        """Take an attempt of an attached gateway. Raises StaleEpochError; returns at once."""
        older = self._table.admit(stream)
        if older is not None and not older.ended:
            self._leave(older, Failure("SUPERSEDED", "A newer attempt took over.", retryable=False))
        self._recorder.log.open(stream)
        self._engine.submit(request)
        self._wake(stream.facts.gateway_instance)
        self._board.touch()

    def on_report(self, report: LoopReport) -> None:
        """Spread what the engine did to the streams and wake the sessions that have something to send."""
        now, now_wall = self._clock.monotonic(), self._clock.wall()
        running = {id(s): s for o in report.outputs if (s := self._table.get(o.key.request_id)) and not s.ended}
        changed, aborts = self._table.apply(report.outputs, now=now, now_wall=now_wall)
        if aborts:
            self._engine.abort(aborts)
        for rejection in report.rejections:
            failure = Failure(rejection.reason, rejection.detail, retryable=False)
            self._fail(rejection.request_id, rejection.epoch, failure)
        self._recorder.log.take_report(report, now_wall)
        for stream in running.values():
            if stream.ended:
                self._recorder.record(stream)
        if report.failed:
            self.fail_all(Failure("ENGINE_ERROR", "The engine of this worker failed.", retryable=True))
        for gateway in changed:
            self._wake(gateway)
        for events in report.cache:
            self._board.cache.update(events)
        if report.stats is not None:
            self._board.update(report.stats, report.step_seconds)
        self._board.touch()

    def fail_all(self, failure: Failure) -> None:
        """End every attempt in hand with `failure` and tell the gateways."""
        for facts in self._table.unfinished():
            self._engine.abort([Abort(facts.request_id, facts.epoch)])
            self._fail(facts.request_id, facts.epoch, failure)

    async def serve(self, requests: AsyncIterator[worker_service_pb2.AttachRequest], write: _Write) -> None:
        """Run one Attach stream to its end. Raises InvalidRequest when it does not open with a good Hello."""
        hello = await _hello(requests)
        gateway = hello.gateway_instance
        previous = self._sessions.get(gateway)
        if previous is not None:
            previous.close()
        session = self._sessions[gateway] = _Session()
        link = self._table.attach(hello)
        self._board.touch()
        structlog.get_logger().info("gateway_attached", gateway=gateway, continued=len(hello.continued))
        reader = asyncio.create_task(self._read(gateway, session, requests))
        try:
            await self._write(link, session, write)
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reader
            if self._sessions.get(gateway) is session:
                del self._sessions[gateway]
                self._table.detach(gateway, self._clock.monotonic())
                self._board.touch()
                structlog.get_logger().info("gateway_detached", gateway=gateway, held=len(link.streams))

    async def sweep(self) -> None:
        """Look after retention, lost gateways and health, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_S)
            self.expire()
            self._board.touch()

    def expire(self) -> None:
        """Abort and finish the requests of gateways that stayed away too long; forget old ends."""
        now_wall = self._clock.wall()
        for stream in self._table.expire(self._clock.monotonic()):
            if not stream.ended:
                self._leave(stream, Failure("GATEWAY_LOST", "The gateway stayed away.", retryable=False))
            pool = stream.facts.entry.pool
            terminal = gateway_lost_terminal(stream, worker_instance=self._instance, now_wall=now_wall)
            self._terminals.add(Pool(pool.model, pool.pool, pool.shard), terminal)
        self._note_empty()

    async def wait_ended(self, grace_s: float) -> bool:
        """Wait until no request is in hand, at most `grace_s`; False when some are left."""
        self._note_empty()
        await self._clock.wait(self._empty, grace_s)
        return self._empty.is_set()

    def close_sessions(self) -> None:
        """End every Attach stream; the gateways see a clean end of stream."""
        for session in self._sessions.values():
            session.close()

    async def _write(self, link: GatewayLink, session: _Session, write: _Write) -> None:
        sequence = 0
        while not session.closed:
            due = link.next_due()
            if due is None:
                await session.wake.wait()
                session.wake.clear()
                continue
            now = self._clock.monotonic()
            if due > now:
                await self._clock.wait(session.wake, due - now)
                session.wake.clear()
                continue
            events, touched = link.take_events(now)
            sequence += 1
            await write(
                worker_service_pb2.AttachResponse(worker_instance=self._instance, events=events, sequence=sequence)
            )
            self._table.settle_sent(touched)
            self._note_empty()

    async def _read(
        self, gateway: str, session: _Session, requests: AsyncIterator[worker_service_pb2.AttachRequest]
    ) -> None:
        try:
            async for message in requests:
                if session.closed:
                    return
                self._take(gateway, message)
        finally:
            session.close()

    def _take(self, gateway: str, message: worker_service_pb2.AttachRequest) -> None:
        kind = message.WhichOneof("message")
        if kind == "ack":
            self._table.ack(gateway, message.ack.entries)
            self._note_empty()
        elif kind == "cancel":
            abort = self._table.cancel(gateway, message.cancel)
            stream = self._table.get(message.cancel.request_id)
            if abort is not None:
                self._engine.abort([abort])
            if abort is not None and abort.choice is None and stream is not None:
                stream.note_cancel(self._clock.wall())
            self._note_empty()
        self._board.touch()

    def _fail(self, request_id: str, epoch: int, failure: Failure) -> None:
        gateway = self._table.fail(request_id, epoch, failure, now=self._clock.monotonic(), now_wall=self._clock.wall())
        stream = self._table.get(request_id)
        if gateway is not None and stream is not None:
            self._recorder.record(stream)
            self._wake(gateway)

    def _leave(self, stream: RequestStream, failure: Failure) -> None:
        self._engine.abort([Abort(stream.facts.request_id, stream.facts.epoch)])
        stream.fail(failure, self._clock.wall())
        self._recorder.record(stream)

    def _wake(self, gateway: str) -> None:
        session = self._sessions.get(gateway)
        if session is not None:
            session.wake.set()

    def _note_empty(self) -> None:
        if len(self._table) == 0:
            self._empty.set()
        else:
            self._empty.clear()


async def _hello(requests: AsyncIterator[worker_service_pb2.AttachRequest]) -> worker_service_pb2.Hello:
    first = await anext(requests, None)
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidRequest("The first message of Attach must be Hello.")
    if not 0 < len(first.hello.gateway_instance) <= 128:
        raise InvalidRequest("Hello names no gateway.", param="gateway_instance")
    if len(first.hello.continued) > MAX_CONTINUED:
        raise InvalidRequest("Hello continues too many requests.", param="continued")
    return first.hello
