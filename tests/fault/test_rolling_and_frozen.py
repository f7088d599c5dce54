"""Restarts and a frozen worker under load, and clients that cut: no failed request, no duplicate, idle after."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections import Counter

import httpx
import pytest

from tests.helpers.nemesis import (
    VOCAB,
    Attempt,
    Nemesis,
    Streams,
    assert_idle,
    attempt,
    baseline_blocks,
    free_blocks,
    open_client,
)
from tests.helpers.stack import Stack

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

STREAMS = 12
CUTS = int(os.environ.get("FAULT_CUTS", "100"))
TOKEN = b'"text":"t'


async def restart(stack: Stack, nemesis: Nemesis, service: str, baseline: list[int]) -> None:
    old = stack.signal(service, signal.SIGTERM)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        await asyncio.sleep(0.3)
        known = await free_blocks(stack.state.router_address)
        if nemesis.pid(service) not in (None, old) and len(known) == len(baseline):
            return
    raise AssertionError(f"{service} did not come back")


def assert_all_complete_and_billed(stack: Stack, seen: list[Attempt], max_tokens: int) -> None:
    assert Counter(a.ending for a in seen) == {"completed": len(seen)}, [a for a in seen if a.ending != "completed"][:3]
    assert all(a.seen.is_echo_prefix(VOCAB) and len(a.seen.token_ids) == max_tokens for a in seen)
    rows = stack.wait_ledger(len(seen))
    billed = {row["request_id"]: row["billed_completion_tokens"] for row in rows}
    assert len(rows) == len(billed) == len(seen)
    assert billed == {a.seen.request_id: max_tokens for a in seen}


def test_a_rolling_restart_of_router_and_workers_fails_no_request(stack: Stack) -> None:
    async def scenario() -> list[Attempt]:
        baseline, nemesis, streams = await baseline_blocks(stack), Nemesis(stack, seed=0), Streams(stack, lambda: 60)
        async with streams.running(STREAMS):
            for service in ("router", "worker-1", "worker-2"):
                await restart(stack, nemesis, service, baseline)
                await asyncio.sleep(1.0)
        return streams.attempts

    seen = asyncio.run(scenario())
    print(f"streams over the restarts: {len(seen)}, {dict(Counter(a.ending for a in seen))}")

    assert_all_complete_and_billed(stack, seen, 60)


def test_a_worker_frozen_for_eight_seconds_duplicates_nothing_when_it_wakes(stack: Stack) -> None:
    async def scenario() -> tuple[list[Attempt], list[int]]:
        baseline, nemesis = await baseline_blocks(stack), Nemesis(stack, seed=0)
        async with open_client(stack) as client:
            streams = [asyncio.create_task(attempt(client, 250)) for _ in range(STREAMS)]
            await asyncio.sleep(1.5)
            await nemesis.strike("worker-1", "stop", 8.0)
            return await asyncio.gather(*streams), baseline

    seen, baseline = asyncio.run(scenario())

    assert_all_complete_and_billed(stack, seen, 250)
    asyncio.run(assert_idle(stack, baseline))


async def cut_after(stack: Stack, tokens: int) -> tuple[str, int]:
    """Cut a stream after `tokens` tokens or more; the request's id, and the tokens that had come to this machine: what
    the test was too busy to read counts too."""
    body = {"model": "echo", "prompt": "cut me", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    headers = stack.headers | {"connection": "close"}
    asked = httpx.Request("POST", f"{stack.url}/v1/completions", json=body, headers=headers)
    head = "".join(f"{name}: {value}\r\n" for name, value in asked.headers.items())
    loop, came = asyncio.get_running_loop(), bytearray()
    with socket.create_connection((asked.url.host, asked.url.port)) as client:
        client.setblocking(False)
        await loop.sock_sendall(client, f"POST {asked.url.path} HTTP/1.1\r\n{head}\r\n".encode() + asked.content)
        while came.count(TOKEN) < tokens:
            part = await loop.sock_recv(client, 65_536)
            assert part, came
            came += part
        with contextlib.suppress(BlockingIOError):
            while part := client.recv(65_536):
                came += part
    assert came.startswith(b"HTTP/1.1 200 "), came
    return came.split(b"x-request-id: ", 1)[1].split(b"\r\n", 1)[0].decode(), came.count(TOKEN)


def test_clients_that_cut_anywhere_pay_for_what_they_saw_and_stop_the_work(stack: Stack) -> None:
    seed = int(os.environ.get("NEMESIS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    print(f"NEMESIS_SEED={seed}")
    points = random.Random(seed)

    async def scenario() -> tuple[dict[str, int], list[int]]:
        baseline, gate = await baseline_blocks(stack), asyncio.Semaphore(20)

        async def one(tokens: int) -> tuple[str, int]:
            async with gate:
                return await cut_after(stack, tokens)

        return dict(await asyncio.gather(*(one(points.randint(1, 60)) for _ in range(CUTS)))), baseline

    seen, baseline = asyncio.run(scenario())
    rows = stack.wait_ledger(CUTS)
    asyncio.run(assert_idle(stack, baseline, within_s=15))

    billed = {row["request_id"]: row["billed_completion_tokens"] for row in rows}
    assert len(rows) == len(billed) == len(seen) == CUTS
    assert {row["terminal_state"] for row in rows} == {"cancelled"}
    assert [(i, n, billed[i]) for i, n in seen.items() if not n <= billed[i] <= n + 50] == []
