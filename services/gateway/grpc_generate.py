"""One gRPC generation as messages: straight to its call, or kept under an `idempotency-key` and read from the log.

Owns the order of messages, when they count as delivered, and how a log keeps them. Called by the gRPC door.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import structlog
from google.rpc import status_pb2
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb

from services.common.errors import Cancelled, NotFound, SlowReader
from services.common.grpc_server import status_of
from services.gateway.answer_log import GRPC_CONTENT, Head
from services.gateway.answer_sink import Sink
from services.gateway.answering import ending_of
from services.gateway.generation import Generation, ValidRequest
from services.gateway.grpc_chat import call_deltas
from services.gateway.http_errors import as_millrace
from services.gateway.resumable import Parts
from services.gateway.text_stream import TextDelta, TextToken, text_deltas
from services.gateway.tokenizer import Tokenizer

# A message in a log: its kind, the bytes of its payload, the payload.
_FRAME = struct.Struct(">BI")
_MESSAGE, _ERROR = 0, 1


class GenerateRun:
    """A generation under way, to be written once. `created` is in Unix seconds."""

    def __init__(self, generation: Generation, created: int) -> None:
        self.request_id = generation.request_id
        self.timeout_s = generation.request.timeout_s
        self._generation = generation
        self._created = created
        self._ending = ending_of(Cancelled("The client went away."))
        count = generation.request.sampling.choice_count
        self._counts, self._reasoned = [0] * count, [0] * count
        self._reasons: dict[int, common_pb2.FinishReason.ValueType] = {}

    async def direct(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The messages, for the one call that waits for them; ends the generation. A closed generator cancels it."""
        try:
            async with contextlib.aclosing(self._messages()) as messages:
                async for message, delivered in messages:
                    yield message
                    # The generator is resumed once the transport has taken the message.
                    delivered()
        except Exception as error:
            self._ending = ending_of(as_millrace(error))
            raise
        finally:
            # A cancelled call leaves by CancelledError or GeneratorExit.
            await self._generation.finish(*self._ending)

    async def write(self, sink: Sink) -> None:
        """Write the whole answer into a log and end the generation."""
        try:
            await sink.start(200, [GRPC_CONTENT])
            async with contextlib.aclosing(self._messages()) as messages:
                async for message, delivered in messages:
                    more = message.WhichOneof("event") != "completed"
                    await sink.write([_frame(_MESSAGE, message.SerializeToString())], delivered, more=more)
            await sink.completed()
        except Exception as caught:
            error = as_millrace(caught)
            if error is not caught:
                structlog.get_logger().error("answer_failed", request_id=self.request_id, exc_info=caught)
            self._ending = ending_of(error)
            with contextlib.suppress(SlowReader):
                await sink.write([_frame(_ERROR, status_of(error).SerializeToString())], more=False)
                await sink.flushed()
        finally:
            await self._generation.finish(*self._ending)

    async def _messages(self) -> AsyncGenerator[tuple[pb.GenerateResponse, Callable[[], None]], None]:
        """Each message, and what to call once it is delivered."""
        valid = self._generation.request
        accepted = pb.GenerateAccepted(
            model=valid.model.card.model, seed=valid.sampling.seed, created_unix_seconds=self._created
        )
        yield pb.GenerateResponse(request_id=self.request_id, accepted=accepted), _nothing
        async with contextlib.aclosing(text_deltas(self._generation)) as deltas:
            async for delta in deltas:
                self._count(delta)
                message = _delta(delta, self._generation.request)
                yield pb.GenerateResponse(request_id=self.request_id, delta=message), self._delivers(delta)
        completed = pb.GenerateCompleted(usage=self._usage(), model=self._generation.request.model.card.model)
        yield pb.GenerateResponse(request_id=self.request_id, completed=completed), _nothing

    def _count(self, delta: TextDelta) -> None:
        self._counts[delta.choice] = delta.delivered
        self._reasoned[delta.choice] = delta.reasoning_delivered
        if delta.finish_reason is not None:
            self._reasons[delta.choice] = delta.finish_reason

    def _delivers(self, delta: TextDelta) -> Callable[[], None]:
        last = len(self._reasons) == len(self._counts)

        def delivered() -> None:
            self._generation.mark_delivered(delta.choice, delta.delivered, delta.reasoning_delivered)
            if last:
                self._ending = common_pb2.TERMINAL_STATE_COMPLETED, self._reasons[0], ""

        return delivered

    def _usage(self) -> common_pb2.TokenUsage:
        return common_pb2.TokenUsage(
            prompt_token_count=len(self._generation.request.prompt_token_ids),
            cached_token_count=self._generation.cached_token_count,
            completion_token_count=sum(self._counts),
            reasoning_token_count=sum(self._reasoned),
        )


