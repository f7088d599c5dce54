"""`millrace upgrade` of a stack under streams: no request fails; what cannot start takes nobody's place."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cli.stack_state import process_alive
from tests.helpers.nemesis import Attempt, assert_idle, attempt, baseline_blocks
from tests.helpers.stack import Stack, millrace
from tests.helpers.waiting import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

VOCAB = 32_000
STREAMS, TOKENS = 24, 40
SERVICES = {"usage", "worker-1", "worker-2", "router", "gateway"}


async def under_load(stack: Stack, command: Callable[[], subprocess.CompletedProcess[str]]) -> list[Attempt]:
    """Clients that stream before, during and after the command: half of them on connections that they keep."""
    seen: list[Attempt] = []
    stop = asyncio.Event()

    async def one(client: httpx.AsyncClient) -> None:
        while not stop.is_set():
            seen.append(await attempt(client, TOKENS))

    def client(kept: int | None) -> httpx.AsyncClient:
        limits = httpx.Limits(max_keepalive_connections=kept)
        return httpx.AsyncClient(base_url=stack.url, headers=stack.headers, timeout=120, limits=limits)

    async with client(None) as keeps, client(0) as drops, asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(one(keeps if number % 2 else drops))
        await until(lambda: len(seen) >= STREAMS, within_s=120)
        try:
            done = await asyncio.to_thread(command)
            enough = len(seen) + STREAMS
            await until(lambda: len(seen) >= enough, within_s=120)
        finally:
            stop.set()
    print(done.stdout, done.stderr, f"streams: {len(seen)}")
    return seen


def assert_none_failed(stack: Stack, seen: list[Attempt]) -> None:
    assert Counter(a.ending for a in seen) == {"completed": len(seen)}, [a for a in seen if a.ending != "completed"][:3]
    assert all(a.seen.is_echo_prefix(VOCAB) and len(a.seen.token_ids) == TOKENS for a in seen)
    rows = stack.wait_requests({a.seen.request_id for a in seen}, timeout_s=30)
    billed = {row["request_id"]: row["billed_completion_tokens"] for row in rows}
    assert {a.seen.request_id: billed[a.seen.request_id] for a in seen} == {a.seen.request_id: TOKENS for a in seen}


def test_every_service_is_replaced_under_streams_and_no_request_fails(stack: Stack) -> None:
    before = stack.state.processes
    blocks = asyncio.run(baseline_blocks(stack))

    done: list[subprocess.CompletedProcess[str]] = []

    def command() -> subprocess.CompletedProcess[str]:
        done.append(millrace(stack.home, "upgrade", timeout=300))
        return done[0]

    seen = asyncio.run(under_load(stack, command))
    after = stack.state.processes

    assert done[0].returncode == 0, done[0].stderr
    assert {name for name in before if before[name] != after[name]} == SERVICES
    assert not any(process_alive(before[name]) for name in SERVICES)
    assert_none_failed(stack, seen)
    assert millrace(stack.home, "status").returncode == 0
    asyncio.run(assert_idle(stack, blocks))


def test_a_process_that_cannot_start_takes_nobodys_place_and_ends_the_upgrade(stack: Stack) -> None:
    before = stack.state.processes

    done = millrace(stack.home, "upgrade", "worker", "gateway", "--set", "engine=max_num_seqs=0", timeout=120)

    assert done.returncode == 2
    assert "The new worker-1 ended with code 2: " in done.stderr
    assert "Not replaced: worker-1, worker-2, gateway." in done.stderr
    assert stack.state.processes == before
    assert asyncio.run(one_request(stack)) == "completed"


def test_a_new_setting_stays_with_a_worker_that_is_started_again(stack: Stack) -> None:
    blocks = asyncio.run(baseline_blocks(stack))

    done = millrace(stack.home, "upgrade", "worker", "--set", "engine=num_blocks=100", timeout=120)

    assert done.returncode == 0, done.stderr
    assert asyncio.run(baseline_blocks(stack)) != blocks
    old = stack.signal("worker-2", signal.SIGKILL)
    asyncio.run(until(lambda: stack.state.processes["worker-2"] != old))
    started = Path(f"/proc/{stack.state.processes['worker-2']}/environ").read_bytes()
    assert b"num_blocks=100" in started
    assert asyncio.run(one_request(stack)) == "completed"


async def one_request(stack: Stack) -> str:
    async with httpx.AsyncClient(base_url=stack.url, headers=stack.headers, timeout=60) as client:
        return (await attempt(client, 5)).ending
