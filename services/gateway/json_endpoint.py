"""An endpoint that reads one JSON body and answers with one JSON object. Called by the HTTP door's routes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.admission_types import KeyRecord
from services.gateway.answer_sink import ClientSink
from services.gateway.answering import until_disconnect
from services.gateway.handlers import read_body
from services.gateway.json_body import decode_body
from services.gateway.limits import Limits

BodyT = TypeVar("BodyT")


def json_response(value: msgspec.Struct) -> Response:
    """200 with `value` as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


async def send_json(send: Send, value: msgspec.Struct) -> None:
    """Write 200 with `value` as JSON. Raises SlowReader when the client does not take it."""
    body = msgspec.json.encode(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    sink = ClientSink(send)
    await sink.start(200, headers)
    await sink.write([body], more=False)


class JsonEndpoint(Generic[BodyT]):
    """ASGI: `answer` gets the key, the typed body and the way out. It is cancelled when the client goes away."""

    def __init__(
        self,
        body_type: type[BodyT],
        answer: Callable[[KeyRecord, BodyT, Send], Coroutine[Any, Any, None]],
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
        await until_disconnect(receive, self._answer(scope["state"]["key"], body, send))
