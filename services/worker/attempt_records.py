"""Writes down how each attempt went: spans worker.prefill and worker.decode, their histograms, and what it took.

Spans are made when the attempt ends, from the marks of its stream, so a running request holds none. No content.
"""

from __future__ import annotations

from millrace.common.v1 import common_pb2
from opentelemetry.trace import SpanKind

from services.common.metrics import Metrics
from services.common.telemetry import context_from, tracer
from services.worker.streams import RequestStream
from services.worker.usage_reports import AttemptLog

_CLASSES = {common_pb2.PRIORITY_CLASS_INTERACTIVE: "interactive", common_pb2.PRIORITY_CLASS_BATCH: "batch"}
_LENGTHS = {
    common_pb2.LENGTH_CLASS_SHORT: "short",
    common_pb2.LENGTH_CLASS_MEDIUM: "medium",
    common_pb2.LENGTH_CLASS_LONG: "long",
}


class AttemptRecorder:
    """Called once for each attempt that ended; `log` hears of every attempt and of every engine report."""

    def __init__(self, metrics: Metrics, log: AttemptLog) -> None:
        self._metrics = metrics
        self.log = log

    def record(self, stream: RequestStream) -> None:
        """Spans and histograms of one ended attempt; an attempt that never started leaves none."""
        marks = stream.marks
        if marks.cancel is not None and marks.end is not None:
            model = stream.facts.entry.model
            waited = self._metrics.cancel_seconds.labels(model.model, model.version, stream.cancelled_in)
            waited.observe(max(0.0, marks.end - marks.cancel))
        if marks.start is None or marks.end is None:
            return
        first = marks.first_token if marks.first_token is not None else marks.end
        self._span("worker.prefill", stream, marks.start, first)
        entry = stream.facts.entry
        labels = (
            entry.model.model,
            entry.model.version,
            _CLASSES.get(entry.priority_class, ""),
            _LENGTHS.get(entry.length_class, ""),
            self._metrics.tenant_label(entry.tenant),
        )
        if marks.first_token is not None:
            self._metrics.prefill_seconds.labels(*labels).observe(max(0.0, first - marks.start))
            self._metrics.decode_seconds.labels(*labels).observe(max(0.0, marks.end - first))
            self._span("worker.decode", stream, first, marks.end)

    def _span(self, name: str, stream: RequestStream, start: float, end: float) -> None:
        facts, entry = stream.facts, stream.facts.entry
        span = tracer().start_span(
            name,
            context=context_from(facts.traceparent),
            kind=SpanKind.INTERNAL,
            start_time=int(start * 1e9),
            attributes={
                "gen_ai.operation.name": "generate_content",
                "gen_ai.request.model": entry.model.model,
                "gen_ai.usage.input_tokens": facts.prompt_token_count,
                "gen_ai.usage.output_tokens": stream.produced_count(),
                "millrace.request_id": facts.request_id,
                "millrace.tenant": entry.tenant,
                "millrace.attempt": facts.attempt,
            },
        )
        if stream.failure is not None:
            span.set_attribute("error.type", stream.failure.reason)
        span.end(end_time=int(end * 1e9))
