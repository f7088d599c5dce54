"""What workers computed, from their engines into the ledger: exactly once, beside the rows that they explain."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as aioredis
import sqlalchemy as sa
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_scripts import pool_key
from services.common.metrics import Metrics
from services.usage import schema
from services.usage.consumer import Consumer
from services.usage.ledger import read_dead_letters
from services.usage.store import Store, open_store
from tests.helpers.fake_clock import FakeClock
from tests.helpers.four_services import running_services
from tests.helpers.redis import RedisProcess
from tests.helpers.usage import START, know_pools, make_attempt, make_event, make_time, publish_report, reading
from tests.helpers.waiting import until
from tests.integration.test_usage_consumer import POOL, publish


def rows_of(store: Store, table: sa.Table) -> list[dict[str, Any]]:
    query = sa.select(table).order_by(*table.primary_key.columns)
    return store.read_sync(lambda connection: [dict(row) for row in connection.execute(query).mappings()])


def make_consumer(client: aioredis.Redis, store: Store) -> Consumer:
    return Consumer(client, store, clock=FakeClock(), metrics=Metrics(), batch_size=8)


async def drain(consumer: Consumer) -> None:
    while await consumer.run_once(10):
        pass


async def test_reports_become_rows_once_however_often_they_come(store: Store, redis_client: aioredis.Redis) -> None:
    await know_pools(redis_client, POOL)
    first = usage_event_pb2.WorkerReport(attempts=[make_attempt("r1"), make_attempt("r2")], times=[make_time(1)])
    second = usage_event_pb2.WorkerReport(attempts=[make_attempt("r2"), make_attempt("r2", epoch=512)])
    second.times.append(make_time(1))
    reports = [first, second]
    for report in (*reports, *reversed(reports)):
        await publish_report(redis_client, POOL, report)
    await publish(redis_client, [make_event("r1")])

    await drain(make_consumer(redis_client, store))

    attempts = rows_of(store, schema.attempts)
    assert [(row["request_id"], row["epoch"]) for row in attempts] == [("r1", 257), ("r2", 257), ("r2", 512)]
    assert (attempts[0]["prefill_nanos"], attempts[0]["decode_nanos"]) == (250_000_000, 750_000_000)
    assert (attempts[0]["choices"], attempts[0]["block_milliseconds"]) == ([[0, 0, 5]], 40)
    assert attempts[0]["end_time"] == START
    assert [(row["busy_nanos"], row["idle_nanos"]) for row in rows_of(store, schema.worker_times)] == [
        (4_000_000_000, 6_000_000_000)
    ]
    assert reading(store).request_ids == ("r1",)
    assert (await redis_client.xpending(pool_key(POOL, "usage"), "ledger"))["pending"] == 0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda report: report.attempts[0].ClearField("request_id"), "request_id is empty"),
        (lambda report: report.attempts[0].ClearField("end_time"), "end_time is missing"),
        (lambda report: setattr(report.attempts[0], "decode_token_count", -1), "negative count"),
        (lambda report: setattr(report.attempts[0].choices[0], "start_index", 9), "negative count"),
        (lambda report: setattr(report.times[0].busy, "seconds", -1), "busy is out of range"),
    ],
)
async def test_a_report_that_cannot_be_true_is_a_dead_letter(
    store: Store,
    redis_client: aioredis.Redis,
    spoil: Callable[[usage_event_pb2.WorkerReport], None],
    reason: str,
) -> None:
    await know_pools(redis_client, POOL)
    report = usage_event_pb2.WorkerReport(attempts=[make_attempt("r1")], times=[make_time(1)])
    spoil(report)
    await publish_report(redis_client, POOL, report)
    await redis_client.xadd(pool_key(POOL, "usage"), {"w": b"\xff\xff nonsense"})

    await drain(make_consumer(redis_client, store))

    letters = [letter.reason for letter in store.read_sync(read_dead_letters)]
    assert len(letters) == 2
    assert reason in letters[0]
    assert "not a WorkerReport" in letters[1]
    assert rows_of(store, schema.attempts) == []


async def test_each_attempt_of_a_running_stack_is_told_beside_its_row(
    redis_server: RedisProcess, tmp_path: Path
) -> None:
    async with running_services(redis_server.url, tmp_path) as services:
        ids = [await _complete(services.client, 3 + n) for n in range(4)]
        await services.worker.parts.reporter.flush(last=True)
        store = open_store(f"sqlite:///{tmp_path / 'ledger.sqlite3'}")
        await until(lambda: len(rows_of(store, schema.attempts)) == 4 == len(rows_of(store, schema.ledger)))
    attempts = {row["request_id"]: row for row in rows_of(store, schema.attempts)}
    ledger = {row["request_id"]: row for row in rows_of(store, schema.ledger)}
    times = rows_of(store, schema.worker_times)
    store.close()

    assert set(attempts) == set(ledger) == set(ids)
    for request_id, row in ledger.items():
        attempt, count = attempts[request_id], row["delivered_completion_tokens"]
        assert (attempt["epoch"], attempt["worker_instance"]) == (row["epoch"], row["worker_instance"])
        assert attempt["choices"] == [[0, 0, count]]
        assert attempt["decode_tokens"] == count - 1
        assert attempt["prefill_tokens"] + attempt["cached_tokens"] == row["delivered_prompt_tokens"]
        assert row["admit_time"] <= row["claim_time"] + timedelta(milliseconds=1) <= row["end_time"]
    shares = sum(row["prefill_nanos"] + row["decode_nanos"] for row in attempts.values())
    assert sum(row["busy_nanos"] for row in times) >= shares > 0
    assert [row["sequence"] for row in times] == list(range(1, len(times) + 1))


async def _complete(client: Any, max_tokens: int) -> str:
    body = {"model": "echo", "prompt": "one two three", "max_tokens": max_tokens, "ignore_eos": True}
    answer = await client.post("/v1/completions", content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])
