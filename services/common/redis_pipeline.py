"""One connection that carries many callers' commands: what waits goes out in one write, replies come back in order.

For short commands that may be sent twice; blocking ones have connections of their own. redis-py opens the connection
and finds the master; from then on the transport is this module's, and a reply goes from the socket to its caller with
no task in between. Used by the script runner.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import redis.asyncio as aioredis
from redis import exceptions

REPLY_TIMEOUT_S = 5.0
BATCH = 64
# Waits before commands whose connection broke are sent again.
_BACKOFF_S = (0.02, 0.1)
_BROKEN = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError)

Arg = str | bytes | int | float


@dataclasses.dataclass(slots=True)
class _Sent:
    """A command, who waits for its reply, and how many connections broke under it."""

    packed: bytes
    reply: asyncio.Future[Any]
    breaks: int = 0


class RedisPipeline:
    """Sends what callers ask for, at most `BATCH` commands at a time and one batch after the other.

    A caller that is cancelled leaves its command in flight. The connection is the pool's: closing the client ends it.
    """

    def __init__(self, redis: aioredis.Redis) -> None:
        self._pool: Any = redis.connection_pool
        self._connection: Any = None
        self._line: _Line | None = None
        # What waits for a connection.
        self._waiting: list[_Sent] = []
        self._opening: asyncio.Task[None] | None = None

    async def execute(self, command: Sequence[Arg]) -> Any:
        """The reply. Raises what redis-py raises: ResponseError, or ConnectionError and TimeoutError after two more
        tries."""
        loop = asyncio.get_running_loop()
        # The stub takes a tuple of one element.
        packed = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]
        sent = _Sent(packed, loop.create_future())
        if self._line is not None:
            self._line.send(sent)
        else:
            self._waiting.append(sent)
            self._open_soon()
        return await sent.reply

    def _open_soon(self) -> None:
        if self._waiting and (self._opening is None or self._opening.done()):
            self._opening = asyncio.get_running_loop().create_task(self._open(), name="redis-pipeline")

    async def _open(self) -> None:
        """A connection for what waits, unless too many broke under all of it."""
        while self._waiting and self._line is None:
            try:
                breaks = max(sent.breaks for sent in self._waiting)
                if breaks:
                    await asyncio.sleep(_BACKOFF_S[breaks - 1])
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    line = await self._connected()
            except TimeoutError:
                self._broke(self._take_waiting(), exceptions.TimeoutError("Redis does not answer."))
            except Exception as error:
                self._broke(self._take_waiting(), error)
            except asyncio.CancelledError:
                for sent in self._take_waiting():
                    sent.reply.cancel()
                raise
            else:
                self._line = line
                for sent in self._take_waiting():
                    line.send(sent)

    async def _connected(self) -> _Line:
        if self._connection is None:
            self._connection = await self._pool.get_connection()
        else:
            await self._connection.disconnect(nowait=True)
            await self._connection.connect()
        return _Line(self._connection, self._lost)

    def _lost(self, line: _Line, unanswered: list[_Sent], error: Exception) -> None:
        if self._line is line:
            self._line = None
        self._broke(unanswered, error)
        self._open_soon()

    def _broke(self, unanswered: list[_Sent], error: Exception) -> None:
        """What may be tried again goes first in line; the rest gets the error."""
        again = []
        for sent in unanswered:
            if sent.reply.done():
                continue
            if sent.breaks >= len(_BACKOFF_S) or not isinstance(error, _BROKEN):
                sent.reply.set_exception(error)
            else:
                sent.breaks += 1
                again.append(sent)
        self._waiting[:0] = again

    def _take_waiting(self) -> list[_Sent]:
        taken, self._waiting = [sent for sent in self._waiting if not sent.reply.done()], []
        return taken


class _Line(asyncio.Protocol):
    """A connection that redis-py has opened, from now on read here. `lost` is told once, with what had no reply."""

    def __init__(self, connection: Any, lost: Callable[[_Line, list[_Sent], Exception], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: Any = connection._writer.transport
        # redis-py waits for its end when the client is closed.
        self._before: Any = self._transport.get_protocol()
        self._lost: Callable[[_Line, list[_Sent], Exception], None] | None = lost
        self._reader = hiredis.Reader(
            protocolError=exceptions.InvalidResponse, replyError=connection._parser.parse_error, notEnoughData=_MORE
        )
        self._unsent: collections.deque[_Sent] = collections.deque()
        self._sent: collections.deque[_Sent] = collections.deque()
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._transport.set_protocol(self)

    def send(self, sent: _Sent) -> None:
        """At once; or, while replies are outstanding, once they have come."""
        self._unsent.append(sent)
        if not self._sent:
            self._write()

    def data_received(self, data: bytes) -> None:
        """Replies, or parts of one."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _MORE:
                if isinstance(reply, exceptions.ReadOnlyError):
                    # The master of before: the next connection finds the present one.
                    self._end(reply)
                    return
                self._hand(reply)
        except (exceptions.InvalidResponse, IndexError) as error:
            self._end(exceptions.ConnectionError(f"Redis answers what was not asked: {error}"))
        if not self._sent and self._unsent:
            self._write()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side, or the client, closed it."""
        self._before.connection_lost(exc)
        self._end(exceptions.ConnectionError("Redis closed the connection."))

    def _hand(self, reply: Any) -> None:
        waiter = self._sent.popleft().reply
        if waiter.done():
            return
        if isinstance(reply, Exception):
            waiter.set_exception(reply)
        else:
            waiter.set_result(reply)

    def _write(self) -> None:
        if self._lost is None:
            return
        batch = [self._unsent.popleft() for _ in range(min(BATCH, len(self._unsent)))]
        self._sent.extend(batch)
        self._sent_at = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(REPLY_TIMEOUT_S, self._look)
        self._transport.write(b"".join([sent.packed for sent in batch]))

    def _look(self) -> None:
        """One limit of time for a batch, not one for each reply: looked at each few seconds while there are some."""
        self._timer = None
        if not self._sent:
            return
        left_s = self._sent_at + REPLY_TIMEOUT_S - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._end(exceptions.TimeoutError("Redis does not answer."))

    def _end(self, error: Exception) -> None:
        lost, self._lost = self._lost, None
        if lost is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        # A reply may be on its way: nobody must take it for his own.
        self._transport.abort()
        lost(self, [*self._sent, *self._unsent], error)


_MORE = object()
