"""Usage events, stores on both databases, and readings of a ledger for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import redis.asyncio as aioredis
import sqlalchemy as sa
from alembic import command
from alembic.config import Config as AlembicConfig
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_scripts import pool_key
from services.common.admission_store import AdmissionStore
from services.common.admission_types import Pool, WorkerRecord
from services.usage import migrations, schema
from services.usage.events import LedgerEntry, parse_event
from services.usage.ledger import Balance, insert_entries, last_row_id, read_balances, sum_rows
from services.usage.store import Store

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def make_event(
    request_id: str,
    tenant: str = "acme",
    *,
    prompt: int = 10,
    cached: int = 0,
    completion: int = 5,
    end_time: datetime = START,
    state: common_pb2.TerminalState = common_pb2.TERMINAL_STATE_COMPLETED,
) -> usage_event_pb2.UsageEvent:
    """An event as a gateway makes it for a request that was billed what was delivered."""
    tokens = common_pb2.TokenUsage(
        prompt_token_count=prompt, cached_token_count=cached, completion_token_count=completion
    )
    event = usage_event_pb2.UsageEvent(
        request_id=request_id,
        tenant=tenant,
        project="search",
        key_id="k1",
        model=common_pb2.ModelRef(model="echo", version="1"),
        pool=common_pb2.PoolRef(model="echo", pool="default"),
        priority_class=common_pb2.PRIORITY_CLASS_INTERACTIVE,
        length_class=common_pb2.LENGTH_CLASS_SHORT,
        terminal_state=state,
        finish_reason=common_pb2.FINISH_REASON_STOP,
        delivered=tokens,
        billed=tokens,
        attempt=1,
        epoch=257,
        worker_instance="worker-1",
        gateway_instance="gateway-1",
        choice_token_counts=[completion],
    )
    event.times.admit_time.FromDatetime(end_time - timedelta(seconds=1))
    event.times.end_time.FromDatetime(end_time)
    return event


def make_entry(request_id: str, tenant: str = "acme", **fields: object) -> LedgerEntry:
    """`make_event`, parsed as the consumer parses it."""
    return parse(make_event(request_id, tenant, **fields))  # type: ignore[arg-type]


def parse(event: usage_event_pb2.UsageEvent) -> LedgerEntry:
    """The event as the consumer reads it from the stream."""
    return parse_event(event.SerializeToString(), published_ms=0)


def insert(store: Store, entries: Sequence[LedgerEntry], now: datetime = START) -> list[LedgerEntry]:
    """Insert in one transaction; returns the new ones."""
    return store.write_sync(lambda connection: insert_entries(connection, entries, now))


def migrate(store: Store, revision: str) -> None:
    """Bring the schema of an open database to another revision, forwards or back."""
    config = AlembicConfig()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))

    def work(connection: sa.Connection) -> None:
        config.attributes["connection"] = connection
        move = command.upgrade if revision == "head" else command.downgrade
        move(config, revision)

    store.write_sync(work)


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """All that the ledger says, apart from when rows were inserted."""

    request_ids: tuple[str, ...]
    balances: tuple[Balance, ...]


def reading(store: Store) -> Reading:
    """Read the ledger and check that balances, row ids and head agree with its rows."""

    def work(connection: sa.Connection) -> Reading:
        rows = connection.execute(
            sa.select(schema.ledger.c.row_id, schema.ledger.c.request_id).order_by("row_id")
        ).all()
        balances = read_balances(connection)
        assert balances == sum_rows(connection)
        assert [row.row_id for row in rows] == list(range(1, len(rows) + 1))
        assert last_row_id(connection) == len(rows)
        return Reading(tuple(sorted(row.request_id for row in rows)), tuple(balances))

    return store.read_sync(work)


def make_attempt(
    request_id: str,
    tenant: str = "acme",
    *,
    epoch: int = 257,
    worker: str = "worker-1",
    attempt: int = 1,
    tokens: tuple[int, int] = (0, 5),
    end_time: datetime = START,
) -> usage_event_pb2.AttemptEvent:
    """What a worker says of an attempt that made the output tokens [start, end) of one choice in one second."""
    event = usage_event_pb2.AttemptEvent(
        request_id=request_id,
        tenant=tenant,
        attempt=attempt,
        epoch=epoch,
        worker_instance=worker,
        model=common_pb2.ModelRef(model="echo", version="1"),
        prompt_token_count=10,
        prefill_token_count=10,
        decode_token_count=max(0, tokens[1] - tokens[0] - 1),
        block_milliseconds=40,
        choices=[usage_event_pb2.ChoiceRange(choice=0, start_index=tokens[0], end_index=tokens[1])],
    )
    event.prefill_time.FromMilliseconds(250)
    event.decode_time.FromMilliseconds(750)
    event.end_time.FromDatetime(end_time)
    return event


def make_time(
    sequence: int, worker: str = "worker-1", *, busy_s: int = 4, idle_s: int = 6, end_time: datetime = START
) -> usage_event_pb2.WorkerTime:
    """A span of a worker's time."""
    span = usage_event_pb2.WorkerTime(
        worker_instance=worker, sequence=sequence, model=common_pb2.ModelRef(model="echo", version="1")
    )
    span.busy.FromSeconds(busy_s)
    span.idle.FromSeconds(idle_s)
    span.start_time.FromDatetime(end_time - timedelta(seconds=busy_s + idle_s))
    span.end_time.FromDatetime(end_time)
    return span


async def publish_report(client: aioredis.Redis, pool: Pool, report: usage_event_pb2.WorkerReport) -> None:
    """As a worker does."""
    await client.xadd(pool_key(pool, "usage"), {"w": report.SerializeToString()})


async def know_pools(client: aioredis.Redis, *pools: Pool) -> None:
    """Each pool has a worker, so that the usage service reads its stream."""
    for number, pool in enumerate(pools):
        record = WorkerRecord(f"worker-{number}", "127.0.0.1:1", "echo", "1", pool, "AGGREGATED")
        await AdmissionStore(client).register_worker(record)


def report_of(*parts: usage_event_pb2.AttemptEvent | usage_event_pb2.WorkerTime) -> usage_event_pb2.WorkerReport:
    """One report of all of them."""
    report = usage_event_pb2.WorkerReport()
    for part in parts:
        if isinstance(part, usage_event_pb2.AttemptEvent):
            report.attempts.append(part)
        else:
            report.times.append(part)
    return report
