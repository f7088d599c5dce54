"""`POST /v1/embeddings`: the body's inputs as drafts, the vectors as OpenAI has them. Called by the HTTP door."""

from __future__ import annotations

import base64
import contextlib
import struct
from collections.abc import Sequence

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from services.common.admission_types import KeyRecord
from services.common.errors import InvalidRequest, SlowReader, Unsupported
from services.gateway.answer_sink import Sink
from services.gateway.api_types import (
    EmbeddingAnswer,
    EmbeddingDetails,
    EmbeddingObject,
    EmbeddingRequest,
    EmbeddingUsage,
)
from services.gateway.embedding import Embedded, Embedder, embedding_draft
from services.gateway.front_parts import FrontParts
from services.gateway.generation import ValidRequest
from services.gateway.handlers import read_body, serve
from services.gateway.http_errors import as_millrace, refusal
from services.gateway.json_body import decode_body
from services.gateway.request_draft import TextPrompt, TokenPrompt


class EmbeddingEndpoint:
    """ASGI: answers with a vector for each input; the key is in the scope's state."""

    def __init__(self, parts: FrontParts) -> None:
        self._embedder = Embedder(parts.generator, parts.validator)
        self._limits = parts.validator.limits
        self._answers = parts.answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises MillraceError before anything was sent."""
        try:
            raw = await read_body(Request(scope, receive), self._limits)
        except ClientDisconnect:
            return
        body = decode_body(raw, EmbeddingRequest, self._limits)
        job = self.job(scope["state"]["key"], body)
        await serve(self._answers, (scope, receive, send), raw, job, stream=False)

    def job(self, key: KeyRecord, body: EmbeddingRequest) -> EmbeddingJob:
        """One request, not yet validated."""
        return EmbeddingJob(self._embedder, key, body)


class EmbeddingJob:
    """One request that may start a run."""

    def __init__(self, embedder: Embedder, key: KeyRecord, body: EmbeddingRequest) -> None:
        self._embedder = embedder
        self._key = key
        self._body = body
        self._requests: list[ValidRequest] = []

    async def validate(self) -> None:
        """Raises Unsupported, and what the validator raises."""
        body = self._body
        if body.dimensions is not None:
            message = "`dimensions` is not supported: this model's vectors have one size."
            raise Unsupported(message, param="dimensions")
        drafts = [
            embedding_draft(body.model, prompt, user=body.user or "", batch=body.priority == "batch", timeout_s=None)
            for prompt in _prompts(body.input)
        ]
        self._requests = await self._embedder.validate(self._key, drafts)

    async def begin(self) -> EmbeddingRun:
        """A run whose inputs are admitted as it is written."""
        return EmbeddingRun(self._embedder, self._key, self._requests, self._body.encoding_format)


class EmbeddingRun:
    """Validated inputs whose answer is to be written once. It is named by its first input."""

    def __init__(
        self, embedder: Embedder, key: KeyRecord, requests: Sequence[ValidRequest], encoding: str | None
    ) -> None:
        self.request_id = requests[0].request_id
        self.timeout_s = requests[0].timeout_s
        self._embedder = embedder
        self._key = key
        self._requests = requests
        self._encoding = encoding

    async def write(self, sink: Sink) -> None:
        """Embed, write the answer or the error, and end every input."""
        started = False
        try:
            async with self._embedder.run(self._key, self._requests) as found:
                body = msgspec.json.encode(_answer(found, self._encoding))
                own = [(b"x-request-id", found[0].request_id.encode()), (b"content-length", str(len(body)).encode())]
                started = True
                await sink.start(200, [(b"content-type", b"application/json"), *own])
                await sink.write([body], more=False)
                await sink.completed()
        except Exception as caught:
            error = as_millrace(caught)
            if error is not caught:
                structlog.get_logger().error("answer_failed", request_id=self.request_id, exc_info=caught)
            if not started:
                headers, body = refusal(error, self.request_id)
                await sink.start(error.row.http_status, headers)
                with contextlib.suppress(SlowReader):
                    await sink.write([body], more=False)
                    await sink.flushed()


def floats(vector: bytes) -> tuple[float, ...]:
    """The values of little-endian float32."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def _prompts(sent: str | list[str | int | list[int]]) -> Sequence[TextPrompt | TokenPrompt]:
    if isinstance(sent, str):
        return [TextPrompt(sent, "input")]
    ids = [item for item in sent if isinstance(item, int)]
    if ids and len(ids) == len(sent):
        return [TokenPrompt(tuple(ids), "input")]
    prompts: list[TextPrompt | TokenPrompt] = []
    for index, item in enumerate(sent):
        field = f"input[{index}]"
        if isinstance(item, int):
            raise InvalidRequest(f"`{field}` is a number among other inputs.", param=field)
        prompts.append(TextPrompt(item, field) if isinstance(item, str) else TokenPrompt(tuple(item), field))
    return prompts


def _answer(found: Sequence[Embedded], encoding: str | None) -> EmbeddingAnswer:
    model = found[0].request.model.card.model
    tokens = sum(len(each.request.prompt_token_ids) for each in found)
    return EmbeddingAnswer(
        data=[
            EmbeddingObject(
                index=index,
                embedding=base64.b64encode(each.vector).decode() if encoding == "base64" else list(floats(each.vector)),
            )
            for index, each in enumerate(found)
        ],
        model=model.model,
        usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        millrace=EmbeddingDetails(version=model.version, request_ids=[each.request_id for each in found]),
    )
