"""What answers cost: shares of accelerators by tenant and model, idle time apart, and how many met their targets."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from millrace.common.v1 import common_pb2

from services.common.clock import SystemClock
from services.common.errors import InvalidRequest
from services.usage.accelerator import query_worker_time
from services.usage.accelerator_wire import accelerator_use
from services.usage.attempts import insert_worker_rows, parse_report
from services.usage.prices import Price
from services.usage.queries import Group, query_usage
from services.usage.rating import Rater
from services.usage.selection import Selection
from services.usage.store import Store
from tests.helpers.usage import START, insert, make_attempt, make_event, make_time, parse, report_of

HOUR = timedelta(hours=1)


def ask(store: Store, *group_by: str, **chosen: str) -> list[Group]:
    return store.read_sync(lambda connection: query_usage(connection, Selection(**chosen), group_by))  # type: ignore[arg-type]


def insert_report(store: Store, *parts: object) -> None:
    rows = parse_report(report_of(*parts).SerializeToString())
    store.write_sync(lambda connection: insert_worker_rows(connection, [rows], START))


def hour_price(micros: int, *, start: datetime = START - HOUR, **fields: object) -> Price:
    values = {"plan": "", "model": "echo", "version": "", "priority_class": "", "token_kind": "accelerator_hour"}
    values |= {"currency": "USD", "micros_per_million": micros, "start": start}
    return Price(0, **{**values, **fields})  # type: ignore[arg-type]


async def test_failed_attempts_are_paid_for_by_the_answers_that_succeeded(store: Store) -> None:
    failed = common_pb2.TERMINAL_STATE_FAILED
    insert(store, [parse(make_event("a1")), parse(make_event("a2", state=failed)), parse(make_event("b1", "zeta"))])
    # a1 ran twice, a2 once and for nothing; the request that is no row yet counts nowhere.
    insert_report(
        store,
        make_attempt("a1"), make_attempt("a1", epoch=512), make_attempt("a2"), make_attempt("b1"), make_attempt("none"),
    )  # fmt: skip
    await Rater(store, SystemClock()).set_prices([hour_price(3_600_000)])

    [acme, zeta] = ask(store, "tenant")

    use = accelerator_use(acme)
    assert (use.prefill_time.ToMilliseconds(), use.decode_time.ToMilliseconds()) == (750, 2_250)
    assert (use.prefill_token_count, use.decode_token_count, use.block_milliseconds) == (30, 12, 120)
    # One micro-unit is a millionth: three seconds at 3.60 an hour.
    [cost] = use.costs
    assert (cost.currency, cost.micros) == ("USD", 3_000)
    assert (acme.request_count, acme.completed_count) == (2, 1)
    assert cost.micros_per_completed_request == 3_000
    assert cost.micros_per_million_tokens == 3_000 * 1_000_000 // 30
    assert accelerator_use(zeta).costs[0].micros == 1_000


async def test_the_price_of_the_version_and_of_the_moment_holds(store: Store) -> None:
    for number, (version, hours) in enumerate([("1", 0), ("1", 5), ("2", 5), ("2", 50)]):
        event, attempt = make_event(f"r{number}"), make_attempt(f"r{number}", end_time=START + hours * HOUR)
        event.model.version = attempt.model.version = version
        insert(store, [parse(event)])
        insert_report(store, attempt)
    await Rater(store, SystemClock()).set_prices(
        [
            hour_price(3_600_000),
            hour_price(7_200_000, start=START + HOUR),
            hour_price(36_000_000, version="2", end=START + 10 * HOUR),
        ]
    )

    costs = {group.keys[0]: dict(group.use.costs) for group in ask(store, "version")}

    assert costs == {"1": {"USD": 1_000 + 2_000}, "2": {"USD": 10_000 + 2_000}}


async def test_without_a_price_there_is_time_and_no_cost(store: Store) -> None:
    insert(store, [parse(make_event("r1"))])
    insert_report(store, make_attempt("r1"))

    [group] = ask(store)

    assert group.use.sums["prefill_nanos"] == 250_000_000
    assert dict(group.use.costs) == {}


async def test_an_accelerators_price_bills_nobody(store: Store) -> None:
    rater = Rater(store, SystemClock())
    await rater.set_prices([hour_price(3_600_000)])
    insert(store, [parse(make_event("r1"))])

    assert await rater.rate_next() == 0
    [group] = ask(store)
    assert group.costs == {}
    with pytest.raises(InvalidRequest):
        await rater.set_prices([hour_price(1, plan="gold")])


async def test_busy_and_idle_time_are_all_of_it_and_cost_what_an_hour_does(store: Store) -> None:
    other = make_time(1, "worker-3")
    other.model.version = "2"
    insert_report(store, make_time(1), make_time(2, end_time=START + HOUR), make_time(1, "worker-2"), other)
    await Rater(store, SystemClock()).set_prices([hour_price(3_600_000)])

    found = store.read_sync(lambda c: query_worker_time(c, "echo", "", None, None))
    early = store.read_sync(lambda c: query_worker_time(c, "", "1", START, START + HOUR))

    assert list(found) == [("echo", "1"), ("echo", "2")]
    use = found["echo", "1"]
    assert (use.worker_count, use.busy_nanos, use.idle_nanos) == (2, 12 * 10**9, 18 * 10**9)
    assert use.costs == {"USD": (12_000, 18_000)}
    assert [(key, use.idle_nanos) for key, use in early.items()] == [(("echo", "1"), 12 * 10**9)]


def test_goodput_is_counted_by_tenant_model_version_and_hour(store: Store) -> None:
    for number, met in enumerate([True, True, False, None]):
        event = make_event(f"r{number}")
        event.latency.whole.FromMilliseconds(300)
        if met is not None:
            event.latency.targets_met = met
        insert(store, [parse(event)])

    [group] = ask(store, "tenant", "model", "version", "hour")

    assert group.keys == ("acme", "echo", "1", "2026-03-01T12:00Z")
    assert (group.request_count, group.targeted_count, group.targets_met_count) == (4, 3, 2)
