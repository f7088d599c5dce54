"""One answer kept in memory while it is written, so that clients may leave, come back, and read it side by side.

The answer is written once, by one task; each client reads from where it stopped. A frame counts as delivered when the
first client's transport took it. Owns order, numbers (`id: <request id>:<n>`) and bounds; knows no HTTP and no Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

import msgspec

from services.common.errors import NotFound
from services.gateway.answer_sink import Headers

LOG_BYTES = 1024 * 1024
ALL_LOGS_BYTES = 256 * 1024 * 1024
# What goes to a transport at once, so that a client that comes back is not told more than it takes.
PART_BYTES = 16 * 1024
# Marks the head of an answer that only a gRPC call reads.
GRPC_CONTENT = (b"content-type", b"application/grpc")
# What Python keeps beside the bytes of a frame.
_FRAME_BYTES = 64


class Head(msgspec.Struct, frozen=True, array_like=True):
    """Status and headers of an answer."""

    status: int
    headers: list[tuple[bytes, bytes]]

    @property
    def is_stream(self) -> bool:
        """Whether the body is made of SSE events."""
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers)

    @property
    def is_grpc(self) -> bool:
        """Whether the body is made of the messages of a gRPC call."""
        return GRPC_CONTENT in self.headers


class KeptAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A whole answer, for replay."""

    request_id: str
    head: Head
    frames: list[bytes]

    async def read(self, after: int) -> AsyncGenerator[Head | bytes, None]:
        """The head, then what comes after event `after` (-1: all)."""
        yield self.head
        rest = b"".join(self.frames[after + 1 if self.head.is_stream else 0 :])
        if rest:
            yield rest


@dataclasses.dataclass(slots=True)
class LogRoom:
    """Bytes that the logs of this process hold together."""

    limit: int = ALL_LOGS_BYTES
    used: int = 0


Keep = Callable[[KeptAnswer], Awaitable[bool]]


class AnswerLog:
    """A sink that remembers. `keep` stores the whole answer elsewhere and says whether it did: then it is delivered."""

    def __init__(self, request_id: str, room: LogRoom, *, limit: int = LOG_BYTES, keep: Keep | None = None) -> None:
        self.request_id = request_id
        self.readers = 0
        self.complete = False
        self.kept = False
        self.ended = False
        self._room = room
        self._limit = limit
        self._keep = keep
        self._head: Head | None = None
        self._frames: deque[bytes] = deque()
        self._first = 0
        self._held = 0
        self._delivered = 0
        self._marks: deque[tuple[int, Callable[[], None]]] = deque()
        self._changed = asyncio.Event()

    @property
    def frame_count(self) -> int:
        """Frames written so far."""
        return self._first + len(self._frames)

    # --- Sink ----------------------------------------------------------------------------------------------------
    async def start(self, status: int, headers: Headers) -> None:
        """Keep the head."""
        self._head = Head(status, [(bytes(name), bytes(value)) for name, value in headers])
        self._wake()

    async def write(
        self, frames: Sequence[bytes], on_delivered: Callable[[], None] | None = None, *, more: bool = True
    ) -> None:
        """Keep frames; waits only while the log is full of what no client has read."""
        for frame in frames:
            numbered = frame
            if self._head is not None and self._head.is_stream:
                numbered = b"id: %b:%d\n%b" % (self.request_id.encode(), self.frame_count, frame)
            await self._make_room(len(numbered) + _FRAME_BYTES)
            self._frames.append(numbered)
        if on_delivered is not None:
            self._marks.append((self.frame_count, on_delivered))
        self.ended = self.ended or not more
        self._mark()
        self._wake()

    def write_now(self, frames: Sequence[bytes], on_delivered: Callable[[], None]) -> bool:
        """Never: it may have to wait for room."""
        return False

    async def ping(self) -> None:
        """Clients are pinged by who writes to them."""

    async def completed(self) -> None:
        """The answer is whole: return once it is kept elsewhere, or every frame was delivered."""
        if self._keep is not None and self._head is not None and self._first == 0:
            self.kept = await self._keep(KeptAnswer(self.request_id, self._head, list(self._frames)))
            if self.kept:
                self._delivered = self.frame_count
                self._mark()
        await self.flushed()
        self.complete = True

    async def flushed(self) -> None:
        """Return once every frame was delivered to a client."""
        while self._delivered < self.frame_count:
            await self._next_change()

    # --- readers -------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Be a client: while there is one, nobody gives the answer up."""
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1
            self._wake()

    async def read(self, after: int) -> AsyncGenerator[Head | bytes, None]:
        """The head, then the frames after number `after` (-1: all) until the end, in writes as large as they come.

        A frame is delivered when the generator is resumed. Raises NotFound when those frames are no longer held.
        """
        while self._head is None:
            if self.ended:
                return
            await self._next_change()
        at = after + 1 if self._head.is_stream else 0
        self._check(at)
        yield self._head
        while True:
            self._check(at)
            part = self._part(at)
            if part:
                at += len(part)
                yield b"".join(part)
                self._delivered = max(self._delivered, at)
                self._mark()
                self._wake()
            elif self.ended:
                return
            else:
                await self._next_change()

    async def abandoned(self) -> None:
        """Return once nobody reads."""
        while self.readers:
            await self._next_change()

    async def wanted(self) -> None:
        """Return once somebody reads."""
        while not self.readers:
            await self._next_change()

    def end(self) -> None:
        """Nothing more is written."""
        self.ended = True
        self._wake()

    def drop(self) -> None:
        """Give the memory back; readers that are left find nothing more."""
        self._room.used -= self._held
        self._first += len(self._frames)
        self._held = 0
        self._frames.clear()
        self.end()

    # --- inside --------------------------------------------------------------------------------------------------
    def _check(self, at: int) -> None:
        if at < self._first or at > self.frame_count:
            raise NotFound("The events after that one are not held.", param="last-event-id")

    def _part(self, at: int) -> list[bytes]:
        part: list[bytes] = []
        size = 0
        for frame in itertools.islice(self._frames, at - self._first, None):
            size += len(frame)
            if part and size > PART_BYTES:
                break
            part.append(frame)
        return part

    async def _make_room(self, size: int) -> None:
        while self._held and (self._held + size > self._limit or self._room.used + size > self._room.limit):
            if self._first < self._delivered:
                gone = len(self._frames.popleft()) + _FRAME_BYTES
                self._first += 1
                self._held -= gone
                self._room.used -= gone
            else:
                await self._next_change()
        self._held += size
        self._room.used += size

    def _mark(self) -> None:
        while self._marks and self._marks[0][0] <= self._delivered:
            self._marks.popleft()[1]()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self) -> None:
        await self._changed.wait()
