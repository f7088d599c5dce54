"""Load through a counting proxy while clients leave and processes die; every row compared with the count."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
import redis

from tests.helpers.counting_proxy import Counted, CountingProxy, read_until
from tests.helpers.nemesis import Nemesis, redis_socket
from tests.helpers.stack import Stack, millrace

AT_ONCE = 16
# Cuts between two lines of progress.
TOLD_EVERY = 100
# How long a killed process may take to be there again: the supervisor pauses longer after each death.
RETURN_S = 60.0


class ExactBill:
    """Clients that come until `cuts` of them have left in mid-stream and every kill is done."""

    def __init__(self, stack: Stack, seed: int, *, cuts: int) -> None:
        self.stack = stack
        self.nemesis = Nemesis(stack, seed)
        self.cut_count = 0
        self.seen: list[Counted] = []
        self._random = random.Random(seed)
        self._cuts = cuts
        self._began = time.time()
        self._killed = asyncio.Event()

    async def run(self, kills: Sequence[Sequence[str]]) -> None:
        """`kills` names the services that die together, in order; each waits until it is back from its last death."""
        async with CountingProxy(self.stack.port) as proxy:
            limits = httpx.Limits(max_keepalive_connections=0)
            async with httpx.AsyncClient(
                base_url=proxy.url, headers=self.stack.headers, timeout=60, limits=limits
            ) as client:
                clients = [asyncio.create_task(self._client(client, proxy)) for _ in range(AT_ONCE)]
                await self._kill(kills, proxy)
                self._killed.set()
                await asyncio.gather(*clients)
            self.seen = [counted for counted in proxy.seen if counted.accepted]

    async def _client(self, client: httpx.AsyncClient, proxy: CountingProxy) -> None:
        while self.cut_count < self._cuts or not self._killed.is_set():
            size = self._random.randint(10, 60)
            leave = self._random.randint(1, size) if self._random.random() < 0.8 else None
            left = await read_until(client, size, leave)
            self.cut_count += left
            if left and self.cut_count % TOLD_EVERY == 0:
                self._say("clients left", proxy)
            await asyncio.sleep(0.0 if left else 0.05)

    async def _kill(self, kills: Sequence[Sequence[str]], proxy: CountingProxy) -> None:
        for number, services in enumerate(kills, 1):
            end = time.monotonic() + RETURN_S
            # So that its streams are lost, not only its start.
            wanted = sum(counted.accepted for counted in proxy.seen) + AT_ONCE
            while sum(counted.accepted for counted in proxy.seen) < wanted:
                assert time.monotonic() < end, "no streams run"
                await asyncio.sleep(0.02)
            await asyncio.sleep(self._random.uniform(0.0, 0.5))
            for service in services:
                while not await self.nemesis.strike(service, "kill"):
                    assert time.monotonic() < end, f"{service} did not come back"
                    await asyncio.sleep(0.1)
            self._say(f"{', '.join(services)} killed, {number} of {len(kills)} times", proxy)

    def _say(self, what: str, proxy: CountingProxy) -> None:
        spent = time.time() - self._began
        print(f"{spent:.0f} s: {what}; {len(proxy.seen)} streams, {self.cut_count} cut", flush=True)

    def reconcile(self) -> subprocess.CompletedProcess[str]:
        """`millrace usage reconcile` over the time of the load."""
        since, until = (
            time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) for moment in (self._began - 5, time.time() + 5)
        )
        return millrace(self.stack.home, "usage", "reconcile", "--since", since, "--until", until)

    def mistakes(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Rows that do not say what passed the proxy."""
        by_id = {row["request_id"]: row for row in rows}
        found = [f"{name}: {n} rows" for name, n in Counter(row["request_id"] for row in rows).items() if n != 1]
        for counted in self.seen:
            row = by_id.get(counted.request_id)
            if row is None:
                wrong: str | None = f"no row, {self._about(counted)}"
            else:
                wrong = self._mistake(counted, row["billed_completion_tokens"])
            if wrong is not None:
                state = "" if row is None else f"{row['terminal_state']} {row['error_reason']}"
                found.append(f"{counted.request_id} ({state}): {wrong}")
        return found

    def _about(self, counted: Counted) -> str:
        """What is known of a request that nobody ended: its end, the last kill before it, Redis' record, the logs."""
        now, name = time.monotonic(), counted.request_id
        kills = [fault.at - counted.ended for fault in self.nemesis.faults if fault.at <= counted.ended + 1]
        with redis.Redis(unix_socket_path=redis_socket(self.stack)) as client:
            records = [client.hgetall(key) for key in client.scan_iter(f"mr:*:req:{name}")]
            live = [key for key in client.scan_iter("mr:*:live") if client.hexists(key, name)]
        fields = [{k: v for k, v in record.items() if k != b"event"} for record in records]
        logged = [
            f"{path.name}: {line}"
            for path in sorted((self.stack.home / "logs").glob("*.log*"))
            for line in path.read_text(errors="replace").splitlines()
            if name in line
        ]
        return (
            f"{counted.token_count} tokens passed, done {counted.done}, ended {now - counted.ended:.1f} s ago, nearest "
            f"kill {max(kills, default=0.0):+.3f} s from its end, Redis {fields}, live in {live}, logs {logged}"
        )

    def _mistake(self, counted: Counted, billed: int) -> str | None:
        count, nemesis = counted.token_count, self.nemesis
        if billed == count:
            return None
        if not nemesis.killed("gateway", counted.began, counted.ended + 1):
            return f"billed {billed}, {count} passed the proxy"
        if nemesis.lost_bill(billed, count, counted.began, counted.ended):
            return None
        return f"the gateway was killed: billed {billed}, {count} passed the proxy"
