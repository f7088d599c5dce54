"""From the usage stream into the ledger: exactly once through crashes, replays, poison and stores that go away."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import redis.asyncio as aioredis
import sqlalchemy as sa
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy.exc import DataError

from services.common.admission_scripts import pool_key
from services.common.admission_types import Pool
from services.common.errors import StoreUnavailable
from services.common.metrics import Metrics
from services.usage import consumer as consumer_module
from services.usage import schema
from services.usage.attempts import MAX_REPORT_BYTES
from services.usage.consumer import COMMITTED_KEPT_MS, CONSUMER, GROUP, REREAD_EVERY_S, Consumer
from services.usage.ledger import read_dead_letters
from services.usage.store import Store, open_store
from tests.helpers.fake_clock import FakeClock
from tests.helpers.redis import RedisProcess
from tests.helpers.stack import ROOT, clean_environment
from tests.helpers.usage import (
    START,
    Reading,
    insert,
    know_pools,
    make_attempt,
    make_event,
    make_time,
    parse,
    reading,
    report_of,
)

POOL = Pool("echo")
OTHER_POOL = Pool("echo", "batch")
STREAM = pool_key(POOL, "usage")
CRASH_POINTS = (
    "usage.after_read",
    "usage.before_insert",
    "usage.after_insert",
    "usage.before_commit",
    "usage.after_commit",
    "usage.before_ack",
    "usage.after_ack",
)


async def publish(
    client: aioredis.Redis, events: Sequence[usage_event_pb2.UsageEvent | bytes], pool: Pool = POOL
) -> None:
    for event in events:
        raw = event if isinstance(event, bytes) else event.SerializeToString()
        await client.xadd(pool_key(pool, "usage"), {"e": raw})


def make_consumer(client: aioredis.Redis, store: Store, clock: FakeClock | None = None, batch: int = 8) -> Consumer:
    return Consumer(client, store, clock=clock or FakeClock(), metrics=Metrics(), batch_size=batch)


async def drain(consumer: Consumer) -> None:
    while await consumer.run_once(10):
        pass


def make_events(count: int) -> list[usage_event_pb2.UsageEvent]:
    return [make_event(f"r{n:03}", tenant=f"t{n % 3}", completion=n) for n in range(count)]


async def test_events_of_all_pools_become_rows_and_are_acked_published_and_trimmed(
    store: Store, redis_client: aioredis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_module, "KEPT_MS", 0)
    await know_pools(redis_client, POOL, OTHER_POOL)
    await publish(redis_client, [make_event("r1"), make_event("r2")])
    await publish(redis_client, [make_event("r3")], OTHER_POOL)

    await drain(make_consumer(redis_client, store))

    assert reading(store).request_ids == ("r1", "r2", "r3")
    for pool, ids in ((POOL, {b"r1", b"r2"}), (OTHER_POOL, {b"r3"})):
        assert (await redis_client.xpending(pool_key(pool, "usage"), GROUP))["pending"] == 0
        assert set(await redis_client.zrange(pool_key(pool, "committed"), 0, -1)) == ids
        assert await redis_client.xlen(pool_key(pool, "usage")) == 0


async def test_names_of_committed_requests_go_after_an_hour(store: Store, redis_client: aioredis.Redis) -> None:
    await know_pools(redis_client, POOL)
    clock = FakeClock()
    consumer = make_consumer(redis_client, store, clock)
    await publish(redis_client, [make_event("r1")])
    await drain(consumer)

    clock.jump(COMMITTED_KEPT_MS / 1000 + 1)
    await publish(redis_client, [make_event("r2")])
    await drain(consumer)

    assert await redis_client.zrange(pool_key(POOL, "committed"), 0, -1) == [b"r2"]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\xff\xff not a message", "not a UsageEvent"),
        (b"", "request_id is empty"),
        (make_event("bad", tenant="").SerializeToString(), "tenant is empty"),
        (make_event("bad", prompt=-1).SerializeToString(), "negative"),
        (make_event("bad", prompt=1, cached=2).SerializeToString(), "larger than its whole"),
        (make_event("bad", state=common_pb2.TERMINAL_STATE_UNSPECIFIED).SerializeToString(), "terminal_state"),
        (make_event("bad", state=common_pb2.TERMINAL_STATE_REJECTED).SerializeToString(), "rejected request is billed"),
        (make_event("bad" * 100).SerializeToString(), "more than 256"),
        (b"\x00" * 300_000, "more than 262144"),
        (b"\x00" * 1_100_000, "more than 262144"),
    ],
)
async def test_a_poison_event_is_parked_with_its_reason_and_holds_up_nobody(
    raw: bytes, reason: str, tmp_path: Path, redis_client: aioredis.Redis
) -> None:
    store = open_store(f"sqlite:///{tmp_path}/usage.sqlite3")
    await know_pools(redis_client, POOL)
    await publish(redis_client, [make_event("r1"), raw, make_event("r2")])

    await drain(make_consumer(redis_client, store))

    assert reading(store).request_ids == ("r1", "r2")
    letters = store.read_sync(read_dead_letters)
    assert [letter.payload for letter in letters] == [raw[: MAX_REPORT_BYTES + 1]]
    assert reason in letters[0].reason
    assert (await redis_client.xpending(STREAM, GROUP))["pending"] == 0
    store.close()


async def test_an_event_that_only_the_database_refuses_is_parked_alone(
    store: Store, redis_client: aioredis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = consumer_module.insert_entries

    def refusing(connection: sa.Connection, entries: Sequence[object], now: object) -> object:
        fresh = real(connection, entries, now)  # type: ignore[arg-type]
        if any(entry.request_id == "r2" for entry in fresh):
            raise DataError("INSERT", {}, ValueError("out of range"))
        return fresh

    monkeypatch.setattr(consumer_module, "insert_entries", refusing)
    await know_pools(redis_client, POOL)
    await publish(redis_client, [make_event("r1"), make_event("r2"), make_event("r3")])

    await drain(make_consumer(redis_client, store))

    assert reading(store).request_ids == ("r1", "r3")
    assert [letter.reason for letter in store.read_sync(read_dead_letters)] == ["the database refuses it: ValueError"]
    # Durable is durable: the gateway may forget the parked one too.
    assert set(await redis_client.zrange(pool_key(POOL, "committed"), 0, -1)) == {b"r1", b"r2", b"r3"}


async def test_entries_of_a_service_that_died_elsewhere_are_taken_over(
    store: Store, redis_client: aioredis.Redis
) -> None:
    await know_pools(redis_client, POOL)
    clock = FakeClock()
    living = make_consumer(redis_client, store, clock)
    await living.run_once(10)
    await publish(redis_client, [make_event("r1")])
    await redis_client.xreadgroup(GROUP, CONSUMER, {STREAM: ">"})

    await drain(living)
    assert reading(store).request_ids == ()
    clock.jump(REREAD_EVERY_S)
    await drain(living)

    assert reading(store).request_ids == ("r1",)


async def test_while_redis_is_away_the_consumer_waits_and_then_goes_on(store: Store, tmp_path: Path) -> None:
    server = RedisProcess().start()
    client = aioredis.Redis.from_url(server.url, protocol=2)
    try:
        await know_pools(client, POOL)
        consumer = make_consumer(client, store)
        await publish(client, [make_event("r1")])
        await drain(consumer)

        server.kill()
        with pytest.raises(StoreUnavailable):
            await consumer.run_once(10)
        server.start()
        await publish(client, [make_event("r1"), make_event("r2")])
        await drain(consumer)

        assert reading(store).request_ids == ("r1", "r2")
    finally:
        await client.aclose()
        server.stop()


async def test_a_flushed_redis_costs_no_row_once_outboxes_publish_again(
    store: Store, redis_client: aioredis.Redis
) -> None:
    events = make_events(6)
    await know_pools(redis_client, POOL)
    consumer = make_consumer(redis_client, store)
    await publish(redis_client, events[:3])
    await drain(consumer)

    await redis_client.flushall()
    await know_pools(redis_client, POOL)
    await publish(redis_client, events)
    # The first read finds no group and makes it again.
    for _ in range(2):
        await drain(consumer)

    assert reading(store).request_ids == tuple(event.request_id for event in events)


def test_every_crash_point_of_the_code_is_in_the_matrix() -> None:
    text = "".join(path.read_text() for path in (ROOT / "services" / "usage").rglob("*.py"))

    assert set(re.findall(r'crash_point\("([^"]+)"\)', text)) == set(CRASH_POINTS)


def run_until_it_crashes(point: str, database_url: str, redis_url: str, folder: Path) -> int:
    settings = {
        "MILLRACE_REDIS_URL": redis_url,
        "MILLRACE_DATABASE_URL": database_url,
        "MILLRACE_DATA_DIR": str(folder / "data"),
        "MILLRACE_GRPC_LISTEN": f"unix:{folder}/usage.sock",
        "MILLRACE_CRASH_AT": point,
        "MILLRACE_BATCH_SIZE": "5",
    }
    argv = [sys.executable, "-m", "services.usage"]
    environment = clean_environment(folder, settings)
    return subprocess.run(argv, env=environment, cwd=ROOT, timeout=110, capture_output=True, check=False).returncode


def make_skewed_events(count: int) -> list[usage_event_pb2.UsageEvent]:
    """Around midnight, by clocks that are an hour off in either direction."""
    midnight = START.replace(hour=0)
    skews = (timedelta(hours=-1), timedelta(), timedelta(hours=1))
    return [
        make_event(f"r{n:03}", tenant=f"t{n % 3}", completion=n, end_time=midnight + skews[n % 3]) for n in range(count)
    ]


async def publish_mixed(
    client: aioredis.Redis,
    events: Sequence[usage_event_pb2.UsageEvent],
    reports: Sequence[usage_event_pb2.WorkerReport],
) -> None:
    """Everything twice, shuffled."""
    bodies = [("e", event.SerializeToString()) for event in events]
    bodies += [("w", report.SerializeToString()) for report in reports]
    for field, body in random.Random(len(bodies)).sample(2 * bodies, 2 * len(bodies)):
        await client.xadd(STREAM, {field: body})


def count_worker_rows(connection: sa.Connection) -> tuple[int, int, int, int]:
    attempts, times = schema.attempts.c, schema.worker_times.c
    shares = sa.func.sum(attempts.prefill_nanos + attempts.decode_nanos)
    told = connection.execute(sa.select(sa.func.count(), shares)).one()
    spent = connection.execute(sa.select(sa.func.count(), sa.func.sum(times.busy_nanos + times.idle_nanos))).one()
    return told[0], int(told[1]), spent[0], int(spent[1])


def expected(store: Store, events: Sequence[usage_event_pb2.UsageEvent]) -> Reading:
    insert(store, [parse(event) for event in events])
    return reading(store)


@pytest.mark.parametrize(
    ("database_url", "point"),
    [("postgresql", point) for point in CRASH_POINTS]
    + [("sqlite", point) for point in ("usage.after_insert", "usage.after_commit")],
    indirect=["database_url"],
)
async def test_a_crash_at_any_point_and_two_replays_from_zero_leave_the_totals_exact(
    point: str,
    store: Store,
    database_url: str,
    redis_server: RedisProcess,
    redis_client: aioredis.Redis,
    tmp_path: Path,
) -> None:
    events = make_skewed_events(12)
    reports = [report_of(*(make_attempt(f"r{n:03}") for n in range(first, first + 4)), make_time(first + 1))
               for first in (0, 4, 8)]  # fmt: skip
    reference = open_store(f"sqlite:///{tmp_path}/reference.sqlite3")
    wanted = expected(reference, events)
    reference.close()
    await know_pools(redis_client, POOL)
    await publish_mixed(redis_client, events, reports)

    code = await asyncio.to_thread(run_until_it_crashes, point, database_url, redis_server.url, tmp_path)
    assert code == 137, f"the service should have died at {point}"
    for _ in range(2):
        await redis_client.xgroup_setid(STREAM, GROUP, "0")
        await publish_mixed(redis_client, events, reports)
        await drain(make_consumer(redis_client, store))

    assert reading(store) == wanted
    assert store.read_sync(count_worker_rows) == (12, 12 * 10**9, 3, 3 * 10 * 10**9)
    assert store.read_sync(read_dead_letters) == []
    assert (await redis_client.xpending(STREAM, GROUP))["pending"] == 0


async def test_the_insert_is_a_span_of_the_requests_trace(
    store: Store, redis_client: aioredis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(consumer_module, "tracer", lambda: provider.get_tracer("test"))
    event = make_event("r1", prompt=11, completion=4)
    event.traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    await know_pools(redis_client, POOL)
    await publish(redis_client, [event, event])

    await drain(make_consumer(redis_client, store))

    (span,) = exporter.get_finished_spans()
    assert span.name == "usage.insert"
    assert f"{span.context.trace_id:032x}" == "ab" * 16
    assert f"{span.parent.span_id:016x}" == "cd" * 8
    assert span.attributes["millrace.request_id"] == "r1"
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    provider.shutdown()
