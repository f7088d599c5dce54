"""One line of a batch: read, answered by the path that its endpoint takes after parsing, and told as a result.

An answer is recorded before it counts as delivered, so a line that is run again was never billed. Called by the runner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from starlette.types import Message

from services.common.admission_types import KeyRecord
from services.common.errors import Cancelled, InvalidRequest, MillraceError, Retry, error_classes
from services.gateway.answer_sink import ClientSink
from services.gateway.api_types import EmbeddingRequest
from services.gateway.batch_types import BatchLine, LineError, LineResponse, LineResult
from services.gateway.embedding_endpoint import EmbeddingEndpoint
from services.gateway.front_parts import FrontParts
from services.gateway.handlers import chat_endpoint, completion_endpoint
from services.gateway.http_errors import as_millrace, error_body
from services.gateway.json_body import decode_body
from services.gateway.limits import Limits
from services.gateway.openai_types import ChatRequest, CompletionRequest

# Keeps an answer; False when the line has one.
Keep = Callable[[LineResponse], Awaitable[bool]]


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A line that got no answer, and whether another try may get one."""

    response: LineResponse
    retry: Retry


def parse_line(raw: bytes, endpoint: str, limits: Limits) -> BatchLine:
    """The request of a line. Raises InvalidRequest."""
    line = decode_body(raw, BatchLine, limits)
    if len(line.custom_id.encode()) > limits.custom_id_bytes:
        raise InvalidRequest(f"`custom_id` takes at most {limits.custom_id_bytes} bytes.", param="custom_id")
    if line.url != endpoint:
        raise InvalidRequest(f"`url` is not the batch's endpoint, {endpoint}.", param="url")
    return line


def custom_id_of(raw: bytes) -> str | None:
    """What a line that is no request calls itself, where that can be read."""
    try:
        return msgspec.json.decode(raw, type=_Named).custom_id
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class _Named(msgspec.Struct):
    custom_id: str


def result_of(
    batch_id: str, number: int, custom_id: str | None, *, response: LineResponse | None, error: MillraceError | None
) -> bytes:
    """The line of an output or error file."""
    told = None if error is None else LineError(error.row.reason, error.message)
    name = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    return msgspec.json.encode(LineResult(name, custom_id, response, told)) + b"\n"


class LineDoor:
    """Answers lines inside this gateway."""

    def __init__(self, parts: FrontParts) -> None:
        validator = parts.validator
        self.limits = validator.limits
        self._chat = chat_endpoint(parts, validator)
        self._completion = completion_endpoint(parts, validator)
        self._embeddings = EmbeddingEndpoint(parts)

    async def answer(self, key: KeyRecord, line: BatchLine, keep: Keep) -> Failure | None:
        """Run the line to its end; None when its answer is kept."""
        caught = _Caught(keep)
        try:
            await self._serve(key, line, caught)
        except Exception as failed:
            error = as_millrace(failed)
            if error is not failed:
                structlog.get_logger().error("batch_line_failed", exc_info=failed)
            caught.fail(error)
        return caught.failure

    async def _serve(self, key: KeyRecord, line: BatchLine, caught: _Caught) -> None:
        raw = bytes(line.body)
        if line.url == "/v1/embeddings":
            asked = decode_body(raw, EmbeddingRequest, self.limits)
            asked.priority = "batch"
            job = self._embeddings.job(key, asked)
            await job.validate()
            await (await job.begin()).write(ClientSink(caught.send))
            return
        chat = line.url == "/v1/chat/completions"
        endpoint, body = (
            (self._chat, decode_body(raw, ChatRequest, self.limits))
            if chat
            else (self._completion, decode_body(raw, CompletionRequest, self.limits))
        )
        if body.stream:
            raise InvalidRequest("`stream` is not possible in a batch.", param="stream")
        body.priority = "batch"
        run = await endpoint.begin(key, body, await endpoint.validate(key, body))
        await run.write(ClientSink(caught.send))


class _Caught:
    """The client of a line: its answer goes to `keep`."""

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body = b""
        self._over = False
        self._answered = False
        self.failure: Failure | None = None

    async def send(self, message: Message) -> None:
        """ASGI. Raises what `keep` raises, and Cancelled for a line that has an answer already: it is not billed."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
            return
        self._body += message["body"]
        if message["more_body"] or self._over:
            return
        self._over = True
        request_id = self._headers.get(b"x-request-id", b"").decode()
        response = LineResponse(self._status, request_id, msgspec.Raw(self._body))
        if self._status != 200:
            reason = self._headers[b"x-millrace-reason"].decode()
            self.failure = Failure(response, error_classes()[reason].row.retry)
            return
        try:
            first = await self._keep(response)
        except MillraceError as error:
            # Who writes the answer would tell a client; here nobody else hears of it.
            self.fail(error)
            raise
        self._answered = True
        if not first:
            raise Cancelled("The line has an answer.")

    def fail(self, error: MillraceError) -> None:
        """The line ended with an error, unless it is known how it ended."""
        if not self._answered and self.failure is None:
            body = msgspec.Raw(error_body(error))
            self.failure = Failure(LineResponse(error.row.http_status, "", body), error.row.retry)
