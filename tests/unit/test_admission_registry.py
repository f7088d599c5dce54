"""Leases, the hot copy of keys, hash slots, failures of Redis and the usage stream's reader."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from datetime import date
from typing import Any

import pytest
import redis.asyncio as aioredis

from services.common.admission_scripts import PRELUDES, ScriptRunner
from services.common.admission_store import AdmissionStore, usage_stream
from services.common.admission_types import KeyRecord, Ownership, Pool, PoolCaps, QuotaLimits, Reserve, WorkerRecord
from services.common.errors import StoreUnavailable
from services.common.redis_client import connect
from services.common.redis_pipeline import Arg
from services.common.route_store import RouteStore
from services.common.routes import RouteTable
from services.common.streams import UsageStream
from services.gateway.idempotency_store import IdempotencyStore
from tests.helpers.admission import CAPS, POOL, StoreTime, make_entry, make_store, make_terminal, open_budget
from tests.helpers.redis import RedisProcess

WORKER = WorkerRecord("worker-1", "unix:/tmp/w", "echo", "1", POOL, "AGGREGATED")
KEY = KeyRecord("key-1", "acme", "default", ("echo",), 2.0, QuotaLimits(requests_per_minute=0), None)


@pytest.fixture
def time() -> StoreTime:
    return StoreTime()


@pytest.fixture
def store(redis_client: aioredis.Redis, time: StoreTime) -> AdmissionStore:
    return make_store(redis_client, time)


async def test_workers_live_as_long_as_their_lease_and_pools_for_ever(store: AdmissionStore, time: StoreTime) -> None:
    await store.register_worker(WORKER)
    time.advance(4_999)
    assert await store.list_workers() == [WORKER]
    await store.register_worker(WORKER)
    time.advance(4_999)
    assert await store.list_workers() == [WORKER]
    time.advance(1)

    assert await store.list_workers() == []
    assert await store.list_pools() == [POOL]


async def test_a_drained_worker_and_gateway_leave_at_once(store: AdmissionStore, time: StoreTime) -> None:
    await store.register_worker(WORKER)
    await store.renew_gateway("gateway-1", "host:1")
    await store.renew_gateway("gateway-2", "host:2")

    await store.deregister_worker(WORKER)
    await store.deregister_gateway("gateway-1")

    assert await store.list_workers() == []
    assert await store.list_gateways() == {"gateway-2": "host:2"}
    time.advance(10_000)
    assert await store.list_gateways() == {}


async def test_a_flushed_table_of_keys_is_unavailable_never_unknown(
    store: AdmissionStore, redis_client: aioredis.Redis
) -> None:
    digest = bytes(32)
    with pytest.raises(StoreUnavailable):
        await store.lookup_key(digest)
    await store.put_key(digest, KEY)
    with pytest.raises(StoreUnavailable):
        await store.lookup_key(digest)

    await store.replace_keys({digest: KEY})

    assert await store.lookup_key(digest) == KEY
    assert await store.lookup_key(b"1" * 32) is None
    await store.replace_keys({})
    assert await store.lookup_key(digest) is None


def hash_slot(key: bytes) -> int:
    """Redis Cluster's slot: CRC16 (XMODEM) of the hash tag."""
    start = key.index(b"{") + 1
    return crc_hqx(key[start : key.index(b"}", start)], 0) % 16_384


async def test_every_key_of_every_script_is_in_one_slot(
    redis_client: aioredis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[str, set[int]]] = []
    real = ScriptRunner.run

    async def spy(self: ScriptRunner, name: str, keys: Sequence[str], *args: Arg | None) -> Any:
        async with redis_client.monitor() as monitor:
            result = await real(self, name, keys, *args)
            await redis_client.echo("end of script")
            touched = set()
            while "end of script" not in (command := (await monitor.next_command())["command"]):
                touched |= {part for part in command.split(" ") if part.startswith("mr:{")}
        spans.append((name, {hash_slot(key.encode()) for key in (*touched, *keys)}))
        return result

    monkeypatch.setattr(ScriptRunner, "run", spy)
    store = make_store(redis_client, StoreTime())
    limits = QuotaLimits(9, 99, 9, 99, 99, 99, 99, 99, 99, 99)
    ask = Reserve("acme", "r1", 5, 5, 5, limits, "key-1", limits, (1, 2))
    await open_budget(store, date(2026, 3, 1), "acme", "key-1")
    await store.reserve(ask)
    await store.renew_reservations("acme", ["r1"])
    await store.renew_budget(ask, 5)
    await store.enqueue(POOL, make_entry("r1"), CAPS)
    [claim] = await store.claim(POOL, "router-1", 1)
    await store.renew_claims(POOL, [claim.claim_id])
    await store.return_claims(POOL, [claim.claim_id])
    await store.claim(POOL, "router-1", 1)
    await store.own(POOL, [Ownership("r1", 512, "worker-1")])
    await store.enqueue(POOL, make_entry("r2"), PoolCaps(requests=0))
    await store.finish(POOL, [make_terminal("r1")])
    await store.settle("acme", "r1", 5, 5)
    await store.enqueue(POOL, make_entry("r3"), CAPS)
    await store.close_claims(POOL, await store.claim(POOL, "router-1", 1))
    await store.register_worker(WORKER)
    await store.list_workers()
    await RouteStore(redis_client).replace(RouteTable(), who="ann", why="none")
    await IdempotencyStore(redis_client).claim("acme", "key", "token", body="b", owner="gateway-1", instead_of=None)

    assert {name for name, _ in spans} == set(PRELUDES)
    assert [name for name, slots in spans if len(slots) != 1] == []
    keys = {key: hash_slot(key) for key in await redis_client.keys("*")}
    # The tenant's, the pool's, the workers' and the routes'.
    assert len(set(keys.values())) == 4
    assert hash_slot(b"mr:{123456789}:x") == 0x31C3 % 16_384