class GenerateJob:
    """A request that may start a run."""

    def __init__(
        self,
        validate: Callable[[], Awaitable[ValidRequest]],
        begin: Callable[[ValidRequest], Awaitable[GenerateRun]],
    ) -> None:
        self._validate = validate
        self._begin = begin
        self._valid: ValidRequest | None = None

    async def validate(self) -> None:
        """Raises MillraceError; nothing has begun."""
        self._valid = await self._validate()

    async def begin(self) -> GenerateRun:
        """Start the generation. Raises MillraceError."""
        assert self._valid is not None
        return await self._begin(self._valid)


async def kept_messages(parts: Parts) -> AsyncGenerator[pb.GenerateResponse | status_pb2.Status, None]:
    """The messages of a log, then its error where it has one. Raises NotFound for an answer that was given up."""
    held = bytearray()
    failed: status_pb2.Status | None = None
    completed = False
    async with contextlib.aclosing(parts):
        async for part in parts:
            held += b"" if isinstance(part, Head) else part
            while len(held) >= _FRAME.size:
                kind, size = _FRAME.unpack_from(held)
                if len(held) < _FRAME.size + size:
                    break
                payload = bytes(held[_FRAME.size : _FRAME.size + size])
                del held[: _FRAME.size + size]
                if kind == _ERROR:
                    failed = status_pb2.Status.FromString(payload)
                else:
                    message = pb.GenerateResponse.FromString(payload)
                    completed = message.HasField("completed")
                    yield message
    # After the last part was asked for: only then it counts as delivered, and the run may end.
    if failed is not None:
        yield failed
    elif not completed:
        raise NotFound("That answer was given up.")


def _frame(kind: int, payload: bytes) -> bytes:
    return _FRAME.pack(kind, len(payload)) + payload


def _nothing() -> None:
    pass


def _delta(delta: TextDelta, valid: ValidRequest) -> pb.GenerateDelta:
    tokenizer = valid.model.tokenizer
    return pb.GenerateDelta(
        choice=delta.choice,
        text=delta.text,
        token_ids=[token.token_id for token in delta.tokens],
        logprobs=_logprobs(tokenizer, delta.tokens),
        finish_reason=delta.finish_reason or common_pb2.FINISH_REASON_UNSPECIFIED,
        reasoning=delta.reasoning,
        tool_calls=call_deltas(delta.calls),
    )


def _logprobs(tokenizer: Tokenizer, tokens: Sequence[TextToken]) -> list[pb.TokenLogprob]:
    made = []
    for position in (token.logprobs for token in tokens if token.logprobs is not None):
        raw = tokenizer.token_bytes(position.token.token_id)
        top = [
            pb.AlternativeLogprob(token=t.decode("utf-8", "replace"), token_bytes=t, logprob=alternative.logprob)
            for alternative in position.top
            for t in (tokenizer.token_bytes(alternative.token_id),)
        ]
        text = raw.decode("utf-8", "replace")
        made.append(pb.TokenLogprob(token=text, token_bytes=raw, logprob=position.token.logprob, top=top))
    return made
