"""One Attach stream to one worker: dials, says hello, reads frames, writes acks and cancels, comes back after a break.

Keeps no request state: frames go to the listener, acks are built from it. Gives a worker up 3 s after a break. Owned
by the worker pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Protocol, TypeAlias

import grpc
import structlog
from millrace.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

from services.common.admission_types import WorkerRecord
from services.common.clock import Clock
from services.common.grpc_client import Dial
from services.common.lifecycle import end_tasks

GIVE_UP_S = 3.0
ACK_DELAY_S = 0.100
# A worker that says nothing for so long is asked; one that does not answer is frozen, whatever its socket says.
SILENCE_S = 2.0
PROBE_TIMEOUT_S = 4.0
_CONNECT_S = 1.0
_SETTLED_S = 1.0
_BACKOFF_S = (0.05, 0.1, 0.2, 0.4)
_IDLE_BACKOFF_S = 2.0


_Call: TypeAlias = "grpc.aio.StreamStreamCall[worker_service_pb2.AttachRequest, worker_service_pb2.AttachResponse]"


class AttachListener(Protocol):
    """Who holds the requests."""

    def continued(self, instance: str) -> list[worker_service_pb2.Continue]:
        """What is held of the requests bound to this worker."""
        ...

    def on_frame(self, instance: str, events: Iterable[worker_service_pb2.Event]) -> None:
        """Events of one frame, in order."""
        ...

    def ack_entries(self, instance: str, request_ids: Iterable[str]) -> list[worker_service_pb2.AckEntry]:
        """What to confirm of requests that are still bound to this worker."""
        ...

    def on_acked(self, entries: Iterable[worker_service_pb2.AckEntry]) -> None:
        """Confirmations were written."""
        ...

    def on_worker_lost(self, instance: str) -> None:
        """The worker stayed away for 3 s."""
        ...


class WrongWorkerError(Exception):
    """Another incarnation answers at the address."""


class WorkerAttachment:
    """The stream to one worker incarnation, over all its reconnects."""

    def __init__(
        self, record: WorkerRecord, gateway_instance: str, listener: AttachListener, clock: Clock, dial: Dial
    ) -> None:
        self.record = record
        self.attached = False
        self.listed = True
        self._gateway_instance = gateway_instance
        self._listener = listener
        self._clock = clock
        self._dial = dial
        self._cancels: dict[bytes, worker_service_pb2.Cancel] = {}
        self._unacked: dict[str, None] = {}
        self._final: dict[str, worker_service_pb2.AckEntry] = {}
        # There is something to send; it must not wait for company.
        self._wake, self._hurry = asyncio.Event(), asyncio.Event()
        self._reopen = asyncio.Event()
        self._settled = False
        self._given_up = True
        self._replaced = False
        self._heard_at = 0.0
        self._loss_timer: asyncio.TimerHandle | None = None
        self._log = structlog.get_logger().bind(worker=record.instance)

    @property
    def given_up(self) -> bool:
        """Nothing is expected of this worker until it comes back."""
        return self._given_up

    async def run(self) -> None:
        """Keep the stream until the worker is neither listed nor reachable."""
        failures = 0
        while True:
            session = asyncio.create_task(self._session(), name=f"attach-{self.record.instance}")
            try:
                failures = 0 if await self._watch(session) else failures + 1
            finally:
                self.attached = False
                await end_tasks([session])
            if self._replaced or (self._given_up and not self.listed):
                return
            waits = _BACKOFF_S if not self._given_up else (*_BACKOFF_S, _IDLE_BACKOFF_S)
            await self._clock.sleep(waits[min(failures, len(waits) - 1)])

    def close(self) -> None:
        """Forget the loss timer; nothing is reported any more."""
        self._given_up = True
        if self._loss_timer is not None:
            self._loss_timer.cancel()

    def give_up(self) -> None:
        """Its requests run elsewhere from now on."""
        self._loss_timer = None
        if not self._given_up:
            self._given_up = True
            self._log.warning("worker_lost")
            self._listener.on_worker_lost(self.record.instance)

    def cancel(self, cancel: worker_service_pb2.Cancel) -> None:
        """Send a Cancel as soon as the stream takes it; while it is broken, what it holds is dropped by epoch."""
        if self.attached:
            self._cancels[cancel.SerializeToString(deterministic=True)] = cancel
            self._hurry_up()

    def acknowledge(self, request_id: str) -> None:
        """Send an ack of a request at once."""
        self._unacked[request_id] = None
        self._hurry_up()

    def confirm(self, entry: worker_service_pb2.AckEntry) -> None:
        """Send the last ack of a request that is no longer held, with others: nobody waits for it."""
        if self.attached:
            self._final[entry.request_id] = entry
            self._wake.set()

    def reopen(self) -> None:
        """Break the stream; the next hello says what is held."""
        self._reopen.set()

    async def _watch(self, session: asyncio.Task[None]) -> bool:
        """Wait for the end of a session; True when it had settled."""
        self._reopen.clear()
        reopen = asyncio.create_task(self._reopen.wait())
        try:
            await asyncio.wait({session, reopen}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reopen.cancel()
        settled, self._settled = self._settled, False
        cause = _cause(session.exception()) if session.done() and not session.cancelled() else None
        if settled:
            self._log.info("attach_broken", error=type(cause).__name__)
        if isinstance(cause, WrongWorkerError):
            self._replaced = True
            self.give_up()
        if not self._given_up and self._loss_timer is None:
            self._loss_timer = asyncio.get_running_loop().call_later(GIVE_UP_S, self.give_up)
        return settled

    async def _session(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            channel = self._dial(self.record.address)
            stack.push_async_callback(channel.close)
            stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
            async with asyncio.timeout(_CONNECT_S):
                await channel.channel_ready()
                # A new incarnation at an old address must not be asked for requests it never had.
                card = await stub.GetModelCard(worker_service_pb2.GetModelCardRequest())
            if card.worker_instance != self.record.instance:
                raise WrongWorkerError
            call = stub.Attach()
            stack.callback(call.cancel)
            hello = worker_service_pb2.Hello(
                gateway_instance=self._gateway_instance, continued=self._listener.continued(self.record.instance)
            )
            self._cancels, self._final = {}, {}
            # What the broken stream was to tell of these is told again.
            self._unacked = dict.fromkeys(held.request_id for held in hello.continued)
            self._wake.set()
            await call.write(worker_service_pb2.AttachRequest(hello=hello))
            self.attached = True
            self._log.info("attached", continued=len(hello.continued))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(call))
                group.create_task(self._settle(call))
                group.create_task(self._probe(stub))
                async for frame in _frames(call):
                    self._take(frame)
                raise ConnectionError("the worker closed the stream")

    async def _settle(self, call: _Call) -> None:
        # A worker that answers, or that keeps the stream for a second, is back.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLED_S):
                await call.initial_metadata()
        self._settle_now()

    async def _probe(self, stub: worker_service_pb2_grpc.WorkerServiceAsyncStub) -> None:
        while True:
            await self._clock.sleep(SILENCE_S)
            silent = self._clock.monotonic() - self._heard_at >= SILENCE_S
            if silent and self._listener.continued(self.record.instance):
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await stub.GetModelCard(worker_service_pb2.GetModelCardRequest())

    def _settle_now(self) -> None:
        self._settled, self._given_up = True, False
        if self._loss_timer is not None:
            self._loss_timer.cancel()
            self._loss_timer = None

    def _take(self, frame: worker_service_pb2.AttachResponse) -> None:
        if frame.worker_instance != self.record.instance:
            raise WrongWorkerError
        self._settle_now()
        self._heard_at = self._clock.monotonic()
        for event in frame.events:
            if event.HasField("delta"):
                self._unacked[event.request_id] = None
                self._wake.set()
        self._listener.on_frame(self.record.instance, frame.events)

    async def _write(self, call: _Call) -> None:
        while True:
            await self._wait_for_company()
            self._wake.clear()
            self._hurry.clear()
            cancels, self._cancels = self._cancels, {}
            for cancel in cancels.values():
                await call.write(worker_service_pb2.AttachRequest(cancel=cancel))
            ids, self._unacked = self._unacked, {}
            final, self._final = self._final, {}
            entries = self._listener.ack_entries(self.record.instance, [i for i in ids if i not in final])
            if entries or final:
                ack = worker_service_pb2.Ack(entries=[*entries, *final.values()])
                await call.write(worker_service_pb2.AttachRequest(ack=ack))
                self._listener.on_acked(entries)

    def _hurry_up(self) -> None:
        self._wake.set()
        self._hurry.set()

    async def _wait_for_company(self) -> None:
        # Nothing to send: sleep. Something: what comes within 100 ms goes with it.
        await self._wake.wait()
        if not self._hurry.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACK_DELAY_S):
                    await self._hurry.wait()


def _cause(error: BaseException | None) -> BaseException | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _frames(call: _Call) -> AsyncIterator[worker_service_pb2.AttachResponse]:
    while True:
        frame = await call.read()
        if not isinstance(frame, worker_service_pb2.AttachResponse):
            return
        yield frame
