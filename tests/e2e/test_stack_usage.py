"""The bill of a whole stack while clients leave at random tokens and a worker dies: equal to what a proxy counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.exact_bill import ExactBill
from tests.helpers.stack import Stack, millrace, running_stack

pytestmark = pytest.mark.timeout(180)

CUTS = 60
SEED = 20_260_301


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(
        tmp_path / "home", "--workers", "2", "--model", "echo", env={"MILLRACE_ECHO_STEP_MS": "10"}
    ) as stack:
        yield stack


def test_cut_streams_and_a_dead_worker_are_billed_as_counted_and_their_cost_is_told(stack: Stack) -> None:
    priced = millrace(stack.home, "price", "set", "echo", "--accelerator-hour", "3600", "--from", "2020-01-01")
    load = ExactBill(stack, SEED, cuts=CUTS)

    asyncio.run(load.run([["worker-1"]]))
    rows = stack.wait_ledger(len(load.seen))
    costs = millrace(stack.home, "usage", "costs", "--by", "tenant", "--by", "model", "--format", "jsonl")
    # Of the worker that lives; it tells a second after the end at most.
    compared = load.reconcile()

    assert priced.returncode == 0, priced.stderr
    assert load.mistakes(rows) == []
    assert load.cut_count >= CUTS
    assert {"cancelled", "completed"} <= {row["terminal_state"] for row in rows}
    assert all(row["claim_time"] for row in rows if row["start_time"])
    cost = json.loads(costs.stdout.splitlines()[0])
    assert float(cost["per_completed"].split()[0]) > float(cost["accelerator_cost"].split()[0]) / int(cost["requests"])
    assert compared.returncode == 0, compared.stdout + compared.stderr
