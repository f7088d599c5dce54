"""The one way to open Redis: bounded waits, few retries, bytes in and out. Called by each service's wiring."""

from __future__ import annotations

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

# Longest blocking read (XREAD BLOCK) that fits into the socket timeout.
MAX_BLOCK_MS = 2_000


def connect(url: str) -> aioredis.Redis:
    """A client of `url` (redis://, rediss:// or unix://). Connects on first use; every command is retried twice, which
    the idempotent scripts allow. Close it with `aclose()`."""
    return aioredis.Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_connect_timeout=2.0,
        socket_timeout=5.0,
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2),
        max_connections=256,
    )
