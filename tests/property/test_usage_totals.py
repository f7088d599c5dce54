"""Whatever order, repetition, batching and clocks do to usage events, the totals are those of the distinct events."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.usage.events import LedgerEntry, Tokens
from services.usage.ledger import insert_entries
from services.usage.store import open_store
from tests.helpers.usage import START, insert, make_entry, reading

SKEW = timedelta(hours=1)


@st.composite
def entries(draw: st.DrawFn) -> list[LedgerEntry]:
    """Distinct events of few tenants around midnight, some with the clock of their producer an hour off."""
    count = draw(st.integers(1, 12))
    made = []
    for number in range(count):
        prompt = draw(st.integers(0, 50))
        made.append(
            make_entry(
                f"r{number}",
                tenant=draw(st.sampled_from(["a", "b", "c"])),
                prompt=prompt,
                cached=draw(st.integers(0, prompt)),
                completion=draw(st.integers(0, 50)),
                end_time=datetime(2026, 3, 2, tzinfo=UTC) + draw(st.sampled_from([-SKEW, timedelta(), SKEW])),
            )
        )
    return made


def sums(made: list[LedgerEntry]) -> dict[tuple[str, date], tuple[int, Tokens]]:
    totals: dict[tuple[str, date], tuple[int, Tokens]] = defaultdict(lambda: (0, Tokens()))
    for entry in made:
        count, billed = totals[entry.tenant, entry.day]
        totals[entry.tenant, entry.day] = (count + 1, billed + entry.billed)
    return dict(totals)


@given(made=entries(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_shuffled_repeated_and_late_events_under_skewed_clocks_give_the_same_totals(
    made: list[LedgerEntry], data: st.DataObject
) -> None:
    repeated = made + data.draw(st.lists(st.sampled_from(made), max_size=12))
    order = data.draw(st.permutations(repeated))

    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{folder}/usage.sqlite3")
        while order:
            size = data.draw(st.integers(1, len(order)))
            batch, order = order[:size], order[size:]
            insert(store, batch, now=START + data.draw(st.sampled_from([-SKEW, timedelta(), SKEW])))
        result = reading(store)
        store.close()

    assert {(b.tenant, b.day): (b.request_count, b.billed) for b in result.balances} == sums(made)


class LedgerMachine(RuleBasedStateMachine):
    """Inserts that commit or roll back, in any order; the model is a dictionary that keeps the first of each id."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = open_store(f"sqlite:///{Path(self.folder.name) / 'usage.sqlite3'}")
        self.model: dict[str, LedgerEntry] = {}

    @rule(numbers=st.lists(st.integers(0, 15), max_size=6), completion=st.integers(0, 9))
    def commit(self, numbers: list[int], completion: int) -> None:
        batch = [make_entry(f"r{n}", f"t{n % 2}", completion=completion) for n in numbers]

        fresh = insert(self.store, batch)

        unseen = [e.request_id for e in batch if e.request_id not in self.model]
        assert [e.request_id for e in fresh] == list(dict.fromkeys(unseen))
        self.model |= {e.request_id: e for e in fresh}

    @rule(number=st.integers(0, 15))
    def crash_before_commit(self, number: int) -> None:
        class Crash(Exception):
            pass

        def work(connection: object) -> None:
            insert_entries(connection, [make_entry(f"r{number}")], START)  # type: ignore[arg-type]
            raise Crash

        try:
            self.store.write_sync(work)
        except Crash:
            return
        raise AssertionError("the crash was swallowed")

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = open_store(f"sqlite:///{Path(self.folder.name) / 'usage.sqlite3'}")

    @invariant()
    def the_ledger_is_the_model(self) -> None:
        result = reading(self.store)
        assert result.request_ids == tuple(sorted(self.model))
        totals = sums(list(self.model.values()))
        assert {(b.tenant, b.day): (b.request_count, b.billed) for b in result.balances} == totals

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
