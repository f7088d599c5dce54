"""The generation endpoints: parse, validate, start, answer. Thin; the work is in the modules it calls."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from services.common.admission_types import KeyRecord
from services.common.errors import DeadlineExceeded, InvalidRequest, PayloadTooLarge, Unsupported
from services.gateway.answer_sink import ClientSink, Sink, open_now, while_open
from services.gateway.answering import Answering, until_disconnect
from services.gateway.come_back import parse_come_back, parse_last_event
from services.gateway.front_parts import FrontParts
from services.gateway.generation import Generation, ValidRequest
from services.gateway.json_body import decode_body
from services.gateway.limits import Limits
from services.gateway.openai_answer import AnswerFacts, ChatShape, CompletionShape, Shape
from services.gateway.openai_draft import chat_draft, completion_draft
from services.gateway.openai_types import ChatRequest, CompletionRequest, GenerationBody
from services.gateway.request_draft import SESSION, RequestDraft
from services.gateway.resumable import Job, ResumableAnswers
from services.gateway.validation import Validator

BodyT = TypeVar("BodyT", bound=GenerationBody)


class GenerationEndpoint:
    """An ASGI endpoint for one body type; the key is in the scope's state."""

    def __init__(
        self,
        body_type: type[BodyT],
        draft_of: Callable[[BodyT], RequestDraft],
        shape_of: Callable[[AnswerFacts], Shape],
        parts: FrontParts,
        validator: Validator,
    ) -> None:
        self._body_type = body_type
        self._draft_of = draft_of
        self._shape_of = shape_of
        self._parts = parts
        self._validator = validator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises MillraceError before anything was sent."""
        request = Request(scope, receive)
        try:
            raw = await read_body(request, self._validator.limits)
        except ClientDisconnect:
            return
        key = scope["state"]["key"]
        body = decode_body(raw, self._body_type, self._validator.limits)
        job = _Job(self, key, body, request.headers.get(SESSION, ""))
        await serve(self._parts.answers, (scope, receive, send), raw, job, stream=bool(body.stream))

    async def validate(self, key: KeyRecord, body: GenerationBody, session: str = "") -> ValidRequest:
        """The one validator. Raises MillraceError."""
        draft = self._draft_of(body)  # type: ignore[arg-type]
        return await self._validator.validate(key, dataclasses.replace(draft, session=session or draft.session))

    async def begin(self, key: KeyRecord, body: GenerationBody, valid: ValidRequest) -> AnswerRun:
        """Start the generation. Raises a MillraceError of limits, queue or store."""
        generation = await self._parts.generator.start(key, valid)
        facts = AnswerFacts(generation, int(self._parts.clock.wall()))
        options = body.stream_options
        delivery = Delivery(
            stream=bool(body.stream),
            include_usage=bool(options is not None and options.include_usage),
            continuous_usage=bool(options is not None and options.continuous_usage_stats),
        )
        return AnswerRun(generation, self._shape_of(facts), delivery)


class _Job:
    """One request of an endpoint."""

    def __init__(self, endpoint: GenerationEndpoint, key: KeyRecord, body: GenerationBody, session: str) -> None:
        self._endpoint = endpoint
        self._key = key
        self._body = body
        self._session = session
        self._valid: ValidRequest | None = None

    async def validate(self) -> None:
        self._valid = await self._endpoint.validate(self._key, self._body, self._session)

    async def begin(self) -> AnswerRun:
        assert self._valid is not None
        return await self._endpoint.begin(self._key, self._body, self._valid)


async def serve(
    answers: ResumableAnswers, asgi: tuple[Scope, Receive, Send], raw: bytes, job: Job, *, stream: bool
) -> None:
    """Answer one request until its client goes away, or longer where the client asked for it. `raw` is its body."""
    scope, receive, _ = asgi
    send = while_open(scope, asgi[2])
    ask = parse_come_back(scope["headers"], scope["path"], raw, stream=stream)

    async def once() -> None:
        await job.validate()
        await (await job.begin()).write(ClientSink(send, open_now(scope)))

    tenant = scope["state"]["key"].tenant
    await until_disconnect(receive, once() if ask is None else answers.answer(tenant, ask, job, send))


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """How a client wants its answer."""

    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False


class AnswerRun:
    """A generation under way, to be written once, through what `wrap` makes of the sink."""

    def __init__(
        self,
        generation: Generation,
        shape: Shape,
        delivery: Delivery,
        *,
        wrap: Callable[[Sink], Sink] = lambda sink: sink,
    ) -> None:
        self.request_id = generation.request_id
        self.timeout_s = generation.request.timeout_s
        self._generation = generation
        self._shape = shape
        self._delivery = delivery
        self._wrap = wrap

    async def write(self, sink: Sink) -> None:
        """Write the whole answer and end the generation."""
        headers = [(b"x-request-id", self.request_id.encode())]
        answering = Answering(self._generation, self._shape, self._wrap(sink), headers=headers)
        wanted = self._delivery
        if wanted.stream:
            await answering.stream(include_usage=wanted.include_usage, continuous_usage=wanted.continuous_usage)
        else:
            await answering.whole()


class StreamEndpoint:
    """`GET /v1/streams/{request_id}`: a resumable stream from its start, or after `Last-Event-ID`."""

    def __init__(self, answers: ResumableAnswers) -> None:
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises NotFound for a stream that is not held, or is another tenant's."""
        request = Request(scope, receive)
        authorization = request.headers.get("authorization", "")
        tenant, request_id = scope["state"]["key"].tenant, request.path_params["request_id"]
        last_event = parse_last_event(scope["headers"])
        work = self._answers.resume(tenant, request_id, last_event, authorization, send)
        await until_disconnect(receive, work)


def chat_endpoint(parts: FrontParts, validator: Validator) -> GenerationEndpoint:
    """`POST /v1/chat/completions`."""
    return GenerationEndpoint(ChatRequest, chat_draft, ChatShape, parts, validator)


def completion_endpoint(parts: FrontParts, validator: Validator) -> GenerationEndpoint:
    """`POST /v1/completions`."""
    return GenerationEndpoint(CompletionRequest, completion_draft, CompletionShape, parts, validator)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, bounded in size and time. Raises PayloadTooLarge, InvalidRequest, Unsupported."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Unsupported("Compressed bodies are not accepted.", param="content-encoding")
    declared = request.headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()):
        raise InvalidRequest("`content-length` is not a number.", param="content-length")
    if len(declared) > 12 or int(declared) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise _too_large(limits)
    except TimeoutError:
        raise DeadlineExceeded(f"The body did not arrive within {limits.body_timeout_s:g} s.") from None
    return bytes(body)


def _too_large(limits: Limits) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than {limits.body_bytes} bytes.")
