"""Runs the Lua scripts of `scripts/` and builds every key: one hash slot per pool, tenant, registry and key table.

Maps the failures of Redis to StoreUnavailable. Knows no meaning of a key. Used by the clients of the scripts only.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import redis.asyncio as aioredis
from redis import exceptions

from services.common.admission_types import Pool
from services.common.errors import InvalidRequest, StoreUnavailable
from services.common.redis_pipeline import Arg, RedisPipeline

PRELUDES: Final = {
    "enqueue": ("common", "queue", "places"),
    **dict.fromkeys(("claim", "lease", "own", "finish", "close"), ("common", "queue")),
    **dict.fromkeys(("reserve", "renew", "renew_budget", "settle", "spent"), ("common", "quota")),
    "members": ("common",),
    "routes": ("common",),
    "idempotency": (),
}
_AWAY = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, exceptions.OutOfMemoryError)
_AWAY_PREFIXES = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "UNKILLABLE", "BUSY")


def slot_key(tag: str, name: str) -> str:
    """`mr:{tag}:name`. Raises InvalidRequest for a tag that would leave its slot."""
    if not tag or "{" in tag or "}" in tag:
        raise InvalidRequest("A name must not be empty nor hold braces.")
    return f"mr:{{{tag}}}:{name}"


def pool_key(pool: Pool, name: str) -> str:
    """Key of a queue or of a request."""
    return slot_key(pool.tag, name)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn "Redis is away" in all its forms into StoreUnavailable."""
    try:
        yield
    except _AWAY as error:
        raise StoreUnavailable("The admission store is not reachable.", retry_after_s=1.0) from error
    except exceptions.ResponseError as error:
        if str(error).startswith(_AWAY_PREFIXES):
            raise StoreUnavailable("The admission store refuses writes.", retry_after_s=1.0) from error
        raise


class ScriptRunner:
    """Holds the scripts' texts and sends them over one connection; `now_ms` replaces Redis TIME in tests."""

    def __init__(self, redis: aioredis.Redis, now_ms: Callable[[], int] | None = None) -> None:
        folder = Path(__file__).parent / "scripts"
        self._now_ms = now_ms
        self._execute = RedisPipeline(redis).execute
        self._scripts: dict[str, tuple[str, str]] = {}
        for name, preludes in PRELUDES.items():
            text = "\n".join((folder / f"{part}.lua").read_text() for part in (*preludes, name))
            self._scripts[name] = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), text

    async def run(self, name: str, keys: Sequence[str], *args: Arg | None) -> Any:
        """Run one script; None is passed as an empty argument. Raises StoreUnavailable."""
        now: Arg = self._now_ms() if self._now_ms is not None else ""
        digest, text = self._scripts[name]
        rest = (len(keys), *keys, now, *["" if arg is None else arg for arg in args])
        with store_errors():
            try:
                return await self._execute(("EVALSHA", digest, *rest))
            except exceptions.NoScriptError:
                return await self._execute(("EVAL", text, *rest))

    async def command(self, *command: Arg) -> Any:
        """Run one plain command that may be sent twice. Raises StoreUnavailable."""
        with store_errors():
            return await self._execute(command)
