"""Five times what the stack can do: goodput, typed refusals, callers that obey Retry-After, the gateway's memory.

The echo model on one worker of a few slots; clients ask again as soon as they are answered. Rates are compared with
rates of the same run only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.stack import Stack, running_stack

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

SLOTS = 8
STEP_MS = 20
# Requests that may wait: more than two seconds of work, so that room can be held for a second's
# callers. Tokens of one request.
QUEUE, TOKENS = 24, 32
PEAK_S, OVERLOAD_S = 8, 20
SEED = int(os.environ.get("OVERLOAD_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """One request. Seconds: when it was sent, to the end; how often it was refused before."""

    began: float
    whole_s: float
    tokens: int
    refusals: int

    @property
    def ended(self) -> float:
        return self.began + self.whole_s


@dataclasses.dataclass(eq=False)
class Load:
    """Clients of one key and what came of their requests; they obey Retry-After."""

    stack: Stack
    key: str
    tokens: int
    done: list[Tried] = dataclasses.field(default_factory=list)
    # (status, reason, Retry-After) of every refusal.
    refused: list[tuple[int, str, str | None]] = dataclasses.field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        """So many clients ask on and on until the end of the block, which cuts them."""
        tasks = [asyncio.create_task(self._ask_on(f"{SEED} client {number}")) for number in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            assert task.cancelled(), task.exception()

    async def ask(self, client: httpx.AsyncClient, prompt: str) -> Tried:
        """One request to its end, refusals waited out."""
        refusals = 0
        while True:
            tried = await self._try(client, prompt, refusals)
            if isinstance(tried, Tried):
                self.done.append(tried)
                return tried
            refusals += 1
            await asyncio.sleep(tried)

    def tokens_between(self, start: float, end: float) -> int:
        """Tokens of the requests that ended in this time."""
        return sum(each.tokens for each in self.done if start <= each.ended < end)

    async def _ask_on(self, name: str) -> None:
        async with self.client() as client:
            for number in range(1_000_000):
                await self.ask(client, f"{name} asks {number}")

    def client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=self.stack.url, headers=headers, timeout=60)

    async def _try(self, client: httpx.AsyncClient, prompt: str, refusals: int) -> Tried | float:
        """What came of it, or the seconds to wait."""
        body = {"model": "echo", "prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        began, text = time.monotonic(), ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                code = json.loads(await response.aread())["error"]["code"]
                wait = response.headers.get("retry-after")
                self.refused.append((response.status_code, code, wait))
                return float(wait or 1)
            async for line in response.aiter_lines():
                if '"text":"t' in line:
                    text += line
        tokens = len(re.findall(r"t\d+ ", text))
        return Tried(began, time.monotonic() - began, tokens, refusals)


def memory_kib(stack: Stack) -> int:
    """Resident memory of the gateway."""
    status = Path(f"/proc/{stack.state.processes['gateway']}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


async def shares(loads: dict[Load, int], settle_s: float, window_s: float) -> list[int]:
    """Tokens of each load in a window in which all of them ask."""
    async with contextlib.AsyncExitStack() as running:
        for load, clients in loads.items():
            await running.enter_async_context(load.running(clients))
        await asyncio.sleep(settle_s)
        began = time.monotonic()
        await asyncio.sleep(window_s)
        return [load.tokens_between(began, began + window_s) for load in loads]


def test_five_times_too_much_costs_no_goodput_and_no_memory(tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> tuple[float, float, Load, list[int]]:
        fitting, all_of_them = (Load(stack, stack.key, TOKENS) for _ in range(2))
        [peak] = await shares({fitting: SLOTS + QUEUE}, 2, PEAK_S)
        memory = []
        async with all_of_them.running(5 * (SLOTS + QUEUE)):
            await asyncio.sleep(6)
            memory.append(memory_kib(stack))
            began = time.monotonic()
            await asyncio.sleep(OVERLOAD_S)
            memory.append(memory_kib(stack))
            goodput = all_of_them.tokens_between(began, began + OVERLOAD_S)
        return peak / PEAK_S, goodput / OVERLOAD_S, all_of_them, memory

    print(f"OVERLOAD_SEED={SEED}")
    environment = {
        "MILLRACE_ECHO_STEP_MS": str(STEP_MS),
        "MILLRACE_ENGINE": f"max_num_seqs={SLOTS}",
        "MILLRACE_QUEUE": f"max_requests={QUEUE}",
    }
    with running_stack(tmp_path / "home", "--workers", "1", "--model", "echo", env=environment) as stack:
        peak, goodput, load, memory = asyncio.run(scenario(stack))

    once = sum(each.refusals >= 1 for each in load.done)
    twice = sum(each.refusals >= 2 for each in load.done)
    kinds = Counter((status, reason) for status, reason, _ in load.refused)
    print(f"peak {peak:.0f} tokens/s, at five times the load {goodput:.0f}; refusals {dict(kinds)}")
    print(f"answered after a refusal {once}, after a second {twice}; gateway {memory} KiB; longest {longest(load)} s")
    assert goodput >= 0.9 * peak
    assert set(kinds) == {(503, "QUEUE_FULL")}
    assert all(wait is not None and 1 <= int(wait) <= 60 for _, _, wait in load.refused)
    assert memory[1] <= 1.1 * memory[0]
    assert twice < 0.05 * once


def longest(load: Load) -> str | None:
    """The longest Retry-After."""
    return max((wait for _, _, wait in load.refused if wait), key=int, default=None)
