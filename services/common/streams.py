"""Consumer-group reader of Redis streams: pending entries first after a start, then new ones; trims what is acked.

Never trims by length (that loses accepted work). Used by the usage service on the usage streams of all pools.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import redis.asyncio as aioredis
from redis import exceptions

from services.common.admission_scripts import store_errors
from services.common.redis_client import MAX_BLOCK_MS


@dataclasses.dataclass(frozen=True, slots=True)
class StreamEntry:
    """One entry; `fields` are raw bytes by name."""

    stream: str
    entry_id: str
    fields: Mapping[str, bytes]


class UsageStream:
    """At-least-once reader; the caller acks after its durable effect."""

    def __init__(self, redis: aioredis.Redis) -> None:
        self._redis: Any = redis
        # Last pending id that was handed out, by stream; absent once the pending ones are through.
        self._pending: dict[str, str] = {}
        self._known: set[tuple[str, str]] = set()

    async def ensure_group(self, stream: str, group: str) -> None:
        """Create stream and group (from the first entry) where they are missing. Idempotent."""
        with store_errors():
            try:
                await self._redis.xgroup_create(stream, group, id="0", mkstream=True)
            except exceptions.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise
        if (stream, group) not in self._known:
            self._known.add((stream, group))
            self._pending[stream] = "0"

    async def read(
        self, streams: Sequence[str], group: str, consumer: str, count: int, block_ms: int
    ) -> list[StreamEntry]:
        """Up to `count` entries a stream: this consumer's pending ones first, else new ones, waiting at most `block_ms`
        (2 s at most). A group that a flushed Redis lost is made again. Raises StoreUnavailable."""
        for stream in streams:
            if (stream, group) not in self._known:
                await self.ensure_group(stream, group)
        pending = {s: self._pending[s] for s in streams if s in self._pending}
        if pending:
            found = await self._read(pending, group, consumer, count, None)
            for stream in pending:
                ids = [e.entry_id for e in found if e.stream == stream]
                if ids:
                    self._pending[stream] = ids[-1]
                else:
                    del self._pending[stream]
            if found:
                return found
        return await self._read(dict.fromkeys(streams, ">"), group, consumer, count, min(block_ms, MAX_BLOCK_MS))

    async def reread_pending(self, streams: Sequence[str]) -> None:
        """Hand out unacked entries again at the next read (after a failed insert)."""
        self._pending.update(dict.fromkeys(streams, "0"))

    async def ack(self, stream: str, group: str, entry_ids: Sequence[str]) -> None:
        """Mark entries as done."""
        if entry_ids:
            with store_errors():
                await self._redis.xack(stream, group, *entry_ids)

    async def trim_acked(self, stream: str, group: str, keep_ms: int = 0) -> int:
        """Delete everything below the smallest pending id (or all delivered, if none is pending); returns the count.

        What came in the last `keep_ms` before the newest delivered entry stays for other readers.
        """
        with store_errors():
            groups = {g["name"].decode(): g for g in await self._redis.xinfo_groups(stream)}
            if group not in groups:
                return 0
            summary = await self._redis.xpending(stream, group)
            time_ms, number = _parts(groups[group]["last-delivered-id"])
            limit = _parts(summary["min"]) if summary["pending"] else (time_ms, number + 1)
            if keep_ms:
                limit = min(limit, (time_ms - keep_ms, 0))
            return int(await self._redis.xtrim(stream, minid=f"{max(0, limit[0])}-{limit[1]}", approximate=False))

    async def after(self, places: Mapping[str, str], count: int) -> list[StreamEntry]:
        """Up to `count` entries a stream after the ids in `places`, of no group: nobody else's reading is touched."""
        if not places:
            return []
        with store_errors():
            return _entries(await self._redis.xread(dict(places), count=count))

    async def _read(
        self, ids: dict[str, str], group: str, consumer: str, count: int, block_ms: int | None
    ) -> list[StreamEntry]:
        if not ids:
            return []
        with store_errors():
            try:
                reply = await self._redis.xreadgroup(group, consumer, ids, count=count, block=block_ms)
            except exceptions.ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                for stream in ids:
                    await self.ensure_group(stream, group)
                return []
        return _entries(reply)


def _parts(entry_id: bytes) -> tuple[int, int]:
    time_ms, _, number = entry_id.partition(b"-")
    return int(time_ms), int(number)


def _entries(reply: Any) -> list[StreamEntry]:
    return [
        StreamEntry(stream.decode(), entry_id.decode(), {k.decode(): v for k, v in (fields or {}).items()})
        for stream, entries in pairs(reply)
        for entry_id, fields in entries
    ]


def pairs(reply: Any) -> list[tuple[bytes, Any]]:
    """XREAD's reply as (stream, entries), whichever protocol version shaped it."""
    if not reply:
        return []
    return list(reply.items()) if isinstance(reply, dict) else [(stream, entries) for stream, entries in reply]
