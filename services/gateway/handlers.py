"""The generation endpoints: parse, validate, start, answer. Thin; the work is in the modules it calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from services.common.admission_types import KeyRecord
from services.common.clock import Clock
from services.common.errors import DeadlineExceeded, InvalidRequest, PayloadTooLarge, Unsupported
from services.gateway.answering import Answering, until_disconnect
from services.gateway.generation import Generator
from services.gateway.json_body import decode_body
from services.gateway.limits import Limits
from services.gateway.openai_answer import AnswerFacts, ChatShape, CompletionShape, Shape
from services.gateway.openai_draft import chat_draft, completion_draft
from services.gateway.openai_types import ChatRequest, CompletionRequest, GenerationBody
from services.gateway.request_draft import RequestDraft
from services.gateway.validation import Validator

BodyT = TypeVar("BodyT", bound=GenerationBody)


class GenerationEndpoint:
    """An ASGI endpoint for one body type; the key is in the scope's state."""

    def __init__(
        self,
        body_type: type[BodyT],
        draft_of: Callable[[BodyT], RequestDraft],
        shape_of: Callable[[AnswerFacts], Shape],
        generator: Generator,
        validator: Validator,
        clock: Clock,
    ) -> None:
        self._body_type = body_type
        self._draft_of = draft_of
        self._shape_of = shape_of
        self._generator = generator
        self._validator = validator
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises MillraceError before anything was sent."""
        request = Request(scope, receive)
        try:
            raw = await read_body(request, self._validator.limits)
        except ClientDisconnect:
            return
        body = decode_body(raw, self._body_type, self._validator.limits)
        await until_disconnect(receive, self._answer(scope["state"]["key"], body, send))

    async def _answer(self, key: KeyRecord, body: GenerationBody, send: Send) -> None:
        valid = await self._validator.validate(key, self._draft_of(body))  # type: ignore[arg-type]
        generation = await self._generator.start(key, valid)
        facts = AnswerFacts(generation.request_id, int(self._clock.wall()), valid)
        headers = [
            (b"x-request-id", generation.request_id.encode()),
            (b"x-millrace-model-version", valid.model.card.model.version.encode()),
        ]
        answering = Answering(generation, valid, self._shape_of(facts), send, headers=headers)
        options = body.stream_options
        if body.stream:
            await answering.stream(
                include_usage=bool(options is not None and options.include_usage),
                continuous_usage=bool(options is not None and options.continuous_usage_stats),
            )
        else:
            await answering.whole()


def chat_endpoint(generator: Generator, validator: Validator, clock: Clock) -> GenerationEndpoint:
    """`POST /v1/chat/completions`."""
    return GenerationEndpoint(ChatRequest, chat_draft, ChatShape, generator, validator, clock)


def completion_endpoint(generator: Generator, validator: Validator, clock: Clock) -> GenerationEndpoint:
    """`POST /v1/completions`."""
    return GenerationEndpoint(CompletionRequest, completion_draft, CompletionShape, generator, validator, clock)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, bounded in size and time. Raises PayloadTooLarge, InvalidRequest, Unsupported."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Unsupported("Compressed bodies are not accepted.", param="content-encoding")
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()):
        raise InvalidRequest("`content-length` is not a number.", param="content-length")
    too_large = PayloadTooLarge(f"The body is larger than {limits.body_bytes} bytes.")
    if len(declared) > 12 or int(declared) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise DeadlineExceeded(f"The body did not arrive within {limits.body_timeout_s:g} s.") from None
    return bytes(body)
