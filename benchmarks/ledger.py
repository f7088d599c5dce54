"""Events a second from the usage stream through the consumer into the ledger and acknowledged, on both databases.

Every gateway's event comes with its worker's: one attempt an event, in reports of 500.

By batch size and by the number of rows that lie in the ledger already. Real Redis, real PostgreSQL with fsync on.
Prints a table and writes `benchmarks/results/ledger.json`. Never run by tests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import redis.asyncio as aioredis
import sqlalchemy as sa
from millrace.usage.v1 import usage_event_pb2

from benchmarks.results import machine, save
from services.common.admission_scripts import pool_key
from services.common.admission_store import AdmissionStore
from services.common.admission_types import Pool, WorkerRecord
from services.common.clock import SystemClock
from services.common.lifecycle import new_ulid
from services.common.metrics import Metrics
from services.common.redis_client import connect
from services.usage import schema
from services.usage.consumer import Consumer
from services.usage.ledger import last_row_id
from services.usage.store import Store, open_store
from tests.helpers.postgres import PostgresProcess
from tests.helpers.redis import RedisProcess
from tests.helpers.usage import insert, make_attempt, make_entry, make_event, report_of

POOL = Pool("echo")
TENANTS = 50
START = datetime(2026, 3, 1, tzinfo=UTC)
PRELOAD_CHUNK = 100_000
# Attempts a report of a worker.
REPORT = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One measurement; `cpu_us` is this process's own time an event, on all its threads."""

    database: str
    rows_before: int
    batch: int
    events: int
    events_per_s: float
    cpu_us: float
    load: float


@contextlib.contextmanager
def databases(kind: str) -> Iterator[str]:
    """URL of an empty database that keeps what it commits."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/usage.sqlite3"
        return
    server = PostgresProcess({"fsync": "on", "shared_buffers": "256MB", "max_wal_size": "4GB"}).start()
    try:
        yield server.new_database()
    finally:
        server.stop()


def events(count: int) -> list[usage_event_pb2.UsageEvent]:
    """Events as gateways make them, of many tenants on two days, ids in the order of time."""
    made = []
    for number in range(count):
        event = make_event(new_ulid(), f"tenant-{number % TENANTS}", prompt=900, cached=256, completion=180)
        event.times.end_time.FromDatetime(START + timedelta(seconds=number % 172_800))
        for name in ("start_time", "first_token_time"):
            getattr(event.times, name).CopyFrom(event.times.admit_time)
        event.metadata["team"] = f"team-{number % 7}"
        event.user = f"user-{number % 1000}"
        event.traceparent = f"00-{number:032x}-{number:016x}-00"
        event.model.manifest_digest = b"\x07" * 32
        made.append(event)
    return made


def preload(store: Store, rows: int) -> None:
    """Copies of one row, made inside the database, until the ledger has `rows`."""
    if store.read_sync(last_row_id) == 0:
        insert(store, [make_entry("0" * 26, "tenant-0")])
    table = schema.ledger
    names = [column.name for column in table.columns]
    changed = {
        "row_id": "n",
        "request_id": "substr('00000000000000000000000000' || n, -26)",
        "tenant": f"'tenant-' || (n % {TENANTS})",
    }
    if store.dialect == "postgresql":
        changed["request_id"] = "lpad(n::text, 26, '0')"
        changed["end_time"] = "end_time + (n % 2592000) * interval '1 second'"
    picked = ", ".join(changed.get(name, f'"{name}"') for name in names)
    listed = ", ".join(f'"{name}"' for name in names)
    numbers = "WITH RECURSIVE s(n) AS (SELECT :first UNION ALL SELECT n + 1 FROM s WHERE n < :last) "
    statement = f"INSERT INTO ledger ({listed}) {numbers} SELECT {picked} FROM s CROSS JOIN ledger WHERE row_id = 1"
    if store.dialect == "postgresql":
        statement = (
            f"INSERT INTO ledger ({listed}) SELECT {picked} FROM generate_series(CAST(:first AS bigint), :last) n "
            "CROSS JOIN ledger WHERE row_id = 1"
        )
    while (have := store.read_sync(last_row_id)) < rows:
        last = min(rows, have + PRELOAD_CHUNK)

        def work(connection: sa.Connection, first: int = have + 1, last: int = last) -> None:
            connection.execute(sa.text(statement), {"first": first, "last": last})
            connection.execute(sa.update(schema.ledger_head).values(last_row_id=last))

        store.write_sync(work)


async def measure(client: aioredis.Redis, store: Store, batch: int, count: int) -> tuple[float, float]:
    """Seconds by the wall, and of this process's processors, for `count` published events to be acknowledged."""
    worker = WorkerRecord("worker-1", "127.0.0.1:1", "echo", "1", POOL, "AGGREGATED")
    await AdmissionStore(client).register_worker(worker)
    stream = pool_key(POOL, "usage")
    consumer = Consumer(client, store, clock=SystemClock(), metrics=Metrics(), batch_size=batch)
    made = events(count + batch)
    await _publish(client, stream, made[:batch])
    while await consumer.run_once(100):
        pass
    await _publish(client, stream, made[batch:])
    before = store.read_sync(last_row_id)
    wall, cpu = time.perf_counter(), time.process_time()
    done, entries = 0, count + math.ceil(count / REPORT)
    while done < entries:
        done += await consumer.run_once(100)
    spent = time.perf_counter() - wall, time.process_time() - cpu
    if store.read_sync(last_row_id) - before != count:
        raise SystemExit("the ledger did not take every event")
    return spent


async def _publish(client: aioredis.Redis, stream: str, made: list[usage_event_pb2.UsageEvent]) -> None:
    for first in range(0, len(made), REPORT):
        async with client.pipeline(transaction=False) as pipe:
            for event in made[first : first + REPORT]:
                pipe.xadd(stream, {"e": event.SerializeToString()})
            attempts = [make_attempt(event.request_id, event.tenant) for event in made[first : first + REPORT]]
            pipe.xadd(stream, {"w": report_of(*attempts).SerializeToString()})
            await pipe.execute()


async def _measure_all(arguments: argparse.Namespace) -> list[Result]:
    results = []
    server = RedisProcess(append_only=True).start()
    try:
        for kind in arguments.databases:
            with databases(kind) as url:
                store = open_store(url)
                for rows in sorted(arguments.rows):
                    preload(store, rows)
                    for batch in arguments.batches:
                        server.flush()
                        client = connect(server.url)
                        before = store.read_sync(last_row_id)
                        wall, cpu = await measure(client, store, batch, arguments.events)
                        await client.aclose()
                        rate, cpu_us = round(arguments.events / wall), round(cpu * 1e6 / arguments.events, 1)
                        results.append(Result(kind, before, batch, arguments.events, rate, cpu_us, machine()["load"]))
                        print(" ".join(f"{value!s:>12}" for value in dataclasses.astuple(results[-1])), flush=True)
                store.close()
    finally:
        server.stop()
    return results


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/ledger.json")
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 100_000, 1_000_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--events", type=int, default=20_000)
    arguments = parser.parse_args()
    print(" ".join(f"{field.name:>12}" for field in dataclasses.fields(Result)))
    results = asyncio.run(_measure_all(arguments))
    config = {"events": arguments.events, "tenants": TENANTS, "fsync": True, "redis_append_only": True}
    print(save("ledger", config, [dataclasses.asdict(each) for each in results], arguments.json))


if __name__ == "__main__":
    main()
