"""Settings of the router: the only file of this service that names environment variables."""

from __future__ import annotations

import dataclasses

from services.common.config import parse_address, parse_seconds, setting
from services.common.redis_url import REDIS_URL, parse_redis_url


@dataclasses.dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything a router can be told from outside."""

    redis_url: str = setting(REDIS_URL, parse=parse_redis_url, secret=True, help="Redis of queues and registry")
    grpc_listen: str = setting("127.0.0.1:0", parse=parse_address, help="host:port (0 = any) or unix:/path")
    metrics_listen: str = setting("127.0.0.1:0", parse=parse_address, help="host:port of /metrics and /healthz")
    tls_dir: str = setting("", help="Folder of ca.crt, tls.crt, tls.key for TLS between services; empty for none")
    drain_grace_s: float = setting(5.0, parse=parse_seconds, help="seconds that submits under way get at the end")
    log_level: str = setting("info", help="debug, info, warning or error")
    otlp_endpoint: str = setting("", help="OTLP gRPC endpoint of a trace collector; empty turns traces off")
