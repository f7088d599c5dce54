"""`/healthz`, `/readyz` and `/metrics`: what asks for no key. Metrics name tenants: only this machine sees them."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

from services.common.errors import NotFound
from services.common.metrics import Metrics
from services.gateway.generation import ModelDirectory

_LOOPBACK = frozenset({"127.0.0.1", "::1"})
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})


class HealthEndpoints:
    """Answers from what the gateway knows of itself."""

    def __init__(self, directory: ModelDirectory, metrics: Metrics, ready: Callable[[], bool]) -> None:
        self._directory = directory
        self._metrics = metrics
        self._ready = ready

    async def healthz(self, _request: Request) -> Response:
        """The process answers."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _request: Request) -> Response:
        """New work is taken, and a model is served."""
        if self._ready() and self._directory.models():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not ready\n", 503, {"retry-after": "1"})

    async def metrics(self, request: Request) -> Response:
        """The metric page. Raises NotFound for peers elsewhere."""
        if not _is_local(request.scope):
            raise NotFound("There is nothing at GET /metrics.")
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")


def _is_local(scope: Scope) -> bool:
    """The peer is on this machine, and no proxy speaks for another."""
    client = scope.get("client")
    forwarded = any(name in _FORWARDED for name, _ in scope["headers"])
    return client is not None and client[0] in _LOOPBACK and not forwarded
