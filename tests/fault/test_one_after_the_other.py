"""Each service killed, frozen for longer than every lease, or cut off, under many slow streams: none is lost.

Only who was on the gateway itself when that was struck sees an end before the end; all else is completed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.cut_link import CutLink
from tests.helpers.nemesis import (
    SETTLING_S,
    Attempt,
    Nemesis,
    Streams,
    assert_idle,
    assert_usage_answers,
    baseline_blocks,
    mistakes_of,
)
from tests.helpers.stack import Stack, running_stack
from tests.helpers.waiting import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

STREAMS = int(os.environ.get("NEMESIS_STREAMS", "100"))
# All streams together get so many tokens a second, however many they are.
STEP_MS = max(1_000, 4 * STREAMS)
SIZES = (10, 25)
# In flight at every fault; the others have just ended or begin.
MOST = STREAMS * 3 // 4
# Longer than the leases of claims, workers, gateways and reservations.
FROZEN_S = 32.0
SERVICES = ("gateway", "router", "worker-1", "usage", "redis")
SEED = int(os.environ.get("NEMESIS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Each of the two workers can take every stream."""
    print(f"NEMESIS_SEED={SEED}, {STREAMS} streams")
    environment = {
        "MILLRACE_ECHO_STEP_MS": str(STEP_MS),
        "MILLRACE_ENGINE": f"max_num_seqs={STREAMS + 12},num_blocks=8192,tpot_target_ms={2 * STEP_MS}",
    }
    with running_stack(tmp_path / "home", "--workers", "2", "--model", "echo", env=environment) as stack:
        yield stack


def streams_of(stack: Stack, chance: random.Random) -> Streams:
    return Streams(stack, lambda: chance.randint(*SIZES), refused_pause_s=3.0)


async def in_full_flow(stack: Stack, streams: Streams) -> None:
    """Streams end and begin, most of them run, and both workers take new ones."""
    await streams.wait_ended(STREAMS // 10)
    await streams.wait_in_flight(MOST)
    await baseline_blocks(stack)


def judge(stack: Stack, nemesis: Nemesis, streams: Streams, baseline: list[int]) -> None:
    """Every accepted request ended once, right and rightly billed, and nothing is held."""
    attempts = streams.accepted()
    print(f"faults: {nemesis.report()}\nendings: {dict(Counter(a.ending for a in streams.attempts))}")
    assert_usage_answers(stack)
    rows = stack.wait_requests((a.seen.request_id for a in attempts), 2 * SETTLING_S)
    print(f"accepted: {len(attempts)}, rows: {len(rows)}, {dict(Counter(r['terminal_state'] for r in rows))}")
    # Admitted, but ended before a first frame: their clients saw a refusal, or no answer at all.
    accepted = {a.seen.request_id for a in attempts}
    unseen = [row for row in rows if row["request_id"] not in accepted]
    told = ("terminal_state", "error_reason", "delivered_completion_tokens", "billed_prompt_tokens")
    print(f"unseen by clients: {dict(Counter(tuple(row[name] for name in told) for row in unseen))}")

    assert [row for row in unseen if row["delivered_completion_tokens"] or row["billed_completion_tokens"]] == []
    assert mistakes_of(attempts, rows, nemesis) == []
    assert [a for a in attempts if a.ending != "completed" and not of_a_struck_gateway(a, nemesis)] == []
    assert any(a.ending == "completed" for a in attempts)
    asyncio.run(assert_idle(stack, baseline, within_s=2 * SETTLING_S))


def of_a_struck_gateway(a: Attempt, nemesis: Nemesis) -> bool:
    return any(f.service == "gateway" and f.at <= a.ended and a.began <= f.at + f.paused_s for f in nemesis.faults)


@pytest.mark.parametrize("struck", [SERVICES, *SERVICES], ids=["kill-each", *(f"freeze-{name}" for name in SERVICES)])
def test_no_stream_is_lost_when_a_service_dies_or_freezes(stack: Stack, struck: str | tuple[str, ...]) -> None:
    chance, nemesis = random.Random(SEED), Nemesis(stack, SEED)
    streams = streams_of(stack, chance)
    faults = [(struck, "stop")] if isinstance(struck, str) else [(each, "kill") for each in struck]

    async def scenario() -> list[int]:
        baseline = await baseline_blocks(stack)
        async with streams.running(STREAMS):
            for service, kind in chance.sample(faults, len(faults)):
                await in_full_flow(stack, streams)
                print(f"{service}: {kind} with {streams.in_flight()} streams in flight")
                assert await nemesis.strike(service, kind, FROZEN_S)
            await streams.wait_ended(STREAMS // 10)
        return baseline

    baseline = asyncio.run(scenario())
    judge(stack, nemesis, streams, baseline)


@pytest.mark.parametrize("kind", ["cut", "silence"])
def test_no_stream_is_lost_when_workers_are_cut_off_from_the_gateway(stack: Stack, kind: str) -> None:
    chance, nemesis = random.Random(SEED), Nemesis(stack, SEED)
    streams = streams_of(stack, chance)
    run = Path(stack.state.router_address.removeprefix("unix:")).parent
    # The process' own address, to which the known name leads.
    sockets = [(run / f"worker-{n}.sock").resolve() for n in (1, 2)]

    async def scenario() -> list[int]:
        baseline = await baseline_blocks(stack)
        async with contextlib.AsyncExitStack() as standing:
            links = [await standing.enter_async_context(CutLink(socket).standing()) for socket in sockets]
            # One that starts now dials through the links.
            stack.signal("gateway", signal.SIGKILL)
            async with streams.running(STREAMS):
                for seconds in chance.sample((2.0, 10.0), 2):
                    await in_full_flow(stack, streams)
                    gateway, link = nemesis.pid("gateway"), chance.choice(links)
                    assert gateway is not None
                    await all_attached(links, gateway)
                    print(f"{kind} for {seconds:g} s with {streams.in_flight()} streams in flight")
                    await link.cut(gateway, kind, seconds)
                    assert nemesis.pid("gateway") == gateway
                await streams.wait_ended(STREAMS // 10)
        return baseline

    baseline = asyncio.run(scenario())
    judge(stack, nemesis, streams, baseline)


async def all_attached(links: list[CutLink], gateway: int) -> None:
    """Wait until this gateway is connected through each link."""
    await until(lambda: all(gateway in link.processes() for link in links))
