"""The one way to open Redis: bounded waits, few retries, bytes in and out. Called by each service's wiring."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import ExponentialBackoff

from services.common.tls import FILES, Tls

# Longest blocking read (XREAD BLOCK) that fits into the socket timeout.
MAX_BLOCK_MS = 2_000
# Where Redis is unless a service is told otherwise.
REDIS_URL = "redis://127.0.0.1:6379/0"
_SENTINEL = "+sentinel://"
_SENTINEL_PORT = 26_379
_FORMS = ("redis://", "rediss://", "unix://")


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


class _Watched(NamedTuple):
    """A Redis that Sentinels watch: where they are, what they call it, and how to log in to it."""

    sentinels: list[tuple[str, int]]
    name: str
    login: dict[str, Any]


def parse_redis_url(text: str) -> str:
    """`redis://`, `rediss://`, `unix://` or `redis[s]+sentinel://[user:password@]host[:port],…/name[/db]`; the text is
    returned unchanged. Raises ValueError."""
    if _SENTINEL in text:
        _watched(text)
    elif not text.startswith(_FORMS):
        raise ValueError("expected redis://, rediss://, unix:// or redis+sentinel://host:port,host:port/name")
    return text


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
    if _SENTINEL not in url:
        return aioredis.Redis.from_url(url, **options)
    watched = _watched(url)
    encrypted = {"ssl": True, **shown} if secure else {}
    asked: dict[str, Any] = {**waits, **encrypted}
    sentinel: Any = Sentinel(watched.sentinels, sentinel_kwargs=asked, **options, **watched.login)  # type: ignore[no-untyped-call]
    kind = _SecureToMaster if secure else _ToMaster
    master: aioredis.Redis = sentinel.master_for(watched.name, redis_class=_Watching, connection_class=kind)
    return master


def _watched(url: str) -> _Watched:
    place, _, path = url.partition(_SENTINEL)[2].partition("/")
    login, _, hosts = place.rpartition("@")
    name, _, db = path.partition("/")
    sentinels = [_address(host) for host in hosts.split(",") if host]
    if not sentinels or not name or not (db or "0").isdecimal():
        raise ValueError("expected redis+sentinel://host:port,host:port/name, where name is what the Sentinels call it")
    user, _, password = login.partition(":")
    known = {"username": unquote(user), "password": unquote(password)}
    return _Watched(sentinels, name, {"db": int(db or 0), **{k: v for k, v in known.items() if v}})


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator:
        return text, _SENTINEL_PORT
    if not host or not port.isdecimal():
        raise ValueError("expected host:port of each Sentinel")
    return host, int(port)
