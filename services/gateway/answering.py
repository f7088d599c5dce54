"""Runs one generation for an HTTP client: streamed as SSE or whole, watched for the client going away.

The status is held back until the first token or 10 s, so that refusals stay real statuses. A terminal state is decided
by what was written: a socket closed after the finish of every choice is `completed`, before it `cancelled`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog
from millrace.common.v1 import common_pb2
from starlette.types import Receive

from services.common.errors import Cancelled, MillraceError, SlowReader
from services.gateway.answer_sink import STATUS_HELD_S, Headers, Sink, pinging
from services.gateway.generation import Generation
from services.gateway.http_errors import as_millrace, error_body, error_headers
from services.gateway.openai_answer import Json, Shape, Usage
from services.gateway.text_stream import TextDelta, TextStream, text_deltas

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it as soon as the client is gone. The body must have been read."""

    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="until-disconnect")
    try:
        await work
    except asyncio.CancelledError:
        # Our own cancellation ends here; another's goes on, also where both came.
        if not left or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()


class Answering:
    """One answer under way."""

    def __init__(
        self,
        generation: Generation,
        shape: Shape,
        sink: Sink,
        *,
        headers: Headers,
    ) -> None:
        self._generation = generation
        self._shape = shape
        self._sink = sink
        self._headers = headers
        self._started = False
        self._all_finishes_written = False
        self._opened: set[int] = set()
        # What came where a frame was read: an error, and what the client did not take at once.
        self._failed: Exception | None = None
        self._late: tuple[list[bytes], Callable[[], None]] | None = None
        self._reasons: dict[int, common_pb2.FinishReason.ValueType] = {}
        self._usage = Usage(0, [0] * generation.request.sampling.choice_count)

    async def whole(self) -> None:
        """Answer once, when every choice has finished."""
        await self._guarded(self._whole)

    async def stream(self, *, include_usage: bool, continuous_usage: bool) -> None:
        """Answer event by event."""
        await self._guarded(lambda: self._stream(include_usage, continuous_usage))

    async def _guarded(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End the generation exactly once, whatever ends the answer."""
        ending = ending_of(Cancelled("The client went away."))
        try:
            await run()
            await self._sink.completed()
            ending = common_pb2.TERMINAL_STATE_COMPLETED, self._reasons[0], ""
        except Exception as caught:
            error = as_millrace(caught)
            if error is not caught:
                structlog.get_logger().error("answer_failed", request_id=self._generation.request_id, exc_info=caught)
            ending = ending_of(error)
            with contextlib.suppress(SlowReader):
                await self._send_error(error)
                await self._sink.flushed()
        except asyncio.CancelledError:
            if self._all_finishes_written:
                ending = common_pb2.TERMINAL_STATE_COMPLETED, self._reasons[0], ""
            raise
        finally:
            await self._generation.finish(*ending)

    async def _whole(self) -> None:
        deltas: list[list[TextDelta]] = [[] for _ in self._usage.choices]
        async with contextlib.aclosing(text_deltas(self._generation)) as coming:
            async for delta in coming:
                self._count(delta)
                deltas[delta.choice].append(delta)
        body = msgspec.json.encode(self._shape.whole(deltas, self._usage))
        await self._start(200, [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())])

        def delivered() -> None:
            for choice, count in enumerate(self._usage.choices):
                self._generation.mark_delivered(choice, count, self._usage.reasoning.get(choice, 0))
            self._all_finishes_written = True

        await self._sink.write([body], delivered, more=False)

    async def _stream(self, include_usage: bool, continuous_usage: bool) -> None:
        texts = TextStream(self._generation)
        blank: Json = {"usage": None} if include_usage else {}

        def frames(delta: TextDelta) -> list[bytes]:
            self._count(delta)
            extra: Json = {"usage": self._usage.as_json()} if continuous_usage else blank
            return [self._shape.event({**chunk, **extra}) for chunk in self._chunks(delta)]

        async with pinging(self._ping, STATUS_HELD_S) as heard:

            def write_what_came() -> bool:
                """Called where a frame of the worker is read: tokens that the client takes at once wake no task."""
                try:
                    while self._started and (delta := texts.take()) is not None:
                        heard()
                        made, delivered = frames(delta), self._delivers(delta)
                        if not self._sink.write_now(made, delivered):
                            self._late = made, delivered
                            return False
                except Exception as error:
                    self._failed = error
                    return False
                return self._started and not texts.over

            while not texts.over:
                delta = texts.take()
                if delta is not None:
                    heard()
                    await self._start(200, _STREAM_HEADERS)
                    await self._sink.write(frames(delta), self._delivers(delta))
                elif not texts.over:
                    await self._generation.more(write_what_came)
                    await self._write_late()
        closing = self._shape.closing(self._usage, include_usage=include_usage)
        tail = [*(self._shape.event(chunk) for chunk in closing), self._shape.done]
        await self._sink.write([event for event in tail if event], more=False)

    async def _write_late(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._late is not None:
            (made, delivered), self._late = self._late, None
            await self._sink.write(made, delivered)

    def _chunks(self, delta: TextDelta) -> list[Json]:
        if delta.choice in self._opened:
            return self._shape.chunks(delta)
        self._opened.add(delta.choice)
        return [*self._shape.opening(delta.choice), *self._shape.chunks(delta)]

    async def _ping(self) -> None:
        await self._start(200, _STREAM_HEADERS)
        await self._sink.ping()

    def _delivers(self, delta: TextDelta) -> Callable[[], None]:
        last = len(self._reasons) == len(self._usage.choices)

        def delivered() -> None:
            self._generation.mark_delivered(delta.choice, delta.delivered, delta.reasoning_delivered)
            self._all_finishes_written = last

        return delivered

    def _count(self, delta: TextDelta) -> None:
        self._usage.prompt = len(self._generation.request.prompt_token_ids)
        self._usage.cached = self._generation.cached_token_count
        self._usage.choices[delta.choice] = delta.delivered
        self._usage.reasoning[delta.choice] = delta.reasoning_delivered
        if delta.finish_reason is not None:
            self._reasons[delta.choice] = delta.finish_reason

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if not self._started:
            self._started = True
            position = str(self._generation.queue_position).encode()
            ref = self._generation.request.model.card.model
            own = [
                (b"x-millrace-model-version", ref.version.encode()),
                (b"x-millrace-manifest-digest", ref.manifest_digest.hex().encode()),
                (b"x-millrace-queue-position", position),
            ]
            every = [*self._headers, *headers, *own]
            await self._sink.start(status, every)

    async def _send_error(self, error: MillraceError) -> None:
        if isinstance(error, SlowReader):
            return
        body = error_body(error, self._generation.request_id)
        if self._started:
            await self._sink.write([b"data: " + body + b"\n\n"], more=False)
            return
        await self._start(error.row.http_status, error_headers(error))
        await self._sink.write([body], more=False)


def ending_of(
    error: MillraceError,
) -> tuple[common_pb2.TerminalState.ValueType, common_pb2.FinishReason.ValueType, str]:
    """Terminal state, finish reason and error reason of a request that ended with an error."""
    reason = error.row.reason
    if reason == "DEADLINE_EXCEEDED":
        return common_pb2.TERMINAL_STATE_EXPIRED, common_pb2.FINISH_REASON_EXPIRED, reason
    if reason in ("CANCELLED", "SLOW_READER"):
        return common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED, reason
    return common_pb2.TERMINAL_STATE_FAILED, common_pb2.FINISH_REASON_ERROR, reason
