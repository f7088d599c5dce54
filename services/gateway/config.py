"""Settings of the gateway. The only file of this service that reads the environment."""

from __future__ import annotations

import dataclasses

from services.common.config import parse_address, parse_positive, setting
from services.common.redis_url import REDIS_URL, parse_redis_url
from services.gateway.targets import LatencyTargets, parse_targets


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class QueueSettings:
    """Bounds of a pool's queue."""

    max_requests: int = 4_096
    max_wait_ms: int = 60_000

    def __repr__(self) -> str:
        return f"max_requests={self.max_requests},max_wait_ms={self.max_wait_ms}"


def parse_queue(text: str) -> QueueSettings:
    """`max_requests=4096,max_wait_ms=60000`, either or both. Raises ValueError."""
    values: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, separator, value = part.partition("=")
        if not separator or name not in ("max_requests", "max_wait_ms") or name in values:
            raise ValueError(f"{part!r} is not one of max_requests=number and max_wait_ms=number")
        values[name] = parse_positive(value)
    return QueueSettings(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Effective settings; `MILLRACE_<FIELD>` sets each."""

    redis_url: str = setting(REDIS_URL, parse=parse_redis_url, help="Redis of queues, limits and keys", secret=True)
    http_listen: str = setting(
        "127.0.0.1:8000", parse=parse_address, help="Address of the OpenAI HTTP API, or fd:N, an open socket"
    )
    grpc_listen: str = setting(
        "127.0.0.1:8001", parse=parse_address, help="Address of the gRPC API; shared:host:port beside another gateway"
    )
    metrics_listen: str = setting("127.0.0.1:0", parse=parse_address, help="host:port of /metrics and /healthz")
    advertise: str = setting(
        "", help="Address under which other gateways reach this one, opened if unix:/path; default the bound gRPC one"
    )
    usage_address: str = setting("", help="Address of the usage service, for gRPC `GetUsage`; empty for none")
    data_dir: str = setting("millrace-gateway", help="Folder of the usage outbox")
    store_dir: str = setting(
        "", help="Folder of responses, files, batches, shared by gateways; default: data_dir/store"
    )
    cache_secret: str = setting(
        "", help="Platform secret that prefix-cache salts derive from; the same on every gateway", secret=True
    )
    queue: QueueSettings = setting(  # noqa: RUF009 - a field specifier over a frozen value
        QueueSettings(), parse=parse_queue, help="Queued requests of a pool, and the predicted wait at which it refuses"
    )
    latency_targets: LatencyTargets = setting(  # noqa: RUF009 - a field specifier over a frozen value
        LatencyTargets(),
        parse=parse_targets,
        help="Goodput: class/length=ttft:tpot:e2e in ms, e.g. interactive/short=500:50:10000,batch/*=::600000",
    )
    tls_dir: str = setting("", help="Folder of ca.crt, tls.crt, tls.key for TLS between services; empty for none")
    drain_grace_s: int = setting(30, parse=parse_positive, help="Seconds running streams have after SIGTERM")
    log_level: str = setting("info", help="debug, info, warning or error")
    otlp_endpoint: str = setting("", help="OTLP gRPC endpoint of traces; empty for none")
