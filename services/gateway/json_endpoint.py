"""An endpoint that reads one JSON body and answers with one JSON object. Called by the HTTP door's routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.admission_types import KeyRecord
from services.gateway.answering import until_disconnect
from services.gateway.handlers import read_body
from services.gateway.json_body import decode_body
from services.gateway.limits import Limits

BodyT = TypeVar("BodyT")


def json_response(value: msgspec.Struct) -> Response:
    """200 with `value` as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


class JsonEndpoint(Generic[BodyT]):
    """ASGI: `answer` gets the key and the typed body. It is cancelled when the client goes away."""

    def __init__(
        self,
        body_type: type[BodyT],
        answer: Callable[[KeyRecord, BodyT], Awaitable[Response]],
        limits: Limits,
    ) -> None:
        self._body_type = body_type
        self._answer = answer
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises MillraceError before anything was sent."""
        try:
            raw = await read_body(Request(scope, receive), self._limits)
        except ClientDisconnect:
            return
        body = decode_body(raw, self._body_type, self._limits)

        async def work() -> None:
            response = await self._answer(scope["state"]["key"], body)
            await response(scope, receive, send)

        await until_disconnect(receive, work())
