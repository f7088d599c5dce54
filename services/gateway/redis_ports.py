"""The gateway's own small uses of Redis beside the admission store: ledger commits, and cancels between gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import redis.asyncio as aioredis

from services.common.admission_scripts import pool_key, slot_key, store_errors
from services.common.admission_types import Pool
from services.common.clock import Clock
from services.common.errors import NotFound, StoreUnavailable

RETRY_S = 1.0


class LedgerCommits:
    """Reads which usage events the ledger has made durable."""

    def __init__(self, redis: aioredis.Redis) -> None:
        self._redis: Any = redis

    async def committed(self, pool: Pool, request_ids: Sequence[str]) -> list[str]:
        """Those of the ids that the ledger holds. Raises StoreUnavailable."""
        if not request_ids:
            return []
        with store_errors():
            scores = await self._redis.zmscore(pool_key(pool, "committed"), list(request_ids))
        return [request_id for request_id, score in zip(request_ids, scores, strict=True) if score is not None]


class CancelBus:
    """Cancels by id reach the gateway that owns the request. A lost message is a cancel that answers False."""

    def __init__(self, redis: aioredis.Redis, gateway_instance: str, clock: Clock) -> None:
        self._redis: Any = redis
        self._gateway_instance = gateway_instance
        self._clock = clock

    async def send(self, gateway_instance: str, tenant: str, request_id: str) -> bool:
        """Tell the owner; False when it does not listen (it has ended). Raises StoreUnavailable."""
        with store_errors():
            heard = await self._redis.publish(_channel(gateway_instance), f"{request_id}|{tenant}")
        return int(heard) > 0

    async def listen(self, on_cancel: Callable[[str, str], bool]) -> None:
        """Hand `(tenant, request_id)` of every cancel to `on_cancel`, until cancelled."""
        while True:
            try:
                with store_errors():
                    await self._receive(on_cancel)
            except StoreUnavailable:
                await self._clock.sleep(RETRY_S)

    async def _receive(self, on_cancel: Callable[[str, str], bool]) -> None:
        async with self._redis.pubsub() as channel:
            await channel.subscribe(_channel(self._gateway_instance))
            while True:
                message = await channel.get_message(ignore_subscribe_messages=True, timeout=1.0)
                if message is None:
                    await asyncio.sleep(0)
                    continue
                request_id, _, tenant = message["data"].decode("utf-8", errors="replace").partition("|")
                try:
                    on_cancel(tenant, request_id)
                except NotFound:
                    continue


def _channel(gateway_instance: str) -> str:
    return slot_key(gateway_instance, "cancel")
