"""Clients in closed loops on a running stack of the echo model, and what came of their requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterable

import httpx

from tests.helpers.stack import Stack
from tests.helpers.transcripts import ECHO_TOKEN

SEED = int(os.environ.get("OVERLOAD_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


@dataclasses.dataclass(frozen=True, slots=True)
class Tried:
    """One request. Seconds: when it was sent, to its first token, to its end; how often it was refused before."""

    began: float
    first_s: float
    whole_s: float
    tokens: int
    refusals: int

    @property
    def first_at(self) -> float:
        return self.began + self.first_s


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """One refusal: its status, reason and Retry-After, and the seconds until it was there."""

    status: int
    reason: str
    retry_after: str | None
    after_s: float


@dataclasses.dataclass(eq=False)
class Load:
    """Clients of one key and what came of their requests; they obey Retry-After."""

    stack: Stack
    key: str
    tokens: int
    # Tokens that came so far, those of requests in flight too.
    delivered: int = 0
    done: list[Tried] = dataclasses.field(default_factory=list)
    refused: list[Refused] = dataclasses.field(default_factory=list)

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

    async def tokens_a_second(self, for_s: float) -> float:
        """Tokens that come a second from now on, while the clients run."""
        began, before = time.monotonic(), self.delivered
        await asyncio.sleep(for_s)
        return (self.delivered - before) / (time.monotonic() - began)

    async def _ask_on(self, name: str) -> None:
        async with self.client() as client:
            for number in range(1_000_000):
                await self.ask(client, f"{name} asks {number}")

    def client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.key}"}
        # By itself each client reads the machine's certificates first, which takes longer than a request.
        return httpx.AsyncClient(base_url=self.stack.url, headers=headers, timeout=60, verify=False)

    async def _try(self, client: httpx.AsyncClient, prompt: str, refusals: int) -> Tried | float:
        """What came of it, or the seconds to wait."""
        body = {"model": "echo", "prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        began, first_s, tokens = time.monotonic(), 0.0, 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                code = json.loads(await response.aread())["error"]["code"]
                wait = response.headers.get("retry-after")
                self.refused.append(Refused(response.status_code, code, wait, time.monotonic() - began))
                return float(wait or 1)
            async for line in response.aiter_lines():
                if '"text":"t' in line:
                    first_s = first_s or time.monotonic() - began
                    came = len(ECHO_TOKEN.findall(line))
                    tokens += came
                    self.delivered += came
        return Tried(began, first_s, time.monotonic() - began, tokens, refusals)


def percentile(values: Iterable[float], share: float) -> float:
    """The value that this share of them is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
