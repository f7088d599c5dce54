"""Clients that come back to a running stack of two gateways: a thousand cut streams, and a gateway that is killed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.nemesis import redis_socket
from tests.helpers.redis import free_port
from tests.helpers.resuming import Resumed, stream_with_cuts
from tests.helpers.stack import ROOT, Stack, clean_environment
from tests.helpers.worker import echo_tokens

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

BODY = {"model": "echo", "prompt": "one two three", "ignore_eos": True, "stream": True}
STREAMS = 1_000
# More than these, and one client process on a busy machine comes back after the grace.
AT_ONCE = 150
TOKENS = 40
LEASE_S = 10.0


class SecondGateway:
    """Another gateway of the same stack."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.port = free_port()
        environment = clean_environment(stack.home) | {
            "MILLRACE_REDIS_URL": f"unix://{redis_socket(stack)}",
            "MILLRACE_DATA_DIR": str(folder),
            "MILLRACE_HTTP_LISTEN": f"127.0.0.1:{self.port}",
            "MILLRACE_GRPC_LISTEN": "127.0.0.1:0",
            "MILLRACE_CACHE_SECRET": "second",
        }
        environment.pop("MILLRACE_HOME")
        with (folder.parent / "second.log").open("wb") as log:
            argv = [sys.executable, "-m", "services.gateway"]
            self.process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=log, stderr=log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> SecondGateway:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/readyz").is_success:
                    return self
            except httpx.TransportError:
                assert self.process.poll() is None
            time.sleep(0.05)
        raise AssertionError("the second gateway is not ready")


@pytest.fixture
def second(stack: Stack, tmp_path: Path) -> Iterator[SecondGateway]:
    gateway = SecondGateway(stack, tmp_path / "second")
    try:
        yield gateway.wait_ready()
    finally:
        gateway.process.kill()
        gateway.process.wait(10)


def open_client(stack: Stack, url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, headers=stack.headers, timeout=120, limits=limits)


def test_a_thousand_streams_cut_anywhere_go_on_with_the_same_bytes_and_one_row_each(
    stack: Stack, second: SecondGateway
) -> None:
    chance = random.Random(11)

    at_once = asyncio.Semaphore(AT_ONCE)

    async def one_stream(clients: list[httpx.AsyncClient], number: int) -> Resumed:
        cuts = [chance.randint(0, 15) for _ in range(chance.randint(1, 4))]
        headers = {"Idempotency-Key": f"k{number}"} if number % 2 else {"X-Millrace-Resume": "1"}
        async with at_once:
            return await stream_with_cuts(clients, BODY | {"max_tokens": TOKENS}, cuts, chance, headers=headers)

    async def scenario() -> list[Resumed]:
        async with open_client(stack, stack.url) as one, open_client(stack, second.url) as two:
            return await asyncio.gather(*(one_stream([one, two], number) for number in range(STREAMS)))

    began = time.monotonic()
    seen = asyncio.run(scenario())
    took = time.monotonic() - began

    for one in seen:
        assert one.done, (one.refused, one.error, one.slowest_return_s)
        assert one.numbers == list(range(len(one.numbers)))
        assert one.token_ids == echo_tokens(one.request_id, 0, TOKENS)
    rows = stack.wait_ledger(STREAMS, timeout_s=60)
    assert sorted(row["request_id"] for row in rows) == sorted(one.request_id for one in seen)
    assert {(row["terminal_state"], row["billed_completion_tokens"]) for row in rows} == {("completed", TOKENS)}
    slowest = max(one.slowest_return_s for one in seen)
    cuts, waits = sum(one.cuts for one in seen), sum(len(one.refused) for one in seen)
    print(f"{STREAMS} streams, {cuts} cuts, {waits} told to wait, {took:.1f} s, back after at most {slowest:.1f} s")


def test_a_killed_gateway_ends_who_is_attached_and_frees_the_key_within_a_lease(
    stack: Stack, second: SecondGateway
) -> None:
    headers = {"Idempotency-Key": "order 7"}
    body = BODY | {"max_tokens": 2_000}

    async def scenario() -> tuple[Resumed, list[int], float, Resumed]:
        attached, again = Resumed(), Resumed()
        statuses: list[int] = []
        async with open_client(stack, stack.url) as one, open_client(stack, second.url) as two:
            async with two.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                await Resumed().read(response, 1)
            async with one.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                reading = asyncio.create_task(attached.read(response, None))
                while len(attached.numbers) < 5:
                    await asyncio.sleep(0.05)
                os.kill(second.process.pid, 9)
                await reading
            killed = time.monotonic()
            while not again.request_id:
                async with one.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                    statuses.append(response.status_code)
                    if response.status_code == httpx.codes.OK:
                        freed = time.monotonic() - killed
                        await again.read(response, 5)
                    else:
                        assert "retry-after" in response.headers
                if not again.request_id:
                    await asyncio.sleep(0.2)
        return attached, statuses, freed, again

    attached, statuses, freed, again = asyncio.run(scenario())

    assert not attached.done
    assert b'"code":"GATEWAY_LOST"' in attached.received
    assert again.request_id != attached.request_id
    assert set(statuses) <= {200, 503}
    assert again.token_ids == echo_tokens(again.request_id, 0, len(again.token_ids))
    print(f"the key was free after {freed:.1f} s; the lease is {LEASE_S:g} s")
