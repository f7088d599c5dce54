"""Gateway, worker and ledger compared over the consumer and both databases: nothing differs without its cause."""

from __future__ import annotations

from datetime import timedelta

import pytest
import redis.asyncio as aioredis
import sqlalchemy as sa
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.metrics import Metrics
from services.usage import reconcile as reconcile_module
from services.usage import schema
from services.usage.consumer import Consumer
from services.usage.drift import Cause
from services.usage.ledger import CONFLICT, read_dead_letters
from services.usage.reconcile import Drift, Totals, reconcile
from services.usage.selection import Selection
from services.usage.store import Store
from tests.helpers.fake_clock import FakeClock
from tests.helpers.usage import START, know_pools, make_attempt, make_event, publish_report, report_of
from tests.integration.test_usage_consumer import POOL, publish

DAY = timedelta(days=1)
CANCELLED, FAILED = common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.TERMINAL_STATE_FAILED


async def consume(client: aioredis.Redis, store: Store) -> None:
    consumer = Consumer(client, store, clock=FakeClock(), metrics=Metrics(), batch_size=8)
    while await consumer.run_once(10):
        pass


async def compare(store: Store, tenant: str = "") -> tuple[dict[str, Drift], Totals]:
    totals = Totals()
    chosen = Selection(tenant=tenant, start=START - DAY, end=START + DAY)
    pages = [page async for page in reconcile(store, chosen, totals)]
    return {drift.request_id: drift for page in pages for drift in page}, totals


async def test_every_cause_is_told_from_what_arrived(store: Store, redis_client: aioredis.Redis) -> None:
    await know_pools(redis_client, POOL)
    lost = make_event("gateway-died", completion=3, state=FAILED)
    lost.error_reason = "GATEWAY_LOST"
    resumed = make_event("resumed", completion=9)
    resumed.attempt, resumed.epoch = 2, 513
    events = [
        make_event("agrees"), lost, make_event("attempt-lost"), resumed,
        make_event("left", completion=2, state=CANCELLED), make_event("stopped", completion=4),
        make_event("doubled"), make_event("doubled", completion=4), make_event("altered"),
    ]  # fmt: skip
    await publish(redis_client, events)
    attempts = [make_attempt(name) for name in ("agrees", "left", "stopped", "doubled", "altered", "gateway-died")]
    attempts += [
        make_attempt("resumed", tokens=(0, 6)),
        make_attempt("resumed", epoch=513, worker="worker-2", attempt=2, tokens=(4, 9)),
        make_attempt("missing", "zeta"),
    ]
    await publish_report(redis_client, POOL, report_of(*attempts))
    await consume(redis_client, store)
    altered = sa.update(schema.ledger).where(schema.ledger.c.request_id == "altered")
    store.write_sync(lambda connection: connection.execute(altered.values(billed_completion_tokens=6)))

    drifts, totals = await compare(store)

    assert {name: drift.cause for name, drift in drifts.items()} == {
        "gateway-died": Cause.GATEWAY_DIED,
        "attempt-lost": Cause.ATTEMPT_LOST,
        "resumed": Cause.RESUMED,
        "left": Cause.UNDELIVERED,
        "stopped": Cause.BEYOND_STOP,
        "doubled": Cause.DUPLICATE,
        "altered": Cause.ROW_ALTERED,
        "missing": Cause.MISSING_EVENT,
    }
    assert drifts["resumed"] == Drift("resumed", "acme", Cause.RESUMED, 9, 11, 9, 2)
    assert drifts["missing"] == Drift("missing", "zeta", Cause.MISSING_EVENT, None, 5, None, 1)
    assert (totals.request_count, totals.gateway, totals.ledger, totals.worker) == (9, 38, 38, 46)
    assert set((await compare(store, "zeta"))[0]) == {"missing"}


async def test_a_replayed_event_is_no_duplicate_and_another_one_is_kept_once(
    store: Store, redis_client: aioredis.Redis
) -> None:
    await know_pools(redis_client, POOL)
    event = make_event("r1")
    event.metadata.update({"a": "1", "b": "2"})
    same = usage_event_pb2.UsageEvent.FromString(event.SerializeToString())
    # What does not count may be told otherwise.
    same.times.end_time.seconds += 5
    other = make_event("r1", completion=9)
    for each in (event, same, other, event):
        await publish(redis_client, [each])
    await publish_report(redis_client, POOL, report_of(make_attempt("r1")))

    await consume(redis_client, store)

    letters = store.read_sync(read_dead_letters)
    assert [letter.reason for letter in letters] == [CONFLICT]
    assert usage_event_pb2.UsageEvent.FromString(letters[0].payload).delivered.completion_token_count == 9
    assert [drift.cause for drift in (await compare(store))[0].values()] == [Cause.DUPLICATE]


async def test_long_ledgers_are_compared_page_by_page(
    store: Store, redis_client: aioredis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await know_pools(redis_client, POOL)
    monkeypatch.setattr(reconcile_module, "PAGE_ROWS", 4)
    await publish(redis_client, [make_event(f"r{n:02}") for n in range(10)])
    await publish_report(redis_client, POOL, report_of(*(make_attempt(f"r{n:02}") for n in range(23))))
    await consume(redis_client, store)

    drifts, totals = await compare(store)

    assert {drift.cause for drift in drifts.values()} == {Cause.MISSING_EVENT}
    assert sorted(drifts) == [f"r{n:02}" for n in range(10, 23)]
    assert totals.request_count == 23
