"""The catalogue of metrics: every name is declared here once, with a sentence. docs/metrics.md is generated from it.

Labels are bounded: no ids; tenants beyond the cap share the label `other`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_WORK = ("model", "version", "priority_class", "length_class", "tenant")
_MODEL = ("model", "version")
_TIER = (*_MODEL, "tier")
_TRANSFER = (*_MODEL, "transport", "outcome")
_CAUSE = (*_MODEL, "cause")
_TOKEN_GAP = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 2.5)
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_QUEUE = (0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0)


@dataclasses.dataclass(frozen=True, slots=True)
class WorkTimes:
    """The histograms of requests of one kind, their labels filled in."""

    ttft: Histogram
    itl: Histogram
    tpot: Histogram
    e2e: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram


class Metrics:
    """All instruments of one process, on a registry of their own."""

    def __init__(self, registry: CollectorRegistry | None = None, *, tenant_cap: int = 100) -> None:
        r = self.registry = registry if registry is not None else CollectorRegistry()
        self._tenant_cap, self._tenants = tenant_cap, set[str]()
        self._work: dict[tuple[str, ...], WorkTimes] = {}
        self._declare_lifecycle(r)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"millrace_{name}", text, _WORK, buckets=buckets, registry=r)

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(f"millrace_{name}", text, labels, registry=r)

        def gauge(name: str, text: str, labels: tuple[str, ...] = _MODEL) -> Gauge:
            return Gauge(f"millrace_{name}", text, labels, registry=r)

        self.ttft_seconds = histogram(
            "time_to_first_token_seconds", "From body received to first token written.", _FIRST_TOKEN
        )
        self.itl_seconds = histogram("inter_token_latency_seconds", "Between two writes of one stream.", _TOKEN_GAP)
        self.tpot_seconds = histogram(
            "time_per_output_token_seconds", "Decode time over tokens after the first.", _TOKEN_GAP
        )
        self.e2e_seconds = histogram("request_duration_seconds", "From body received to last byte written.", _WHOLE)
        self.queue_seconds = histogram("queue_time_seconds", "From admission to a worker's acceptance.", _QUEUE)
        self.prefill_seconds = histogram("prefill_time_seconds", "From prefill start to first token.", _FIRST_TOKEN)
        self.decode_seconds = histogram("decode_time_seconds", "From first to last token.", _WHOLE)
        self.requests_total = counter(
            "requests", "Requests by terminal state.", ("model", "version", "terminal_state", "tenant")
        )
        self.refusals_total = counter("refusals", "Requests refused, by reason of the error table.", ("reason",))
        self.running = gauge("running_requests", "Choices in the engine's batch.")
        self.waiting = gauge("waiting_requests", "Choices in the engine that are not in the batch.")
        self.backlog_tokens = gauge("backlog_tokens", "Uncached prompt tokens to compute plus expected output.")
        self.kv_blocks_used = gauge("kv_blocks_used", "KV blocks held by requests.")
        self.kv_blocks_total = gauge("kv_blocks", "KV blocks in the pool.")
        self.preemptions_total = counter("preemptions", "Choices preempted by recompute.", _MODEL)
        self.prefix_query_tokens_total = counter("prefix_query_tokens", "Prompt tokens looked up.", _MODEL)
        self.prefix_hit_tokens_total = counter("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", _MODEL)
        self.tier_hit_tokens_total = counter("tier_hit_tokens", "Prompt tokens brought back from a tier.", _TIER)
        self.tier_bytes = gauge("tier_bytes", "Bytes of cached KV blocks in a tier beyond the pool.", _TIER)
        self.tier_blocks_total = counter(
            "tier_blocks", "KV blocks spilled, skipped as the disk lagged, or dropped as spoilt.", (*_MODEL, "outcome")
        )
        self.kv_orphan_blocks_total = counter("kv_orphan_blocks", "KV blocks come or kept for nobody.", _MODEL)
        self.kv_staging_slots = gauge("kv_staging_slots", "Places for blocks of peers, by state.", (*_MODEL, "state"))
        self.transfer_bytes_total = counter("transfer_bytes", "Bytes of KV blocks from peers.", _TRANSFER)
        self.transfer_seconds = Histogram("millrace_transfer_seconds", "From ask to end.", _TRANSFER, registry=r)
        self.prefill_fallbacks_total = counter("prefill_fallbacks", "Prompts that a peer did not deliver.", _CAUSE)
        self.disk_tier_on = gauge("disk_tier_on", "1 while the disk tier works, else 0.")
        self.prompt_tokens_total = counter("prompt_tokens", "Prompt tokens computed.", _MODEL)
        self.completion_tokens_total = counter("completion_tokens", "Tokens decoded.", _MODEL)
        self.draft_tokens_total = counter("draft_tokens", "Tokens guessed ahead and verified.", _MODEL)
        self.accepted_draft_tokens_total = counter("accepted_draft_tokens", "Guessed tokens that were right.", _MODEL)
        self.stream_drops_total = counter("stream_drops", "Frames or streams dropped, by cause.", ("reason",))
        self.step_seconds = Histogram(
            "millrace_engine_step_seconds", "One engine step.", _MODEL, buckets=_TOKEN_GAP, registry=r
        )
        self.usage_events_total = counter("usage_events", "Usage events by outcome.", ("outcome",))

    def _declare_lifecycle(self, r: CollectorRegistry) -> None:
        """What becomes of requests between workers."""
        self.prefill_placings_total = Counter(
            "millrace_prefill_placings",
            "Prompts submitted, by why a PREFILL worker computes them or not.",
            (*_MODEL, "reason"),
            registry=r,
        )
        self.readmissions_total = Counter(
            "millrace_readmissions",
            "Requests that run elsewhere, resumed or restarted, by cause.",
            (*_MODEL, "kind", "cause"),
            registry=r,
        )
        self.cancel_seconds = Histogram(
            "millrace_cancel_seconds",
            "From a cancel to everything free on a worker, by phase.",
            (*_MODEL, "phase"),
            buckets=_TOKEN_GAP,
            registry=r,
        )

    def work(self, labels: tuple[str, str, str, str, str]) -> WorkTimes:
        """The histograms of these labels; looked up by name once, not with each token."""
        known = self._work.get(labels)
        if known is None:
            every = (self.ttft_seconds, self.itl_seconds, self.tpot_seconds, self.e2e_seconds, self.queue_seconds)
            made = [each.labels(*labels) for each in (*every, self.prefill_seconds, self.decode_seconds)]
            known = self._work[labels] = WorkTimes(*made)
        return known

    def tenant_label(self, tenant: str) -> str:
        """The tenant itself for the first `tenant_cap` tenants seen, then `other`."""
        if tenant in self._tenants:
            return tenant
        if len(self._tenants) >= self._tenant_cap:
            return "other"
        self._tenants.add(tenant)
        return tenant

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)


class MetricsServer:
    """A tiny HTTP listener for /metrics, /healthz and /readyz."""

    def __init__(self, server: asyncio.Server, port: int) -> None:
        self._server = server
        self.port = port

    async def close(self) -> None:
        """Stop listening."""
        self._server.close()
        await self._server.wait_closed()


async def start_metrics_server(
    listen: str, metrics: Metrics, health: Callable[[], bool], ready: Callable[[], bool] | None = None
) -> MetricsServer:
    """Serve on `host:port`. /healthz answers 503 when `health()` is false, /readyz when `ready()` is."""
    is_ready = health if ready is None else ready

    def answer(path: str) -> tuple[str, bytes]:
        if path == "/metrics":
            return "200 OK", metrics.render()
        if path in ("/healthz", "/readyz"):
            good = is_ready() if path == "/readyz" else health()
            return ("200 OK", b"ok\n") if good else ("503 Service Unavailable", b"unhealthy\n")
        return "404 Not Found", b"not found\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            async with asyncio.timeout(5):
                head = await reader.readuntil(b"\r\n\r\n")
                parts = head.split(b" ", 2)
                status, body = answer(parts[1].decode("latin-1").split("?")[0] if len(parts) == 3 else "")
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        writer.close()

    host, _, port = listen.rpartition(":")
    server = await asyncio.start_server(serve, host, int(port), limit=16_384)
    return MetricsServer(server, server.sockets[0].getsockname()[1])
