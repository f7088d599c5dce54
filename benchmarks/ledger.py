"""Events a second from the usage stream through the consumer into the ledger and acknowledged, on both databases.

Every gateway's event comes with its worker's: one attempt an event, in reports of 500.

By batch size and by the number of rows that lie in the ledger already. Real Redis, real PostgreSQL with fsync on.
Prints a table and writes `benchmarks/results/ledger.json`. Never run by tests.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from datetime import UTC
from pathlib import Path

import redis.asyncio as aioredis
import sqlalchemy as sa
from millrace.usage.v1 import usage_event_pb2

from benchmarks.ledger_databases import databases, settle
from benchmarks.ledger_rows import TENANTS, load, make_events
from benchmarks.results import cpu_ms, machine, save
from services.common.admission_scripts import pool_key
from services.common.admission_store import AdmissionStore
from services.common.admission_types import Pool, WorkerRecord
from services.common.clock import SystemClock
from services.common.metrics import Metrics
from services.common.redis_client import connect
from services.usage.consumer import Consumer
from services.usage.ledger import last_row_id
from services.usage.store import Store, open_store
from tests.helpers.redis import RedisProcess
from tests.helpers.usage import make_attempt, report_of

POOL = Pool("echo")
# Attempts a report of a worker.
REPORT = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One measurement. Processor time an event: `cpu_us` of this process on all its threads, `server_cpu_us` of
    PostgreSQL."""

    database: str
    rows_before: int
    batch: int
    events: int
    events_per_s: float
    cpu_us: float
    server_cpu_us: float
    load: float


async def measure(client: aioredis.Redis, store: Store, batch: int, count: int) -> tuple[float, float, float]:
    """Seconds by the wall, of this process's and of the database server's processors, for `count` published events to
    be acknowledged."""
    worker = WorkerRecord("worker-1", "127.0.0.1:1", "echo", "1", POOL, "AGGREGATED")
    await AdmissionStore(client).register_worker(worker)
    stream = pool_key(POOL, "usage")
    consumer = Consumer(client, store, clock=SystemClock(), metrics=Metrics(), batch_size=batch)
    made = make_events(store.read_sync(last_row_id) + 1, count + batch)
    await _publish(client, stream, made[:batch])
    while await consumer.run_once(100):
        pass
    await _publish(client, stream, made[batch:])
    before = store.read_sync(last_row_id)
    wall, cpu, server = time.perf_counter(), time.process_time(), server_cpu_ms(store)
    done, entries = 0, count + math.ceil(count / REPORT)
    while done < entries:
        done += await consumer.run_once(100)
    spent_ms = sum(now - server.get(pid, 0.0) for pid, now in server_cpu_ms(store).items())
    spent = time.perf_counter() - wall, time.process_time() - cpu, spent_ms / 1000
    if store.read_sync(last_row_id) - before != count:
        raise SystemExit("the ledger did not take every event")
    return spent


def server_cpu_ms(store: Store) -> dict[int, float]:
    """Processor time so far of each of the database server's processes; an embedded database has none."""
    if store.dialect != "postgresql":
        return {}
    query = sa.text("SELECT pid FROM pg_stat_activity")
    pids = store.read_sync(lambda connection: list(connection.execute(query).scalars()))
    return {pid: cpu_ms(pid) for pid in pids}


async def _publish(client: aioredis.Redis, stream: str, made: list[usage_event_pb2.UsageEvent]) -> None:
    for first in range(0, len(made), REPORT):
        async with client.pipeline(transaction=False) as pipe:
            for event in made[first : first + REPORT]:
                pipe.xadd(stream, {"e": event.SerializeToString()})
            attempts = [
                make_attempt(event.request_id, event.tenant, end_time=event.times.end_time.ToDatetime(UTC))
                for event in made[first : first + REPORT]
            ]
            pipe.xadd(stream, {"w": report_of(*attempts).SerializeToString()})
            await pipe.execute()


async def measure_in_turns(stores: Mapping[int, Store], arguments: argparse.Namespace) -> list[Result]:
    """Medians by number of rows and batch. Sizes take turns, so that what else the machine does meets all of them."""
    server = RedisProcess(append_only=True).start()
    told: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    try:
        for _ in range(arguments.turns):
            for rows, store in stores.items():
                for batch in arguments.batches:
                    server.flush()
                    client = connect(server.url)
                    spent = await measure(client, store, batch, arguments.events)
                    await client.aclose()
                    told.setdefault((rows, batch), []).append(spent)
    finally:
        server.stop()
    results = []
    for (rows, batch), spent_s in told.items():
        wall, cpu, server_cpu = (statistics.median(column) for column in zip(*spent_s, strict=True))
        rate = round(arguments.events / wall)
        cpu_us, server_us = (round(seconds * 1e6 / arguments.events, 1) for seconds in (cpu, server_cpu))
        dialect = stores[rows].dialect
        results.append(Result(dialect, rows, batch, arguments.events, rate, cpu_us, server_us, machine()["load"]))
        print(" ".join(f"{value!s:>12}" for value in dataclasses.astuple(results[-1])), flush=True)
    return results


def _measure_all(arguments: argparse.Namespace) -> list[Result]:
    results = []
    for kind in arguments.databases:
        with databases(kind, arguments.keep) as url_of:
            stores = {}
            for rows in sorted(arguments.rows):
                url = url_of(f"rows_{rows}")
                stores[rows] = open_store(url)
                load(stores[rows], rows)
                settle(url)
            results += asyncio.run(measure_in_turns(stores, arguments))
            for store in stores.values():
                store.close()
    return results


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/ledger.json")
    parser.add_argument("--keep", type=Path, help="folder in which filled databases stay for the next run")
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgresql"])
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--events", type=int, default=5_000)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    print(" ".join(f"{field.name:>12}" for field in dataclasses.fields(Result)))
    results = _measure_all(arguments)
    config = {
        "events": arguments.events,
        "turns": arguments.turns,
        "tenants": TENANTS,
        "fsync": True,
        "redis_append_only": True,
    }
    print(save("ledger", config, [dataclasses.asdict(each) for each in results], arguments.json))


if __name__ == "__main__":
    main()
