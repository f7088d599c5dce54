"""The addresses of Redis that a service can be told. Loads no client: the command line reads settings too."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote

# Where Redis is unless a service is told otherwise.
REDIS_URL = "redis://127.0.0.1:6379/0"
_SENTINEL = "+sentinel://"
_SENTINEL_PORT = 26_379
_FORMS = ("redis://", "rediss://", "unix://")


class WatchedRedis(NamedTuple):
    """A Redis that Sentinels watch: where they are, what they call it, and how to log in to it."""

    sentinels: list[tuple[str, int]]
    name: str
    login: dict[str, Any]


def parse_redis_url(text: str) -> str:
    """`redis://`, `rediss://`, `unix://` or `redis[s]+sentinel://[user:password@]host[:port],…/name[/db]`; the text is
    returned unchanged. Raises ValueError."""
    if watched_redis(text) is None and not text.startswith(_FORMS):
        raise ValueError("expected redis://, rediss://, unix:// or redis+sentinel://host:port,host:port/name")
    return text


def watched_redis(url: str) -> WatchedRedis | None:
    """What a sentinel address says; None for another one. Raises ValueError."""
    if _SENTINEL not in url:
        return None
    place, _, path = url.partition(_SENTINEL)[2].partition("/")
    login, _, hosts = place.rpartition("@")
    name, _, db = path.partition("/")
    sentinels = [_address(host) for host in hosts.split(",") if host]
    if not sentinels or not name or not (db or "0").isdecimal():
        raise ValueError("expected redis+sentinel://host:port,host:port/name, where name is what the Sentinels call it")
    user, _, password = login.partition(":")
    known = {"username": unquote(user), "password": unquote(password)}
    return WatchedRedis(sentinels, name, {"db": int(db or 0), **{k: v for k, v in known.items() if v}})


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if separator and not (host and port.isdecimal()):
        raise ValueError("expected host:port of each Sentinel")
    return (host, int(port)) if separator else (text, _SENTINEL_PORT)