async def test_a_redis_that_is_away_is_store_unavailable(tmp_path: Any) -> None:
    client = connect(f"unix://{tmp_path}/nobody.sock")
    store = AdmissionStore(client)

    with pytest.raises(StoreUnavailable) as caught:
        await store.claim(POOL, "router-1", 1)
    with pytest.raises(StoreUnavailable):
        await store.read_requests(POOL, ["r1"])

    assert caught.value.retry_after_s == 1.0
    await client.aclose()


async def test_redis_time_is_used_without_an_override(redis_client: aioredis.Redis) -> None:
    store = AdmissionStore(redis_client)

    await store.enqueue(POOL, make_entry("r1"), CAPS, remaining_ms=50_000)
    [claim] = await store.claim(POOL, "router-1", 1)

    assert 45_000 < claim.remaining_ms <= 50_000
    assert await store.time_ms() > 1_700_000_000_000
    uptime_s, identity = await store.uptime()
    assert uptime_s >= 0
    assert identity.endswith("/master")


async def test_the_reader_hands_out_unacked_entries_again_after_a_restart(redis_client: aioredis.Redis) -> None:
    stream = usage_stream(Pool("echo"))
    reader = UsageStream(redis_client)
    await reader.ensure_group(stream, "usage")
    await redis_client.xadd(stream, {"e": b"1"})
    await redis_client.xadd(stream, {"e": b"2"})
    first = await reader.read([stream], "usage", "c", 1, 10)
    [second] = await reader.read([stream], "usage", "c", 10, 10)
    await reader.ack(stream, "usage", [first[0].entry_id])

    restarted = UsageStream(redis_client)
    await redis_client.xadd(stream, {"e": b"3"})
    pending = await restarted.read([stream], "usage", "c", 10, 10)
    fresh = await restarted.read([stream], "usage", "c", 10, 10)

    assert [e.fields["e"] for e in pending] == [b"2"]
    assert pending[0].entry_id == second.entry_id
    assert [e.fields["e"] for e in fresh] == [b"3"]


async def test_trimming_keeps_everything_that_is_not_acked(redis_client: aioredis.Redis) -> None:
    stream = usage_stream(POOL)
    reader = UsageStream(redis_client)
    await reader.ensure_group(stream, "usage")
    for i in range(4):
        await redis_client.xadd(stream, {"e": str(i)})
    entries = await reader.read([stream], "usage", "c", 3, 10)
    await reader.ack(stream, "usage", [entries[0].entry_id, entries[2].entry_id])

    assert await reader.trim_acked(stream, "usage") == 1
    await reader.ack(stream, "usage", [entries[1].entry_id])
    assert await reader.trim_acked(stream, "usage", keep_ms=60_000) == 0
    assert await reader.trim_acked(stream, "usage") == 2

    [last] = await reader.read([stream], "usage", "c", 10, 10)
    assert last.fields["e"] == b"3"


async def test_a_flushed_redis_gets_its_group_back(redis_client: aioredis.Redis, redis_server: RedisProcess) -> None:
    stream = usage_stream(POOL)
    reader = UsageStream(redis_client)
    await reader.ensure_group(stream, "usage")
    await reader.read([stream], "usage", "c", 10, 10)
    redis_server.flush()
    assert await reader.read([stream], "usage", "c", 10, 10) == []
    await redis_client.xadd(stream, {"e": b"1"})

    assert len(await reader.read([stream], "usage", "c", 10, 10)) == 1
