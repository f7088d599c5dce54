"""Who runs the answer to an Idempotency-Key, what came of it, and which gateway holds a stream. In Redis, by tenant.

A record names its owner by incarnation: when that gateway's lease is gone, whoever found the record may replace it.
Every write is a compare-and-set on the record's token. Raises StoreUnavailable. Called by ResumableAnswers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import redis.asyncio as aioredis
import structlog

from services.common.admission_scripts import ScriptRunner, slot_key, store_errors
from services.gateway.answer_log import KeptAnswer

RECORD_TTL_MS = 24 * 3_600 * 1000
RESULT_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """State of a key: running at `owner`, or done. `result` None when done: the answer was too large to be kept."""

    token: str
    body: str
    owner: str
    done: bool
    result: KeptAnswer | None


class IdempotencyStore:
    """Records by tenant and digest of the key."""

    def __init__(self, redis: aioredis.Redis) -> None:
        self._redis: Any = redis
        self._run = ScriptRunner(redis).run

    async def read(self, tenant: str, digest: str) -> Record | None:
        """The record, or None when the key is free."""
        with store_errors():
            row = await self._redis.hmget(_key(tenant, digest), ("token", "body", "owner", "state", "result"))
        if row[0] is None:
            return None
        token, body, owner, state = (value.decode() for value in row[:4])
        return Record(token, body, owner, state == "done", _result(row[4]))

    async def claim(
        self, tenant: str, digest: str, token: str, *, body: str, owner: str, instead_of: str | None
    ) -> bool:
        """Take a free key, or that of the dead owner's token `instead_of`; False when another was first."""
        args = ("claim", token, instead_of, RECORD_TTL_MS, body, owner)
        return bool(await self._run("idempotency", [_key(tenant, digest)], *args))

    async def complete(self, tenant: str, digest: str, token: str, answer: KeptAnswer | None) -> bool:
        """Keep the answer for 24 hours; False when it is too large, or the record is no longer this token's."""
        result = b"" if answer is None else msgspec.msgpack.encode(answer)
        if len(result) > RESULT_BYTES:
            return False
        args = ("complete", token, RECORD_TTL_MS, result)
        return bool(await self._run("idempotency", [_key(tenant, digest)], *args))

    async def release(self, tenant: str, digest: str, token: str) -> None:
        """Free the key of an answer that did not come to a good end."""
        await self._run("idempotency", [_key(tenant, digest)], "release", token)

    async def announce(self, tenant: str, request_id: str, owner: str, ttl_s: float) -> None:
        """Say which gateway holds a stream."""
        with store_errors():
            await self._redis.set(slot_key(tenant, f"stream:{request_id}"), owner, px=int(ttl_s * 1000))

    async def holder(self, tenant: str, request_id: str) -> str | None:
        """The gateway that holds a stream."""
        with store_errors():
            owner = await self._redis.get(slot_key(tenant, f"stream:{request_id}"))
        return None if owner is None else str(owner.decode())

    async def retract(self, tenant: str, request_id: str) -> None:
        """The stream is held no more."""
        with store_errors():
            await self._redis.delete(slot_key(tenant, f"stream:{request_id}"))


def _key(tenant: str, digest: str) -> str:
    return slot_key(tenant, f"idem:{digest}")


def _result(raw: bytes | None) -> KeptAnswer | None:
    if not raw:
        return None
    try:
        return msgspec.msgpack.decode(raw, type=KeptAnswer)
    except msgspec.DecodeError:
        structlog.get_logger().error("kept_answer_unreadable")
        return None
