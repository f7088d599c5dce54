"""The ledger on both databases: once each, balances with it, nothing skipped, nothing half done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from millrace.common.v1 import common_pb2
from sqlalchemy.exc import IntegrityError

from services.common.errors import StoreUnavailable
from services.usage import schema
from services.usage.bulk import insert_rows
from services.usage.dead_letters import Replayed, replay_dead_letters
from services.usage.events import Tokens, parse_event
from services.usage.ledger import (
    CONFLICT,
    Balance,
    DeadLetter,
    RowFilter,
    find_row,
    insert_dead_letters,
    insert_entries,
    read_dead_letters,
    read_rows,
)
from services.usage.rows import ROW_COLUMNS, row_values
from services.usage.selection import Selection
from services.usage.store import Store, open_store
from tests.helpers.postgres import PostgresProcess, postgres_folder
from tests.helpers.usage import START, insert, make_attempt, make_entry, make_event, make_time, reading, report_of


def test_an_event_becomes_one_row_with_all_its_fields(store: Store) -> None:
    event = make_event("r1", prompt=10, cached=4, completion=7)
    event.metadata["team"] = "blue"
    event.user = "nul\x00and 🌊"
    event.model.manifest_digest = b"\x01" * 32

    insert(store, [parse_event(event.SerializeToString(), published_ms=0)], now=START + timedelta(seconds=2))

    row = store.read_sync(lambda c: c.execute(sa.select(schema.ledger)).one())
    assert (row.row_id, row.request_id, row.tenant, row.model, row.version) == (1, "r1", "acme", "echo", "1")
    assert (row.priority_class, row.length_class, row.terminal_state) == ("interactive", "short", "completed")
    assert (row.billed_prompt_tokens, row.billed_cached_tokens, row.billed_completion_tokens) == (10, 4, 7)
    assert (row.end_time, row.insert_time) == (START, START + timedelta(seconds=2))
    assert (row.first_token_time, row.choice_token_counts) == (None, [7])
    assert row.metadata == {"team": "blue"}
    assert row.user_label == "nul\N{REPLACEMENT CHARACTER}and 🌊"
    assert row.event == event.SerializeToString()


def test_the_same_event_again_changes_nothing(store: Store) -> None:
    insert(store, [make_entry("r1"), make_entry("r2")])
    before = reading(store)

    fresh = insert(store, [make_entry("r2"), make_entry("r1", completion=9), make_entry("r1")])

    assert fresh == []
    assert reading(store) == before


def test_a_batch_that_repeats_an_id_takes_the_first(store: Store) -> None:
    fresh = insert(store, [make_entry("r1", completion=3), make_entry("r2"), make_entry("r1", completion=9)])

    assert [(e.request_id, e.billed.completion) for e in fresh] == [("r1", 3), ("r2", 5)]
    assert reading(store).balances[0].billed.completion == 8


def test_balances_are_kept_by_tenant_and_utc_day_of_the_end(store: Store) -> None:
    midnight = datetime(2026, 3, 2, tzinfo=UTC)
    insert(store, [make_entry("r1", end_time=midnight - timedelta(microseconds=1)), make_entry("r2", "zeta")])
    insert(store, [make_entry("r3", end_time=midnight), make_entry("r4", end_time=midnight)])

    tokens = Tokens(10, 0, 5, 0)
    assert reading(store).balances == (
        Balance("acme", date(2026, 3, 1), 1, tokens, tokens),
        Balance("acme", date(2026, 3, 2), 2, tokens + tokens, tokens + tokens),
        Balance("zeta", date(2026, 3, 1), 1, tokens, tokens),
    )


def test_a_transaction_that_fails_leaves_no_trace(store: Store) -> None:
    insert(store, [make_entry("r0")])
    before = reading(store)

    def fail_late(connection: sa.Connection) -> None:
        insert_entries(connection, [make_entry("r1")], START)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        store.write_sync(fail_late)

    assert reading(store) == before


def test_services_that_write_the_same_events_at_once_bill_each_once(store: Store, database_url: str) -> None:
    other = open_store(database_url)
    entries = [make_entry(f"r{n}", tenant=f"t{n % 3}") for n in range(120)]
    barrier = threading.Barrier(2)

    def write(target: Store, order: int) -> int:
        barrier.wait()
        return sum(len(insert(target, entries[n : n + 10])) for n in range(0, 120, 10)[::order])

    with ThreadPoolExecutor(2) as pool:
        written = list(pool.map(write, (store, other), (1, -1)))
    other.close()

    assert sum(written) == 120
    assert len(reading(store).request_ids) == 120


def test_rows_are_read_in_order_by_cursor_tenant_and_time(store: Store) -> None:
    hours = [START + timedelta(hours=n) for n in range(6)]
    insert(store, [make_entry(f"r{n}", tenant="ab"[n % 2], end_time=hour) for n, hour in enumerate(hours)])

    def ids(wanted: RowFilter, limit: int = 100) -> list[int]:
        return [row.row_id for row in store.read_sync(lambda c: read_rows(c, wanted, limit))]

    assert ids(RowFilter()) == [1, 2, 3, 4, 5, 6]
    assert ids(RowFilter(), limit=2) == [1, 2]
    assert ids(RowFilter(after_row_id=4)) == [5, 6]
    assert ids(RowFilter(last_row_id=2)) == [1, 2]
    assert ids(RowFilter(Selection("b"))) == [2, 4, 6]
    assert ids(RowFilter(Selection(start=hours[1], end=hours[3]))) == [2, 3]
    assert ids(RowFilter(Selection("nobody"))) == []


def test_a_row_is_found_by_its_id_for_its_tenant_only(store: Store) -> None:
    insert(store, [make_entry("r1", "acme")])

    def found(request_id: str, tenant: str) -> bool:
        return store.read_sync(lambda c: find_row(c, request_id, tenant)) is not None

    assert found("r1", "acme")
    assert found("r1", "")
    assert not found("r1", "zeta")
    assert not found("r2", "")


def test_a_dead_letter_is_kept_once(store: Store) -> None:
    letter = DeadLetter("mr:{echo/default/0}:usage", "1-0", "not\x00readable", b"\xff\x00")
    for _ in range(2):
        store.write_sync(lambda c: insert_dead_letters(c, [letter], START))

    kept = store.read_sync(read_dead_letters)
    assert [(k.entry_id, k.payload) for k in kept] == [("1-0", b"\xff\x00")]


async def test_letters_are_tried_again_and_only_what_can_be_a_row_becomes_one(store: Store) -> None:
    insert(store, [make_entry("r1")])
    events = {
        # As refused by an earlier release, or by a database that was full.
        "1-0": make_event("r2", completion=7),
        # Published again and taken meanwhile; says something else than its row; still poison.
        "2-0": make_event("r1"),
        "3-0": make_event("r1", completion=9),
        "4-0": make_event("r4", tenant=""),
        # Without both ids it reads as an empty report.
        "6-0": make_event("", tenant=""),
    }
    reasons = {"3-0": CONFLICT}
    letters = [DeadLetter("s", at, reasons.get(at, "old"), event.SerializeToString()) for at, event in events.items()]
    letters.append(DeadLetter("s", "5-0", "old", report_of(make_attempt("r2"), make_time(1)).SerializeToString()))
    store.write_sync(lambda c: insert_dead_letters(c, letters, START))

    done = await replay_dead_letters(store, START)
    again = await replay_dead_letters(store, START)

    assert (done, again) == (Replayed(3, 3), Replayed(0, 3))
    assert [letter.entry_id for letter in store.read_sync(read_dead_letters)] == ["3-0", "4-0", "6-0"]
    result = reading(store)
    assert result.request_ids == ("r1", "r2")
    assert result.balances[0].billed.completion == 5 + 7
    attempts = store.read_sync(lambda c: c.execute(sa.select(schema.attempts.c.request_id)).scalars().all())
    assert attempts == ["r2"]


def test_the_largest_counts_and_longest_ids_fit(store: Store) -> None:
    most = 2**31 - 1
    insert(
        store,
        [make_entry("r" * 256, "t" * 256, prompt=most, completion=most), make_entry("s" * 256, "t" * 256, prompt=most)],
    )

    assert reading(store).balances[0].billed.prompt == 2 * most


def test_migrations_lead_to_the_declared_schema_and_run_once(store: Store, database_url: str) -> None:
    again = open_store(database_url)
    try:
        drift = again.read_sync(lambda c: compare_metadata(MigrationContext.configure(c), schema.metadata))
        heads = again.read_sync(lambda c: c.execute(sa.text("SELECT version_num FROM alembic_version")).all())
    finally:
        again.close()

    assert drift == []
    assert len(heads) == 1


def test_services_that_start_together_migrate_once(database_url: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(open_store, [database_url] * 3))

    insert(stores[0], [make_entry("r1")])
    assert reading(stores[2]).request_ids == ("r1",)
    for opened in stores:
        opened.close()


async def test_a_database_that_is_away_is_said_to_be_and_works_again_after() -> None:
    if postgres_folder() is None:
        pytest.skip("no PostgreSQL binaries to stop and start: apt-get install postgresql")
    server = PostgresProcess().start()
    try:
        opened = open_store(server.new_database())
        await opened.write(lambda c: insert_entries(c, [make_entry("r1")], START))
        server.kill()

        with pytest.raises(StoreUnavailable):
            await opened.write(lambda c: insert_entries(c, [make_entry("r2")], START))

        server.start()
        await opened.write(lambda c: insert_entries(c, [make_entry("r2")], START))
        assert reading(opened).request_ids == ("r1", "r2")
        opened.close()
    finally:
        server.stop()


def test_a_connection_that_breaks_in_mid_transaction_is_a_database_that_is_away(
    new_postgres_url: Callable[[], str],
) -> None:
    opened = open_store(new_postgres_url())

    def broken(connection: sa.Connection) -> None:
        cut = sa.text("SELECT pg_terminate_backend(:pid)")
        pid = connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
        opened.read_sync(lambda other: other.execute(cut, {"pid": pid}))
        insert_rows(connection, schema.ledger, ROW_COLUMNS, [row_values(make_entry("r1"), 1, START)])

    with pytest.raises(StoreUnavailable):
        opened.write_sync(broken)

    insert(opened, [make_entry("r2")])
    assert reading(opened).request_ids == ("r2",)
    opened.close()


def test_a_row_that_is_there_already_or_does_not_fit_is_refused_as_such(store: Store) -> None:
    insert(store, [make_entry("r1")])
    same = row_values(make_entry("r1"), 2, START)
    hole = (3, None, *same[2:])

    for row in (same, hole):
        with pytest.raises(IntegrityError):
            store.write_sync(lambda c, row=row: insert_rows(c, schema.ledger, ROW_COLUMNS, [row]))
    assert reading(store).request_ids == ("r1",)


def test_more_events_than_a_statement_takes_go_in_at_once(store: Store) -> None:
    made = [make_entry(f"r{n:05}", f"t{n % 700}") for n in range(2_500)]

    assert len(insert(store, made)) == 2_500
    assert insert(store, made) == []
    assert len(reading(store).balances) == 700


def test_rejected_requests_are_rows_that_cost_nothing(store: Store) -> None:
    entry = make_entry("r1", prompt=0, completion=0, state=common_pb2.TERMINAL_STATE_REJECTED)
    insert(store, [entry])

    assert reading(store).balances[0].billed == Tokens()
