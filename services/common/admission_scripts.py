"""Runs the Lua scripts of `scripts/` and builds every key: one hash slot per pool, tenant, registry and key table.

Maps the failures of Redis to StoreUnavailable. Knows no meaning of a key. Used by the clients of the scripts only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import redis.asyncio as aioredis
from redis import exceptions

from services.common.admission_types import Pool
from services.common.errors import InvalidRequest, StoreUnavailable

PRELUDES: Final = {
    **dict.fromkeys(("enqueue", "claim", "lease", "own", "finish"), ("common", "queue")),
    **dict.fromkeys(("reserve", "renew", "renew_budget", "settle", "spent"), ("common", "quota")),
    "members": ("common",),
    "idempotency": (),
}
_AWAY = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, exceptions.OutOfMemoryError)
_AWAY_PREFIXES = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "UNKILLABLE", "BUSY")
Arg = str | bytes | int | float


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
    """Holds the scripts' texts; `now_ms` replaces Redis TIME in tests."""

    def __init__(self, redis: aioredis.Redis, now_ms: Callable[[], int] | None = None) -> None:
        folder = Path(__file__).parent / "scripts"
        self._now_ms = now_ms
        self._scripts = {
            name: redis.register_script("\n".join((folder / f"{part}.lua").read_text() for part in (*preludes, name)))
            for name, preludes in PRELUDES.items()
        }

    async def run(self, name: str, keys: Sequence[str], *args: Arg | None) -> Any:
        """Run one script; None is passed as an empty argument. Raises StoreUnavailable."""
        now: Arg = self._now_ms() if self._now_ms is not None else ""
        with store_errors():
            return await self._scripts[name](keys=keys, args=[now, *("" if arg is None else arg for arg in args)])
