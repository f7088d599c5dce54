"""A lease in Redis: the right of one process to do a thing, which ends some time after it was last kept."""

from __future__ import annotations

import contextlib

import redis.asyncio as aioredis
from redis import exceptions

from services.common.admission_scripts import store_errors
from services.common.errors import StoreUnavailable


class Lease:
    """The right under the key `name`; it ends `seconds` after it was last kept."""

    def __init__(self, redis: aioredis.Redis, name: str, seconds: float) -> None:
        self._lock = redis.lock(name, timeout=seconds, blocking=False, thread_local=False)

    async def take(self) -> bool:
        """False while another process has it. Raises StoreUnavailable."""
        with store_errors():
            return bool(await self._lock.acquire())

    async def keep(self) -> bool:
        """False when it is lost, or may be."""
        try:
            with store_errors():
                return bool(await self._lock.reacquire())
        except (exceptions.LockError, StoreUnavailable):
            return False

    async def release(self) -> None:
        """Let another process take it at once."""
        with contextlib.suppress(exceptions.LockError, StoreUnavailable), store_errors():
            await self._lock.release()
