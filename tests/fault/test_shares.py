"""Tenants on one full stack: a quiet one beside a loud one, shares by weight, and a new one beside an old one.

The echo model on one worker of a few slots, fixed lengths, clients that ask again as soon as they are answered. Times
are compared with times of the same run only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import redis

from services.common.admission_scripts import pool_key
from services.common.admission_types import Pool
from tests.helpers.closed_load import SEED, Load, Tried, percentile
from tests.helpers.nemesis import redis_socket
from tests.helpers.stack import Stack, new_key, running_stack
from tests.helpers.waiting import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

# Steps so slow that the slots are what is short, on a busy machine too.
SLOTS, STEP_MS, TOKENS = 8, 200, 8
ASKS = 20
# So many of each tenant that its queue is deep: clients that come late by seconds leave it with work.
CLIENTS = 40
# Of all slots. In a window the tokens are counted that came within it, so that its ends cut no answer off.
WARM_UP, WINDOW = 4, 24
POOL = Pool("echo")
# What a tenant that had the stack to itself was served in a day.
TOKENS_OF_A_DAY = 86_400 * SLOTS * 1_000 // STEP_MS


@pytest.fixture
def full_stack(tmp_path: Path) -> Iterator[Stack]:
    print(f"OVERLOAD_SEED={SEED}")
    environment = {"MILLRACE_ECHO_STEP_MS": str(STEP_MS), "MILLRACE_ENGINE": f"max_num_seqs={SLOTS}"}
    with running_stack(tmp_path / "home", "--workers", "1", "--model", "echo", env=environment) as stack:
        yield stack


@pytest.fixture
def store(full_stack: Stack) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=redis_socket(full_stack)) as client:
        yield client


@dataclasses.dataclass
class Window:
    """Tokens that came to each tenant, and the fewest requests of any that waited for a slot meanwhile."""

    tokens: list[int]
    least_waiting: int


def load_of(stack: Stack, tenant: str, weight: float = 1) -> Load:
    return Load(stack, new_key(stack.home, tenant, "--weight", str(weight)), TOKENS)


async def window_of(store: redis.Redis, loads: dict[str, Load]) -> Window:
    """What the tenants' loads, which are running, get while the slots turn over so many times."""

    def waiting() -> int:
        counts = store.hmget(pool_key(POOL, "tq"), [f"n|{tenant}" for tenant in loads])
        return min(int(count or 0) for count in counts)

    def came() -> int:
        return sum(load.delivered for load in loads.values())

    await until(lambda: waiting() >= CLIENTS // 2, every_s=0.05)
    begin = came() + WARM_UP * SLOTS * TOKENS
    await until(lambda: came() >= begin, every_s=0.05)
    before, least = [load.delivered for load in loads.values()], waiting()

    def over() -> bool:
        nonlocal least
        least = min(least, waiting())
        return came() >= begin + WINDOW * SLOTS * TOKENS

    await until(over, every_s=0.05, within_s=180)
    return Window([load.delivered - was for load, was in zip(loads.values(), before, strict=True)], least)


def jain(counts: Sequence[int]) -> float:
    """Jain's index of fairness: 1 for equal counts, 1 / n when one has all."""
    return sum(counts) ** 2 / (len(counts) * sum(count * count for count in counts))


def test_a_quiet_tenants_first_token_waits_for_one_turn_of_the_slots_beside_fifty_times_its_load(
    full_stack: Stack,
) -> None:
    quiet, loud = load_of(full_stack, "quiet"), load_of(full_stack, "loud")

    async def scenario() -> tuple[list[Tried], list[Tried]]:
        async with quiet.client() as client:
            alone = [await quiet.ask(client, f"{SEED} alone {i}") for i in range(ASKS)]
            async with loud.running(50):
                await until(lambda: len(loud.done) >= 2 * SLOTS)
                beside = [await quiet.ask(client, f"{SEED} beside {i}") for i in range(ASKS)]
        return alone, beside

    alone, beside = asyncio.run(scenario())

    turnover = percentile((each.whole_s - each.first_s for each in loud.done), 0.95)
    firsts = [percentile((each.first_s for each in asks), 0.95) for asks in (alone, beside, loud.done)]
    passed = overtaken(full_stack.wait_ledger(2 * ASKS + len(loud.done)))
    print("p95 to the first token: alone {:.3f} s, beside {:.3f} s, of the loud one {:.3f} s".format(*firsts))
    print(f"a slot is held for {turnover:.3f} s; claimed while it waited: {sorted(passed)}")
    assert percentile(passed, 0.95) <= SLOTS
    assert firsts[1] <= 2 * firsts[0] + turnover


def overtaken(rows: list[dict[str, Any]]) -> list[int]:
    """For each request of the quiet tenant, how many of the loud one were claimed while it waited."""

    def times(tenant: str) -> list[tuple[datetime, datetime]]:
        parse = datetime.fromisoformat
        claimed = [row for row in rows if row["tenant"] == tenant and row["claim_time"]]
        return [(parse(row["admit_time"]), parse(row["claim_time"])) for row in claimed]

    loud = [claim for _, claim in times("loud")]
    return [sum(admit < each < claim for each in loud) for admit, claim in times("quiet")]


async def share_out(store: redis.Redis, loads: dict[str, Load]) -> Window:
    async with contextlib.AsyncExitStack() as running:
        for load in loads.values():
            await running.enter_async_context(load.running(CLIENTS))
        return await window_of(store, loads)


def test_tokens_come_out_by_weight(full_stack: Stack, store: redis.Redis) -> None:
    loads = {"heavy": load_of(full_stack, "heavy", 3), "light": load_of(full_stack, "light")}

    seen = asyncio.run(share_out(store, loads))

    ratio = seen.tokens[0] / seen.tokens[1]
    print(f"weights 3:1 gave {seen.tokens} tokens, {ratio:.2f}:1; at least {seen.least_waiting} waited")
    assert 2.7 <= ratio <= 3.3


def test_tokens_come_out_evenly_among_equals(full_stack: Stack, store: redis.Redis) -> None:
    loads = {tenant: load_of(full_stack, tenant) for tenant in ("a", "b", "c")}

    seen = asyncio.run(share_out(store, loads))

    print(f"equals got {seen.tokens} tokens, Jain {jain(seen.tokens):.4f}; at least {seen.least_waiting} waited")
    assert jain(seen.tokens) >= 0.95


def test_a_new_tenant_beside_a_day_old_one_gets_its_share(full_stack: Stack, store: redis.Redis) -> None:
    old, new = load_of(full_stack, "old"), load_of(full_stack, "new")

    async def scenario() -> Window:
        async with old.running(CLIENTS):
            await until(lambda: len(old.done) >= 4 * SLOTS)
            store.zincrby(pool_key(POOL, "act:interactive"), TOKENS_OF_A_DAY, "old")
            # The pool's own time follows with the next request of the old one.
            await until(lambda: float(store.hget(pool_key(POOL, "q"), "last|interactive") or 0) >= TOKENS_OF_A_DAY)
            async with new.running(CLIENTS):
                return await window_of(store, {"old": old, "new": new})

    seen = asyncio.run(scenario())

    share = seen.tokens[1] / sum(seen.tokens)
    print(f"the old one got {seen.tokens[0]} tokens, the new one {seen.tokens[1]}: {share:.3f}")
    assert 0.45 <= share <= 0.55
