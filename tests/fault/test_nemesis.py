"""Every service, the gateway too, dies or freezes in one run: one row each, prefixes, the right bill, idle after."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import httpx
import pytest

from tests.helpers.nemesis import (
    SETTLING_S,
    Attempt,
    Nemesis,
    assert_idle,
    assert_usage_answers,
    attempt_until_accepted,
    baseline_blocks,
    mistakes_of,
    open_client,
)
from tests.helpers.stack import Stack

pytestmark = [pytest.mark.fault, pytest.mark.timeout(420)]

REQUESTS = int(os.environ.get("NEMESIS_REQUESTS", "300"))
AT_ONCE = 24
FAULTS_FOR_S = float(os.environ.get("NEMESIS_SECONDS", "60"))
SEED = int(os.environ.get("NEMESIS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


async def run_load(stack: Stack, seed: int) -> list[Attempt]:
    sizes, gate = random.Random(seed + 1), asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient, size: int) -> list[Attempt]:
        async with gate:
            return await attempt_until_accepted(client, size, give_up_s=90)

    async with open_client(stack) as client:
        tries = await asyncio.gather(*(one(client, sizes.randint(20, 250)) for _ in range(REQUESTS)))
    return [a for group in tries for a in group]


def test_random_kills_and_pauses_lose_no_request_and_bill_each_once(stack: Stack) -> None:
    print(f"NEMESIS_SEED={SEED}")
    nemesis = Nemesis(stack, SEED)

    async def scenario() -> tuple[list[Attempt], list[int]]:
        baseline = await baseline_blocks(stack)
        load = asyncio.create_task(run_load(stack, SEED))
        await nemesis.run(FAULTS_FOR_S)
        return await load, baseline

    attempts, baseline = asyncio.run(scenario())
    print(f"faults: {nemesis.report()}\nendings: {dict(Counter(a.ending for a in attempts))}")
    accepted = {a.seen.request_id for a in attempts if a.ending != "refused"}
    assert_usage_answers(stack)
    rows = stack.wait_ledger(len(accepted), timeout_s=SETTLING_S)
    print(f"accepted: {len(accepted)}, rows: {len(rows)}, {dict(Counter(r['terminal_state'] for r in rows))}")

    assert mistakes_of(attempts, rows, nemesis) == []
    assert len(accepted) == REQUESTS
    assert any(a.ending == "completed" for a in attempts)
    asyncio.run(assert_idle(stack, baseline, within_s=2 * SETTLING_S))
