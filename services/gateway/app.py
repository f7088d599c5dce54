"""The HTTP door: routes and middleware. Builds nothing but itself; wiring.py calls `create_app`."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette

from services.common.clock import Clock
from services.common.metrics import Metrics
from services.gateway.generation import Generator, KeyRing, ModelDirectory
from services.gateway.template_renderer import TemplateRenderer


def create_app(
    generator: Generator,
    directory: ModelDirectory,
    keyring: KeyRing,
    *,
    metrics: Metrics,
    ready: Callable[[], bool],
    clock: Clock,
    renderer: TemplateRenderer,
) -> Starlette:
    """The ASGI application; `renderer` is started and closed by the caller."""
    return Starlette()
