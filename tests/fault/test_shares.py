"""Tenants on one full stack: a quiet one beside a loud one.

The echo model on one worker of a few slots, fixed lengths, clients that ask again as soon as they are answered. Times
are compared with times of the same run only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.closed_load import SEED, Load, Tried, percentile
from tests.helpers.stack import Stack, new_key, running_stack
from tests.helpers.waiting import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

# Steps so slow that the slots are what is short, on a busy machine too.
SLOTS, STEP_MS, TOKENS = 8, 80, 16
ASKS = 24


@pytest.fixture
def full_stack(tmp_path: Path) -> Iterator[Stack]:
    print(f"OVERLOAD_SEED={SEED}")
    environment = {"MILLRACE_ECHO_STEP_MS": str(STEP_MS), "MILLRACE_ENGINE": f"max_num_seqs={SLOTS}"}
    with running_stack(tmp_path / "home", "--workers", "1", "--model", "echo", env=environment) as stack:
        yield stack


def load_of(stack: Stack, tenant: str) -> Load:
    return Load(stack, new_key(stack.home, tenant), TOKENS)


def test_a_quiet_tenants_first_token_waits_for_two_turns_of_the_slots_at_most_beside_fifty_loud_clients(
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

    # Who began to be answered while it waited: the loud one's queue is six times as long as all slots.
    overtaken = [sum(ask.began < each.first_at < ask.first_at for each in loud.done) for ask in beside]
    turnover = percentile((each.whole_s - each.first_s for each in loud.done), 0.95)
    firsts = [percentile((each.first_s for each in asks), 0.95) for asks in (alone, beside, loud.done)]
    print("p95 to the first token: alone {:.3f} s, beside {:.3f} s, of the loud one {:.3f} s".format(*firsts))
    print(f"a slot is held for {turnover:.3f} s; served while it waited: {sorted(overtaken)}")
    assert percentile(overtaken, 0.95) <= 2 * SLOTS
