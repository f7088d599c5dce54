"""Every service, the gateway too, dies or freezes in one run: one row each, prefixes, the right bill, idle after."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.helpers.nemesis import (
    SETTLING_S,
    Attempt,
    Nemesis,
    assert_idle,
    attempt_until_accepted,
    baseline_blocks,
    open_client,
)
from tests.helpers.stack import Stack, millrace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(420)]

VOCAB = 32_000
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


def bill_mistake(a: Attempt, row: dict[str, Any], nemesis: Nemesis) -> str | None:
    billed, delivered = row["billed_completion_tokens"], len(a.seen.token_ids)
    if a.ending != "cut":
        return None if billed == delivered else f"{a.ending}: billed {billed}, delivered {delivered}"
    if not nemesis.killed("gateway", a.began, a.ended + 1):
        return f"cut at {delivered} tokens though no gateway was killed: {a.seen.broken}"
    if nemesis.lost_bill(billed, delivered, a.began, a.ended):
        return None
    return f"gateway killed: billed {billed}, delivered {delivered}"


def mistakes_of(attempts: list[Attempt], rows: list[dict[str, Any]], nemesis: Nemesis) -> list[str]:
    by_id = {row["request_id"]: row for row in rows}
    found = [f"{id_}: {n} rows" for id_, n in Counter(row["request_id"] for row in rows).items() if n != 1]
    for a in attempts:
        who = a.seen.request_id
        if a.ending == "unclassified":
            found.append(f"{who}: unclassified {a.seen.broken}, {len(a.seen.token_ids)} tokens")
        if not a.seen.is_echo_prefix(VOCAB):
            found.append(f"{who}: not a prefix of its echo sequence")
        if a.ending == "completed" and len(a.seen.token_ids) != a.max_tokens:
            found.append(f"{who}: completed with {len(a.seen.token_ids)} of {a.max_tokens} tokens")
        if a.ending == "refused":
            continue
        if who not in by_id:
            found.append(f"{who}: {a.ending} without a row")
        elif (wrong := bill_mistake(a, by_id[who], nemesis)) is not None:
            found.append(f"{who} ({by_id[who]['terminal_state']}, {by_id[who]['error_reason']}): {wrong}")
    return found


def assert_usage_answers(stack: Stack, within_s: float = 30.0) -> None:
    """The supervisor pauses up to 8 s before it starts a service again that died often."""
    end = time.monotonic() + within_s
    while (done := millrace(stack.home, "usage", "export", "--format", "jsonl")).returncode != 0:
        assert time.monotonic() < end, done.stderr
        time.sleep(0.5)


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
