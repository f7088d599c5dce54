"""Hands submits to one worker over one stream: what comes while a write is under way goes with the next message.

Each submit is answered once, by the worker or by a status code: a stream that breaks, or on which the worker says
nothing for `SUBMIT_TIMEOUT_S`, answers all that are open with its code. A worker that knows no such stream, and a
request that would hold up others by its size, take the unary call. An entry goes on as the bytes that it came in: it is
most of a message, and copying it into one would be most of the work. An answer may bring the worker's view. Owned by
the registry, used by the dispatcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Final

import grpc
from millrace.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

from services.common.clock import Clock
from services.common.lifecycle import end_tasks

SUBMIT_TIMEOUT_S: Final = 2.0
# Requests of one message, and the size from which a request goes alone: a message holds 16 MiB.
BATCH: Final = 32
ALONE_BYTES: Final = 256 * 1024
_ENTRY: Final = worker_service_pb2.SubmitRequest.ENTRY_FIELD_NUMBER
_REQUESTS: Final = worker_service_pb2.SubmitStreamRequest.REQUESTS_FIELD_NUMBER
_METHOD: Final = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods_by_name["SubmitStream"]
Answer = worker_service_pb2.SubmitResponse | grpc.StatusCode


@dataclasses.dataclass(frozen=True, slots=True)
class _Open:
    """A submit that waits for its answer."""

    request: bytes
    answered: Callable[[Answer], None]
    sent_at: float


class SubmitLink:
    """One worker's submits."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        clock: Clock,
        *,
        on_view: Callable[[worker_service_pb2.WatchResponse], None] = lambda view: None,
        view_patience_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`on_view` is told views that come with answers, after these; `view_patience_s()` is how late the worker may
        tell by Watch of a change that leaves plenty of room."""
        self._stub: worker_service_pb2_grpc.WorkerServiceAsyncStub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        # Like the stub's, but for messages that are bytes already.
        self._open_stream: Any = channel.stream_stream(
            f"/{_METHOD.containing_service.full_name}/{_METHOD.name}",
            response_deserializer=worker_service_pb2.SubmitStreamResponse.FromString,
        )
        self._clock = clock
        self._on_view = on_view
        self._view_patience_s = view_patience_s
        self._unsent: list[bytes] = []
        # By request and epoch, the oldest first.
        self._open: dict[tuple[str, int], _Open] = {}
        self._wanted = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._knows_stream = True

    def send(
        self,
        request_id: str,
        head: worker_service_pb2.SubmitRequest,
        entry: bytes,
        answered: Callable[[Answer], None],
    ) -> None:
        """Submit soon: `head` is all of the request but its entry, which is serialized. `answered` is called once,
        never from within."""
        request = head.SerializeToString() + _field(_ENTRY, entry)
        one = _Open(request, answered, self._clock.monotonic())
        if not self._knows_stream or len(request) > ALONE_BYTES:
            self._call(one)
            return
        self._open[request_id, head.epoch] = one
        self._unsent.append(request)
        self._wanted.set()

    async def run(self) -> None:
        """Carry submits until cancelled; those that are open then are answered CANCELLED."""
        try:
            while True:
                await self._wanted.wait()
                await self._stream()
        finally:
            await end_tasks(list(self._calls))
            self._fail(grpc.StatusCode.CANCELLED)

    async def _stream(self) -> None:
        """One stream, from the first submit until it breaks."""
        call = self._open_stream()
        late = asyncio.create_task(self._wait_late(), name="submit-late")
        tasks = [late, *(asyncio.create_task(work(call), name="submit") for work in (self._read, self._write))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_late = late.done()
            call.cancel()
            await end_tasks(tasks)
        code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else await call.code()
        if code is grpc.StatusCode.UNIMPLEMENTED:
            self._knows_stream = False
            for one in self._take():
                self._call(one)
        else:
            self._fail(grpc.StatusCode.UNAVAILABLE if code is grpc.StatusCode.OK else code)

    async def _read(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for message in call:
                for response in message.responses:
                    one = self._open.pop((response.request_id, response.epoch), None)
                    if one is not None:
                        _tell(one, response)
                if message.HasField("view"):
                    asyncio.get_running_loop().call_soon(self._on_view, message.view)

    async def _write(self, call: Any) -> None:
        while True:
            await self._wanted.wait()
            batch, self._unsent = self._unsent[:BATCH], self._unsent[BATCH:]
            if not self._unsent:
                self._wanted.clear()
            head = worker_service_pb2.SubmitStreamRequest()
            head.view_patience.FromMilliseconds(round(self._view_patience_s() * 1000))
            try:
                await call.write(head.SerializeToString() + b"".join([_field(_REQUESTS, one) for one in batch]))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

    async def _wait_late(self) -> None:
        """Until the oldest submit has waited too long."""
        while True:
            oldest = next(iter(self._open.values()), None)
            now = self._clock.monotonic()
            left_s = SUBMIT_TIMEOUT_S - (now - oldest.sent_at if oldest is not None else 0.0)
            if left_s <= 0:
                return
            await self._clock.sleep(left_s)

    def _call(self, one: _Open) -> None:
        task = asyncio.create_task(self._submit(one), name="submit")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _submit(self, one: _Open) -> None:
        answer: Answer
        request = worker_service_pb2.SubmitRequest.FromString(one.request)
        try:
            answer = await self._stub.Submit(request, timeout=SUBMIT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            answer = error.code()
        except asyncio.CancelledError:
            _tell(one, grpc.StatusCode.CANCELLED)
            raise
        _tell(one, answer)

    def _fail(self, code: grpc.StatusCode) -> None:
        for one in self._take():
            _tell(one, code)

    def _take(self) -> list[_Open]:
        taken, self._open = list(self._open.values()), {}
        self._unsent.clear()
        self._wanted.clear()
        return taken


def _tell(one: _Open, answer: Answer) -> None:
    """From the loop: whoever fails over its answer keeps no other from theirs."""
    asyncio.get_running_loop().call_soon(one.answered, answer)


def _field(number: int, value: bytes) -> bytes:
    """One field of a message, by the wire format: its tag, the length in groups of seven bits, the value. A message is
    its fields one after the other, in any order."""
    size, length = len(value), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes((number << 3 | 2,)) + length + value
