"""Settings of the gateway. The only file of this service that reads the environment."""

from __future__ import annotations

import dataclasses

from services.common.config import parse_address, parse_positive, setting


@dataclasses.dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Effective settings; `MILLRACE_<FIELD>` sets each."""

    redis_url: str = setting("redis://127.0.0.1:6379/0", help="Redis of queues, limits and keys", secret=True)
    http_listen: str = setting("127.0.0.1:8000", parse=parse_address, help="Address of the OpenAI HTTP API")
    grpc_listen: str = setting("127.0.0.1:8001", parse=parse_address, help="Address of the gRPC API")
    metrics_listen: str = setting("127.0.0.1:0", parse=parse_address, help="host:port of /metrics and /healthz")
    advertise: str = setting("", help="Address under which other gateways reach this one; default the bound gRPC one")
    data_dir: str = setting("millrace-gateway", help="Folder of the usage outbox")
    store_dir: str = setting(
        "", help="Folder of responses, files, batches, shared by gateways; default: data_dir/store"
    )
    outbox_max_bytes: int = setting(
        67_108_864, parse=parse_positive, help="Size of the usage outbox at which new work is refused"
    )
    cache_secret: str = setting(
        "", help="Platform secret that prefix-cache salts derive from; the same on every gateway", secret=True
    )
    queue_max_requests: int = setting(4_096, parse=parse_positive, help="Queued requests of a pool")
    queue_max_wait_ms: int = setting(60_000, parse=parse_positive, help="Predicted wait at which a pool refuses")
    tls_dir: str = setting("", help="Folder of ca.crt, tls.crt, tls.key for TLS between services; empty for none")
    drain_grace_s: int = setting(30, parse=parse_positive, help="Seconds running streams have after SIGTERM")
    log_level: str = setting("info", help="debug, info, warning or error")
    otlp_endpoint: str = setting("", help="OTLP gRPC endpoint of traces; empty for none")
