"""Where an answer is written: straight to the client here, into a log that clients read in answer_log.py.

Owns the order "written, then counted as delivered" and the patience with a client that reads too slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, TypeVar

from starlette.types import Message, Scope, Send

from services.common.errors import SlowReader

SLOW_READER_S = 30.0
STATUS_HELD_S = 10.0
PING_S = 15.0
PING = b": ping\n\n"
Headers = Sequence[tuple[bytes, bytes]]
T = TypeVar("T")


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
    """The one client, over ASGI."""

    def __init__(self, send: Send) -> None:
        self._send = send

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

    async def ping(self) -> None:
        """An SSE comment."""
        await self.write([PING])

    async def completed(self) -> None:
        """Every write was delivered."""

    async def flushed(self) -> None:
        """Every write was delivered."""


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


async def paced(source: AsyncGenerator[T, None], first_s: float) -> AsyncGenerator[T | None, None]:
    """Items of `source`, and None whenever nothing came for `first_s`, later 15 s: then the client must hear something.

    Closes `source`. The next item is asked for only when this generator is resumed.
    """
    pending: asyncio.Future[T] | None = None
    wait_s = first_s
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(source))
            done, _ = await asyncio.wait({pending}, timeout=wait_s)
            wait_s = PING_S
            if not done:
                yield None
                continue
            try:
                item = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield item
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await source.aclose()
