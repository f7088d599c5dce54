"""A thousand cut streams and dead workers, then dead gateways: each row says what passed a counting proxy."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.exact_bill import ExactBill
from tests.helpers.nemesis import SETTLING_S
from tests.helpers.stack import Stack, running_stack

pytestmark = [pytest.mark.fault, pytest.mark.timeout(3_600)]

CUTS = int(os.environ.get("EXACT_CUTS", "1000"))
WORKERS = int(os.environ.get("EXACT_WORKERS", "20"))
# Workers that die together; twice as many run.
TOGETHER = int(os.environ.get("EXACT_TOGETHER", "1"))
GATEWAYS = int(os.environ.get("EXACT_GATEWAYS", "5"))
SEED = int(os.environ.get("NEMESIS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    workers = ("--workers", str(2 * TOGETHER), "--model", "echo")
    with running_stack(tmp_path / "home", *workers, env={"MILLRACE_ECHO_STEP_MS": "20"}) as stack:
        yield stack


def compare(stack: Stack, load: ExactBill) -> None:
    """Print what happened; every row must say what passed, and nothing may differ without a cause."""
    rows = stack.wait_requests((counted.request_id for counted in load.seen), 2 * SETTLING_S)
    print(f"{load.nemesis.report()}; {len(load.seen)} streams, {load.cut_count} cut by their clients")
    print(dict(Counter(row["terminal_state"] for row in rows)))
    compared = load.reconcile()
    print(compared.stdout[-2_000:])

    assert load.mistakes(rows) == []
    assert compared.returncode == 0, compared.stdout + compared.stderr


def test_cut_streams_and_dead_workers_are_billed_as_counted_beside_the_gateway(stack: Stack) -> None:
    print(f"NEMESIS_SEED={SEED}")
    load = ExactBill(stack, SEED, cuts=CUTS)

    names = [f"worker-{1 + n % (2 * TOGETHER)}" for n in range(WORKERS)]
    asyncio.run(load.run([names[n : n + TOGETHER] for n in range(0, WORKERS, TOGETHER)]))

    assert load.cut_count >= CUTS
    compare(stack, load)


def test_streams_of_dead_gateways_are_billed_as_counted_or_up_to_sixteen_below(stack: Stack) -> None:
    print(f"NEMESIS_SEED={SEED}")
    load = ExactBill(stack, SEED, cuts=10 * GATEWAYS)

    asyncio.run(load.run([["gateway"]] * GATEWAYS))

    compare(stack, load)
