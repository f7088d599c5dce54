"""Logs and traces: set up here and nowhere else. JSON lines on stderr; spans to OTLP where an endpoint is given.

Never carries prompt text, completions or keys. A dead or slow collector drops spans, it never blocks.
"""

from __future__ import annotations

import dataclasses
import logging
import sys

import structlog
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_MAX_QUEUED_SPANS = 2_048


@dataclasses.dataclass(frozen=True, slots=True)
class Telemetry:
    """Handle of what was set up."""

    provider: TracerProvider | None

    def shutdown(self) -> None:
        """Flush what the exporter still takes, for at most 2 s."""
        if self.provider is not None:
            self.provider.force_flush(timeout_millis=2_000)
            self.provider.shutdown()


def setup_logging(service: str, instance: str, log_level: str) -> None:
    """structlog JSON lines to stderr with service and instance on each."""
    level = logging.getLevelNamesMapping().get(log_level.upper(), logging.INFO)
    logging.basicConfig(stream=sys.stderr, level=max(level, logging.WARNING), format="%(message)s", force=True)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance)


def setup_telemetry(
    service: str,
    *,
    instance: str,
    log_level: str = "info",
    otlp_endpoint: str | None = None,
    span_exporter: SpanExporter | None = None,
) -> Telemetry:
    """Configure logs and, where an endpoint or exporter is given, traces. `span_exporter` is for tests."""
    setup_logging(service, instance, log_level)
    propagate.set_global_textmap(_PROPAGATOR)
    if not otlp_endpoint and span_exporter is None:
        return Telemetry(None)
    resource = Resource.create({"service.name": f"millrace-{service}", "service.instance.id": instance})
    provider = TracerProvider(resource=resource)
    if span_exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(span_exporter))
    if otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=not otlp_endpoint.startswith("https"), timeout=2)
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED_SPANS))
    trace.set_tracer_provider(provider)
    return Telemetry(provider)


def tracer() -> trace.Tracer:
    """The one tracer of the process."""
    return trace.get_tracer("millrace")


def traceparent_of(span: trace.Span) -> str:
    """W3C traceparent of a span; empty when tracing is off."""
    if not span.get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def context_from(traceparent: str) -> Context:
    """Context whose current span is the remote parent; an empty or malformed text gives an empty context."""
    return _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else Context()
