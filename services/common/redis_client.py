"""The one way to open Redis: bounded waits, few retries, bytes in and out. Called by each service's wiring."""

from __future__ import annotations

from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import ExponentialBackoff

from services.common.redis_url import watched_redis
from services.common.tls import FILES, Tls

# Longest blocking read (XREAD BLOCK) that fits into the socket timeout.
MAX_BLOCK_MS = 2_000


async def _find_master(connection: Any) -> None:
    connection.host, connection.port = await connection.connection_pool.get_master_address()


class _ToMaster(SentinelManagedConnection):
    """Asks the Sentinels before each connection: by itself the library goes back to where the last master was."""

    async def _connect(self) -> None:
        await _find_master(self)
        await super()._connect()  # type: ignore[no-untyped-call]


class _SecureToMaster(SentinelManagedSSLConnection):
    """The same over TLS."""

    async def _connect(self) -> None:
        await _find_master(self)
        await super()._connect()  # type: ignore[no-untyped-call]


class _Watching(aioredis.Redis):
    """The master's client; closes those of the Sentinels too."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        pool: Any = self.connection_pool
        await super().aclose(close_connection_pool)
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def connect(url: str, tls: Tls | None = None) -> aioredis.Redis:
    """A client of `url` (see `parse_redis_url`). Connects on first use; every command is retried twice, which the
    idempotent scripts allow. By Sentinel it is always the present master: each new connection asks, and one that finds
    itself at a replica is closed. `tls` is shown to and demanded of a rediss server. Close it with `aclose()`."""
    secure = url.startswith("rediss")
    shown: dict[str, Any] = {}
    if tls is not None and secure:
        ca, certificate, key = (str(tls.folder / name) for name in FILES)
        shown = {"ssl_ca_certs": ca, "ssl_certfile": certificate, "ssl_keyfile": key}
    waits = {"socket_connect_timeout": 2.0, "socket_timeout": 5.0}
    options: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "health_check_interval": 15,
        "retry": Retry(ExponentialBackoff(cap=0.2, base=0.02), 2),
        "max_connections": 256,
        **waits,
        **shown,
    }
    watched = watched_redis(url)
    if watched is None:
        return aioredis.Redis.from_url(url, **options)
    asked: dict[str, Any] = {**waits, **({"ssl": True, **shown} if secure else {})}
    sentinel: Any = Sentinel(watched.sentinels, sentinel_kwargs=asked, **options, **watched.login)  # type: ignore[no-untyped-call]
    kind = _SecureToMaster if secure else _ToMaster
    master: aioredis.Redis = sentinel.master_for(watched.name, redis_class=_Watching, connection_class=kind)
    return master
