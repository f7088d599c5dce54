"""The one way to open Redis: bounded waits, few retries, bytes in and out. Called by each service's wiring."""

from __future__ import annotations

from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from services.common.tls import FILES, Tls

# Longest blocking read (XREAD BLOCK) that fits into the socket timeout.
MAX_BLOCK_MS = 2_000


def connect(url: str, tls: Tls | None = None) -> aioredis.Redis:
    """A client of `url` (redis://, rediss:// or unix://). Connects on first use; every command is retried twice, which
    the idempotent scripts allow. `tls` is shown to and demanded of a rediss:// server. Close it with `aclose()`."""
    shown: dict[str, Any] = {}
    if tls is not None and url.startswith("rediss://"):
        ca, certificate, key = (str(tls.folder / name) for name in FILES)
        shown = {"ssl_ca_certs": ca, "ssl_certfile": certificate, "ssl_keyfile": key}
    return aioredis.Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_connect_timeout=2.0,
        socket_timeout=5.0,
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2),
        max_connections=256,
        **shown,
    )
