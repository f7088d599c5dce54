"""A thousand cut streams, dead workers and dead gateways: each row says what passed a counting proxy."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter

import pytest

from tests.helpers.exact_bill import ExactBill
from tests.helpers.nemesis import SETTLING_S
from tests.helpers.stack import Stack, millrace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(3_600)]

CUTS = int(os.environ.get("EXACT_CUTS", "1000"))
WORKERS = int(os.environ.get("EXACT_WORKERS", "20"))
GATEWAYS = int(os.environ.get("EXACT_GATEWAYS", "5"))
SEED = int(os.environ.get("NEMESIS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


def test_every_row_says_what_passed_a_proxy_beside_the_gateway(stack: Stack) -> None:
    print(f"NEMESIS_SEED={SEED}")
    began = time.time()
    kills = [f"worker-{1 + n % 2}" for n in range(WORKERS)] + ["gateway"] * GATEWAYS
    random.Random(SEED).shuffle(kills)
    load = ExactBill(stack, SEED, cuts=CUTS)

    asyncio.run(load.run(kills))
    rows = stack.wait_ledger(len(load.seen), timeout_s=2 * SETTLING_S)
    print(f"{load.nemesis.report()}; {len(load.seen)} streams, {load.cut_count} cut by their clients")
    print(dict(Counter(row["terminal_state"] for row in rows)))

    assert load.mistakes(rows) == []
    assert load.cut_count >= CUTS
    assert (
        millrace(stack.home, "price", "set", "echo", "--accelerator-hour", "3.60", "--from", "2020-01-01").returncode
        == 0
    )
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(began - 5))
    until = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 5))
    compared = millrace(stack.home, "usage", "reconcile", "--since", since, "--until", until)
    costs = millrace(stack.home, "usage", "costs", "--by", "tenant")
    print(compared.stdout[-2_000:], costs.stdout, sep="\n")
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert costs.returncode == 0, costs.stderr
