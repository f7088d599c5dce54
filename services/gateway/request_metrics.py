"""Latency and outcome metrics of one request, by the catalogue's labels. No decisions."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.metrics import Metrics
from services.gateway.choice_tokens import ChoiceTokens
from services.gateway.targets import LatencyTargets, Seconds, latency_of


def label_of(enum_name: str) -> str:
    """`PRIORITY_CLASS_BATCH` → `batch`, `TERMINAL_STATE_COMPLETED` → `completed`."""
    return enum_name.split("_", 2)[-1].lower()


class RequestMeter:
    """Observes one request from body to last byte. Times are monotonic seconds."""

    def __init__(
        self,
        metrics: Metrics,
        labels: tuple[str, str, str, str, str],
        received_at: float,
        targets: LatencyTargets,
    ) -> None:
        self._metrics = metrics
        self._labels = labels
        self._times = metrics.work(labels)
        self._received_at = received_at
        self._targets = targets
        self._started_at: float | None = None
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._delivered = 0

    def version(self, model: common_pb2.ModelRef) -> None:
        """Another version runs the request."""
        self._labels = (model.model, model.version, *self._labels[2:])
        self._times = self._metrics.work(self._labels)

    def accepted(self, now: float) -> None:
        """A worker took the request."""
        self._times.queue.observe(now - self._received_at)

    def readmitted(self, cause: str, kind: str) -> None:
        """The request runs elsewhere, `resumed` after what was received or `restarted`."""
        model, version, *_ = self._labels
        self._metrics.readmissions_total.labels(model, version, kind, cause).inc()

    def started(self, now: float) -> None:
        """Prefill began."""
        self._started_at = now

    def delivered(self, now: float, choices: Sequence[ChoiceTokens]) -> None:
        """The front wrote tokens."""
        total = sum(choice.delivered for choice in choices)
        if total <= self._delivered:
            return
        if self._first_at is None:
            self._first_at = now
            self._times.ttft.observe(now - self._received_at)
            if self._started_at is not None:
                self._times.prefill.observe(now - self._started_at)
        elif self._last_at is not None:
            self._times.itl.observe(now - self._last_at)
        self._last_at, self._delivered = now, total

    def ended(self, now: float, event: usage_event_pb2.UsageEvent) -> None:
        """The request reached its terminal state; the event is told how long its client waited."""
        model, version, priority_class, length_class, tenant = self._labels
        state = label_of(common_pb2.TerminalState.Name(event.terminal_state))
        self._metrics.requests_total.labels(model, version, state, tenant).inc()
        self._times.e2e.observe(now - self._received_at)
        if self._first_at is not None and self._last_at is not None:
            self._times.decode.observe(self._last_at - self._first_at)
        gap = self._token_gap()
        if gap is not None:
            self._times.tpot.observe(gap)
        first = self._first_at - self._received_at if self._first_at is not None else None
        target = self._targets.of(priority_class, length_class)
        event.latency.CopyFrom(latency_of(event.terminal_state, Seconds(first, gap, now - self._received_at), target))

    def _token_gap(self) -> float | None:
        if self._first_at is None or self._last_at is None or self._delivered < 2:
            return None
        return (self._last_at - self._first_at) / (self._delivered - 1)
