"""One connection that carries many callers' commands: what waits goes out in one write, replies come back in order.

For short commands that may be sent twice; blocking ones have connections of their own. Used by the script runner.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import hiredis
import redis.asyncio as aioredis
from redis import exceptions

REPLY_TIMEOUT_S = 5.0
BATCH = 64
# Waits before a batch whose connection broke is sent again.
_BACKOFF_S = (0.02, 0.1)
_BROKEN = (exceptions.ConnectionError, exceptions.TimeoutError)

Arg = str | bytes | int | float


@dataclasses.dataclass(slots=True)
class _Sent:
    """A command and who waits for its reply."""

    packed: bytes
    reply: asyncio.Future[Any]


class RedisPipeline:
    """Sends what callers ask for, at most `BATCH` commands at a time and one batch after the other.

    A caller that is cancelled leaves its command in flight. The connection is the pool's: closing the client ends it.
    """

    def __init__(self, redis: aioredis.Redis) -> None:
        self._pool: Any = redis.connection_pool
        self._connection: Any = None
        self._waiting: list[_Sent] = []
        self._sending: asyncio.Task[None] | None = None

    async def execute(self, command: Sequence[Arg]) -> Any:
        """The reply. Raises what redis-py raises: ResponseError, or ConnectionError and TimeoutError after two more
        tries."""
        loop = asyncio.get_running_loop()
        # The stub takes a tuple of one element.
        packed = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]
        sent = _Sent(packed, loop.create_future())
        self._waiting.append(sent)
        if self._sending is None or self._sending.done():
            self._sending = loop.create_task(self._send_waiting(), name="redis-pipeline")
        return await sent.reply

    async def _send_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            try:
                await self._send(batch)
            except Exception as error:
                for sent in _unanswered(batch):
                    sent.reply.set_exception(error)
            except asyncio.CancelledError:
                for sent in (*batch, *self._waiting):
                    sent.reply.cancel()
                self._waiting = []
                raise

    async def _send(self, batch: Sequence[_Sent]) -> None:
        for wait_s in (*_BACKOFF_S, None):
            try:
                await self._exchange(_unanswered(batch))
                return
            except _BROKEN:
                if wait_s is None:
                    raise
                await asyncio.sleep(wait_s)

    async def _exchange(self, batch: Sequence[_Sent]) -> None:
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await self._write_and_read(batch)
        except BaseException as error:
            # A reply may be on its way: nobody must take it for his own.
            if self._connection is not None:
                await self._connection.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise exceptions.TimeoutError("Redis does not answer.") from error
            raise

    async def _write_and_read(self, batch: Sequence[_Sent]) -> None:
        if self._connection is None:
            self._connection = await self._pool.get_connection()
            # One limit of time for a whole batch, above, not one for each reply.
            self._connection.socket_timeout = None
        connection = self._connection
        await connection.send_packed_command(b"".join([sent.packed for sent in batch]))
        for sent in batch:
            try:
                reply = await connection.read_response(timeout=math.inf)
            except exceptions.ResponseError as error:
                if not sent.reply.done():
                    sent.reply.set_exception(error)
                continue
            if not sent.reply.done():
                sent.reply.set_result(reply)


def _unanswered(batch: Sequence[_Sent]) -> list[_Sent]:
    return [sent for sent in batch if not sent.reply.done()]
