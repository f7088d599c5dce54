"""Where an answer is written: straight to the client here, into a log that clients read in answer_log.py.

Owns the order "written, then counted as delivered" and the patience with a client that reads too slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from starlette.types import Message, Scope, Send

from services.common.errors import SlowReader

SLOW_READER_S = 30.0
STATUS_HELD_S = 10.0
PING_S = 15.0
PING = b": ping\n\n"
Headers = Sequence[tuple[bytes, bytes]]


class Sink(Protocol):
    """Takes one answer: `start` once, then frames, the last of them with `more` false."""

    async def start(self, status: int, headers: Headers) -> None:
        """Status and headers."""
        ...

    async def write(
        self, frames: Sequence[bytes], on_delivered: Callable[[], None] | None = None, *, more: bool = True
    ) -> None:
        """Whole SSE events, or a part of a body. `on_delivered` is called once a client's transport took them.

        Raises SlowReader when that takes too long.
        """
        ...

    def write_now(self, frames: Sequence[bytes], on_delivered: Callable[[], None]) -> bool:
        """As `write` where that need not wait; False: nothing was written."""
        ...

    async def ping(self) -> None:
        """Let a waiting client hear something."""
        ...

    async def completed(self) -> None:
        """The answer is whole; return once it counts as delivered."""
        ...

    async def flushed(self) -> None:
        """Return once all that was written is delivered."""
        ...


class ClientSink:
    """The one client, over ASGI. `is_open_now` says whether a write to its connection would return at once."""

    def __init__(self, send: Send, is_open_now: Callable[[], bool] = lambda: False) -> None:
        self._send = send
        self._is_open_now = is_open_now

    async def start(self, status: int, headers: Headers) -> None:
        """Write the head."""
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(
        self, frames: Sequence[bytes], on_delivered: Callable[[], None] | None = None, *, more: bool = True
    ) -> None:
        """Return once the transport took the frames. Raises SlowReader."""
        if frames or not more:
            try:
                async with asyncio.timeout(SLOW_READER_S):
                    await self._send({"type": "http.response.body", "body": b"".join(frames), "more_body": more})
            except TimeoutError:
                raise SlowReader("The client reads too slowly.") from None
        if on_delivered is not None:
            on_delivered()

    def write_now(self, frames: Sequence[bytes], on_delivered: Callable[[], None]) -> bool:
        """Write without a task; False where the transport is full or gone, also where it breaks under the write."""
        if frames:
            if not self._is_open_now():
                return False
            message = {"type": "http.response.body", "body": b"".join(frames), "more_body": True}
            if not _ran_through(self._send(message)):
                return False
        on_delivered()
        return True

    async def ping(self) -> None:
        """An SSE comment."""
        await self.write([PING])

    async def completed(self) -> None:
        """Every write was delivered."""

    async def flushed(self) -> None:
        """Every write was delivered."""


def _ran_through(sending: Awaitable[None]) -> bool:
    """Run what is expected not to wait; what would wait nevertheless, for a client that left, is given up."""
    steps = sending.__await__()
    try:
        next(steps)
    except StopIteration:
        return True
    steps.close()
    return False


def open_now(scope: Scope) -> Callable[[], bool]:
    """Whether a write to the client of a request would go to its connection at once; never, where that is not known."""
    state = scope.get("state", {})
    transport, flow = state.get("transport"), state.get("flow")
    if transport is None or flow is None:
        return lambda: False
    return lambda: not flow.write_paused and not transport.is_closing()


def while_open(scope: Scope, send: Send) -> Send:
    """`send`, which never returns from a write that the client's connection did not take: nothing of it was delivered.

    The disconnect that follows must cancel the writer.
    """
    transport: asyncio.Transport | None = scope.get("state", {}).get("transport")
    if transport is None:
        return send

    async def sending(message: Message) -> None:
        if not transport.is_closing():
            await send(message)
            # The server itself closes after the last write of a connection.
            if not transport.is_closing() or not message.get("more_body", False):
                return
        await asyncio.get_running_loop().create_future()

    return sending


@contextlib.asynccontextmanager
async def pinging(ping: Callable[[], Awaitable[None]], first_s: float) -> AsyncIterator[Callable[[], None]]:
    """Awaits `ping` whenever the block did not call what it is given for `first_s`, later 15 s: then the client must
    hear something. What `ping` raises ends the block."""
    now = asyncio.get_running_loop().time
    silent_since, patience_s = now(), first_s

    def heard() -> None:
        nonlocal silent_since, patience_s
        silent_since, patience_s = now(), PING_S

    async def watch() -> None:
        while True:
            left_s = silent_since + patience_s - now()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                heard()
                await ping()

    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            yield heard
            watching.cancel()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
