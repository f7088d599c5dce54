"""`/v1/responses`: a chat whose turns the platform keeps. Create, get, delete, cancel; called by the HTTP door.

Owns what is stored of a response and when: before the client reads its end, so that the next turn finds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.admission_types import KeyRecord
from services.common.errors import MillraceError, NotFound
from services.gateway.answer_sink import Headers, Sink
from services.gateway.front_parts import FrontParts
from services.gateway.generation import ValidRequest
from services.gateway.handlers import AnswerRun, Delivery, read_body, serve
from services.gateway.json_body import decode_body
from services.gateway.openai_answer import AnswerFacts
from services.gateway.openai_draft import chat_draft
from services.gateway.request_draft import SESSION
from services.gateway.response_store import ResponseStore
from services.gateway.responses_answer import ResponsesShape, response_id
from services.gateway.responses_types import ResponsesRequest, Turn, as_chat, input_turns
from services.gateway.validation import Validator

# A chat's fields, the longer name first.
_OWN_WORDS = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
)
_ID_CHARS = len("resp_") + 26


class StoredResponse(msgspec.Struct, frozen=True):
    """A response and the conversation up to its end, instructions apart."""

    response: msgspec.Raw
    turns: list[Turn]


class ResponsesEndpoint:
    """ASGI for create; Starlette endpoints for the rest."""

    def __init__(self, parts: FrontParts, validator: Validator) -> None:
        self._parts = parts
        self._validator = validator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Create; raises MillraceError before anything was sent."""
        request = Request(scope, receive)
        try:
            raw = await read_body(request, self._validator.limits)
        except ClientDisconnect:
            return
        body = decode_body(raw, ResponsesRequest, self._validator.limits)
        job = _Job(self._parts, self._validator, scope["state"]["key"], body, request.headers.get(SESSION, ""))
        await serve(self._parts.answers, (scope, receive, send), raw, job, stream=bool(body.stream))

    async def get(self, request: Request) -> Response:
        """A stored response. Raises NotFound for another tenant's too."""
        stored = await load(self._parts.responses, request.state.key.tenant, request.path_params["id"])
        return Response(bytes(stored.response), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Forget a response. Raises NotFound."""
        asked = request.path_params["id"]
        if not await self._parts.responses.delete(request.state.key.tenant, asked):
            raise _missing()
        body = {"id": asked, "object": "response", "deleted": True}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """Stop a response that runs; one that has ended is given as it is. Raises NotFound."""
        asked, key = request.path_params["id"], request.state.key
        if await self._parts.responses.get(key.tenant, asked) is not None:
            return await self.get(request)
        if not asked.startswith("resp_"):
            raise _missing()
        cancelled = await self._parts.generator.cancel(key, asked.removeprefix("resp_"))
        body = {"id": asked, "object": "response", "status": "cancelled" if cancelled else "completed", "output": []}
        return Response(msgspec.json.encode(body), media_type="application/json")


async def load(store: ResponseStore, tenant: str, asked: str) -> StoredResponse:
    """A stored response. Raises NotFound, StoreUnavailable."""
    found = await store.get(tenant, asked) if len(asked) == _ID_CHARS else None
    if found is None:
        raise _missing()
    return msgspec.json.decode(found, type=StoredResponse)


def _missing(param: str | None = None) -> NotFound:
    return NotFound("There is no such response.", param=param)


def _in_own_words(error: MillraceError) -> MillraceError:
    """What a chat calls otherwise by its name here: `tools[0].function.name` is `tools[0].name`."""
    sent = error.param or ""
    if sent.startswith(("tools[", "tool_choice.")):
        own = sent.replace(".function", "")
    elif sent.startswith("messages"):
        own = "input"
    else:
        own = next((own + sent.removeprefix(name) for name, own in _OWN_WORDS if sent.startswith(name)), sent)
    if own != sent:
        error.message, error.param = error.message.replace(f"`{sent}`", f"`{own}`"), own
    return error


class _Job:
    """One request to create a response."""

    def __init__(
        self, parts: FrontParts, validator: Validator, key: KeyRecord, body: ResponsesRequest, session: str
    ) -> None:
        self._parts = parts
        self._validator = validator
        self._key = key
        self._body = body
        self._session = session
        self._turns: list[Turn] = []
        self._valid: ValidRequest | None = None

    async def validate(self) -> None:
        """Raises MillraceError; the earlier response must be stored."""
        new = input_turns(self._body)
        earlier: list[Turn] = []
        if self._body.previous_response_id is not None:
            try:
                stored = await load(self._parts.responses, self._key.tenant, self._body.previous_response_id)
            except NotFound:
                raise _missing("previous_response_id") from None
            earlier = stored.turns
        self._turns = [*earlier, *new]
        try:
            draft = chat_draft(as_chat(self._body, self._turns))
            draft = dataclasses.replace(draft, session=self._session or draft.session)
            self._valid = await self._validator.validate(self._key, draft)
        except MillraceError as error:
            raise _in_own_words(error) from None

    async def begin(self) -> AnswerRun:
        """Start the generation."""
        valid = self._valid
        assert valid is not None
        generation = await self._parts.generator.start(self._key, valid)
        facts = AnswerFacts(generation, int(self._parts.clock.wall()))
        shape = ResponsesShape(facts, self._body)

        async def keep() -> None:
            if shape.document is not None and self._body.store is not False:
                turns = [*self._turns, shape.turn]
                stored = StoredResponse(msgspec.Raw(msgspec.json.encode(shape.document)), turns)
                name = response_id(generation.request_id)
                await self._parts.responses.put(self._key.tenant, name, msgspec.json.encode(stored))

        delivery = Delivery(stream=bool(self._body.stream))
        return AnswerRun(generation, shape, delivery, wrap=lambda sink: _KeepingSink(sink, keep))


class _KeepingSink:
    """Stores the answer before its last bytes go out."""

    def __init__(self, sink: Sink, keep: Callable[[], Awaitable[None]]) -> None:
        self._sink = sink
        self._keep = keep

    async def start(self, status: int, headers: Headers) -> None:
        await self._sink.start(status, headers)

    async def write(
        self, frames: Sequence[bytes], on_delivered: Callable[[], None] | None = None, *, more: bool = True
    ) -> None:
        if not more:
            await self._keep()
        await self._sink.write(frames, on_delivered, more=more)

    def write_now(self, frames: Sequence[bytes], on_delivered: Callable[[], None]) -> bool:
        return self._sink.write_now(frames, on_delivered)

    async def ping(self) -> None:
        await self._sink.ping()

    async def completed(self) -> None:
        await self._sink.completed()

    async def flushed(self) -> None:
        await self._sink.flushed()
