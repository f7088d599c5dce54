"""Random services are killed and frozen under streams: every client learns its end, every request is one row."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.stack import Stack
from tests.helpers.transcripts import Transcript, stream_completion

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

VOCAB = 32_000
LANES = 16
SECONDS = 60.0
VICTIMS = ("router", "worker-1", "worker-2", "usage", "redis")
ACKED_BEHIND = 16


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    running = Stack(tmp_path / "home", "--workers", "2", "--model", "echo", env={"MILLRACE_ECHO_STEP_MS": "10"})
    try:
        yield running.wait_ready()
        assert running.stop() == 0
    finally:
        if running.process.poll() is None:
            running.kill_all()


async def lane(client: httpx.AsyncClient, rng: random.Random, until: float, seen: list[Transcript]) -> None:
    loop = asyncio.get_running_loop()
    while loop.time() < until:
        body = {"model": "echo", "prompt": "a b c", "max_tokens": rng.randint(5, 200), "ignore_eos": True}
        transcript = await stream_completion(client, body)
        seen.append(transcript)
        if transcript.ending == "refused" or transcript.broken:
            await asyncio.sleep(0.5)


async def nemesis(stack: Stack, rng: random.Random, until: float, victims: tuple[str, ...]) -> list[str]:
    loop, done = asyncio.get_running_loop(), []
    while loop.time() < until - 10:
        await asyncio.sleep(rng.uniform(1.5, 3.0))
        victim, freeze = rng.choice(victims), rng.random() < 0.4
        try:
            stack.signal(victim, signal.SIGSTOP if freeze else signal.SIGKILL)
        except ProcessLookupError:
            continue
        done.append(f"{victim}:{'freeze' if freeze else 'kill'}")
        if freeze:
            await asyncio.sleep(rng.uniform(0.5, 2.5))
            stack.signal(victim, signal.SIGCONT)
    return done


async def storm(stack: Stack, seed: int, victims: tuple[str, ...]) -> tuple[list[Transcript], list[str]]:
    rng, seen = random.Random(seed), list[Transcript]()
    until = asyncio.get_running_loop().time() + SECONDS
    async with httpx.AsyncClient(base_url=stack.url, headers=stack.headers, timeout=90) as client:
        lanes = [lane(client, random.Random(seed + i), until, seen) for i in range(LANES)]
        _, faults = await asyncio.gather(asyncio.gather(*lanes), nemesis(stack, rng, until, victims))
    return seen, faults


@pytest.mark.parametrize("seed", [1, 2])
def test_no_stream_is_silent_wrong_or_billed_twice_while_services_die(stack: Stack, seed: int) -> None:
    seen, faults = asyncio.run(storm(stack, seed, VICTIMS))

    admitted = [t for t in seen if t.status == httpx.codes.OK]
    rows = stack.wait_ledger(len(admitted), timeout_s=60)
    by_id = {row["request_id"]: row for row in rows}
    print(f"seed {seed}: {len(faults)} faults, {Counter(t.ending for t in seen)}, {len(rows)} rows")
    assert len(faults) >= 8
    assert len(by_id) == len(rows), "a request has one row"
    assert [t for t in seen if t.ending == "unclassified"] == []
    assert all(t.is_echo_prefix(VOCAB) for t in admitted)
    assert {t.request_id for t in admitted} <= set(by_id)
    for transcript in admitted:
        assert by_id[transcript.request_id]["billed_completion_tokens"] == len(transcript.token_ids), transcript
    assert sum(t.ending == "completed" for t in admitted) > len(admitted) // 2


def test_a_killed_gateway_ends_its_streams_and_the_workers_settle_them(stack: Stack) -> None:
    seen, _ = asyncio.run(storm(stack, 3, ("gateway",)))

    started = [t for t in seen if t.status == httpx.codes.OK]
    rows = {row["request_id"]: row for row in stack.wait_ledger(len(started), timeout_s=60)}
    print(f"{Counter(t.ending for t in seen)}, {len(rows)} rows")
    assert all(t.is_echo_prefix(VOCAB) for t in started)
    assert not [t for t in started if t.done and t.broken], "never [DONE] after a loss"
    for transcript in started:
        row = rows[transcript.request_id]
        billed, got = row["billed_completion_tokens"], len(transcript.token_ids)
        if transcript.ending == "completed":
            assert billed == got
        else:
            assert billed <= got + 1
            assert billed >= got - ACKED_BEHIND or row["terminal_state"] == "failed"
