"""The HTTP door: routes and middleware. Builds nothing but itself; wiring.py calls `create_app`.

Deny by default: every path asks for a key but /healthz, /readyz and /metrics. The last one names tenants, so only peers
on this machine see it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import InvalidRequest, MillraceError, NotFound
from services.common.metrics import Metrics
from services.gateway import openapi
from services.gateway.api_types import CancelAnswer, DetokenizeRequest, TokenizeRequest
from services.gateway.batches_endpoint import BatchesEndpoint
from services.gateway.embedding_endpoint import EmbeddingEndpoint
from services.gateway.files_endpoint import FilesEndpoint
from services.gateway.front_parts import FrontParts
from services.gateway.generation import KeyRing
from services.gateway.handlers import StreamEndpoint, chat_endpoint, completion_endpoint
from services.gateway.health_endpoints import HealthEndpoints
from services.gateway.http_errors import as_millrace, refusal, refusal_id
from services.gateway.json_endpoint import JsonEndpoint, json_response
from services.gateway.limits import Limits
from services.gateway.model_endpoints import ModelEndpoints
from services.gateway.responses import ResponsesEndpoint
from services.gateway.tokenize_endpoints import TokenizeEndpoints

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Edge:
    """Outermost layer: header limits, the key, and every failure as an OpenAI error.

    `direct` are the endpoints behind POST that need nothing of the router: what is asked most goes straight there.
    """

    def __init__(self, app: Starlette, keyring: KeyRing, limits: Limits, direct: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._keyring = keyring
        self._limits = limits
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), *_client_id(scope)]
            await send(message)

        try:
            self._check_headers(scope)
            if scope["path"] not in OPEN_PATHS:
                scope.setdefault("state", {})["key"] = await self._keyring.authenticate(_authorization(scope))
            direct = self._direct.get(scope["path"]) if scope["method"] == "POST" else None
            await (direct or self._app)(scope, receive, sending)
        except Exception as caught:
            error, request_id = as_millrace(caught), refusal_id(scope)
            if error is not caught:
                log = structlog.get_logger().bind(request_id=request_id)
                log.error("request_failed", path=scope["path"][:64], exc_info=caught)
            if started:
                return
            headers, body = refusal(error, request_id)
            await sending({"type": "http.response.start", "status": error.row.http_status, "headers": headers})
            await sending({"type": "http.response.body", "body": body})

    def _check_headers(self, scope: Scope) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > self._limits.header_count or size > self._limits.header_bytes:
            raise InvalidRequest(
                f"At most {self._limits.header_count} headers of {self._limits.header_bytes} bytes in all are accepted."
            )


def _authorization(scope: Scope) -> str | None:
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    return found[0].decode("latin-1") if len(found) == 1 else None


def _client_id(scope: Scope) -> list[tuple[bytes, bytes]]:
    """A client's own id is a label: given back when it is short and plain, else dropped."""
    found = [value for name, value in scope["headers"] if name == b"x-request-id"]
    return [(b"x-client-request-id", found[0])] if len(found) == 1 and _CLIENT_ID.fullmatch(found[0]) else []


def create_app(parts: FrontParts, *, metrics: Metrics, ready: Callable[[], bool]) -> ASGIApp:
    """The ASGI application."""
    directory = parts.directory
    validator = parts.validator
    models = ModelEndpoints(directory, int(parts.clock.wall()))
    limits = validator.limits
    text = TokenizeEndpoints(validator)
    streams = StreamEndpoint(parts.answers)
    health = HealthEndpoints(directory, metrics, ready)
    described = openapi.document()
    responses = ResponsesEndpoint(parts, validator)
    files = FilesEndpoint(parts.files, limits)
    batches = BatchesEndpoint(parts, limits)

    async def description(_request: Request) -> Response:
        return Response(described, media_type="application/json")

    async def cancel(request: Request) -> Response:
        # Answers name the request `chatcmpl-<id>` or `cmpl-<id>`.
        request_id = request.path_params["id"].rpartition("-")[2]
        cancelled = await parts.generator.cancel(request.state.key, request_id)
        return json_response(CancelAnswer(id=request_id, cancelled=cancelled))

    async def missing(request: Request, _error: Exception) -> Response:
        return refused(request, NotFound(f"There is nothing at {request.method} {request.url.path[:256]}."))

    async def failed(request: Request, error: Exception) -> Response:
        return refused(request, as_millrace(error))

    direct = _direct(parts, responses)
    routes = [
        Route("/healthz", health.healthz),
        Route("/readyz", health.readyz),
        Route("/metrics", health.metrics),
        Route("/openapi.json", description, methods=["GET"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{model:path}", models.get, methods=["GET"]),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in direct.items()),
        Route("/v1/responses/{id}", responses.get, methods=["GET"]),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/files", files.create, methods=["POST"]),
        Route("/v1/files", files.list, methods=["GET"]),
        Route("/v1/files/{id}", files.get, methods=["GET"]),
        Route("/v1/files/{id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", files.content, methods=["GET"]),
        Route("/v1/batches", batches.create, methods=["POST"]),
        Route("/v1/batches", batches.list, methods=["GET"]),
        Route("/v1/batches/{id}", batches.get, methods=["GET"]),
        Route("/v1/batches/{id}/cancel", batches.cancel, methods=["POST"]),
        Route("/v1/streams/{request_id}", streams, methods=["GET"]),
        Route("/v1/embeddings", EmbeddingEndpoint(parts), methods=["POST"]),
        Route("/v1/requests/{id}/cancel", cancel, methods=["POST"]),
        Route("/tokenize", JsonEndpoint(TokenizeRequest, text.tokenize, limits), methods=["POST"]),
        Route("/detokenize", JsonEndpoint(DetokenizeRequest, text.detokenize, limits), methods=["POST"]),
    ]
    handlers = {404: missing, 405: missing, MillraceError: failed, Exception: failed}
    return Edge(Starlette(routes=routes, exception_handlers=handlers), parts.keyring, limits, direct)


def _direct(parts: FrontParts, responses: ResponsesEndpoint) -> dict[str, ASGIApp]:
    return {
        "/v1/chat/completions": chat_endpoint(parts, parts.validator),
        "/v1/completions": completion_endpoint(parts, parts.validator),
        "/v1/responses": responses,
    }


def refused(request: Request, error: MillraceError) -> Response:
    """The answer that is only an error."""
    headers, body = refusal(error, refusal_id(request.scope))
    return Response(body, error.row.http_status, {name.decode(): value.decode() for name, value in headers})
