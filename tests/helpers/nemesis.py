"""Faults on a running local stack by a seeded schedule, clients that keep a record, and what must hold after."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
import httpx
import redis
from millrace.router.v1 import router_service_pb2, router_service_pb2_grpc

from cli.stack_state import process_alive
from services.common.grpc_client import open_channel
from tests.helpers.stack import Stack, millrace
from tests.helpers.transcripts import Transcript, stream_completion
from tests.helpers.waiting import until

SERVICES = ("gateway", "router", "worker-1", "worker-2", "usage", "redis")
VOCAB = 32_000
ACK_WINDOW = 16
# Leases of gateway and worker, and the time the reaper waits after Redis came back.
SETTLING_S = 45.0


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `kind` is `kill` or `stop`; `at` is a monotonic second."""

    at: float
    service: str
    kind: str
    paused_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one client, with the monotonic seconds of its start and end."""

    began: float
    ended: float
    seen: Transcript
    max_tokens: int

    @property
    def ending(self) -> str:
        """As `Transcript.ending`, and `cut` for a connection that closed without `[DONE]` after it was accepted."""
        if self.seen.status == httpx.codes.OK and self.seen.broken is not None and not self.seen.done:
            return "cut"
        return self.seen.ending


class Nemesis:
    """Kills or pauses one random service after the other; the same seed gives the same schedule."""

    def __init__(self, stack: Stack, seed: int, services: Sequence[str] = SERVICES) -> None:
        self.faults: list[Fault] = []
        self._stack, self._services, self._random = stack, services, random.Random(seed)

    async def run(self, for_s: float, every_s: float = 2.0) -> None:
        """Blocks for `for_s`; every paused process runs again when this returns."""
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            service, kind = self._random.choice(self._services), self._random.choice(("kill", "stop"))
            pause = self._random.uniform(1.0, 3.0)
            await self.strike(service, kind, pause)
            await asyncio.sleep(every_s * self._random.uniform(0.5, 1.5))

    async def strike(self, service: str, kind: str, pause_s: float = 0.0) -> bool:
        """Inject one fault now; False when the service is down already."""
        pid = self.pid(service)
        if pid is None:
            return False
        self.faults.append(Fault(time.monotonic(), service, kind, pause_s if kind == "stop" else 0.0))
        if kind == "kill":
            os.kill(pid, signal.SIGKILL)
            return True
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(pause_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return True

    def pid(self, service: str) -> int | None:
        """Process id of a service of this very stack, or None while it is down."""
        pid = self._stack.state.processes[service]
        try:
            about = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return None
        ours = os.fsencode(self._stack.home) in about or os.fsencode(redis_socket(self._stack)) in about
        return pid if process_alive(pid) and ours else None

    def killed(self, prefix: str, since: float, before: float) -> bool:
        """Whether a service whose name starts so was killed in this span."""
        return any(f.kind == "kill" and f.service.startswith(prefix) and since <= f.at <= before for f in self.faults)

    def lost_bill(self, billed: int, delivered: int, began: float, ended: float) -> bool:
        """Whether a stream whose gateway was killed may be billed so: up to a window of acks below what was delivered,
        or nothing where its worker was killed too."""
        if delivered - ACK_WINDOW <= billed <= delivered:
            return True
        return billed == 0 and self.killed("worker", began, ended + SETTLING_S)

    def report(self) -> str:
        """The faults, counted."""
        counts = Counter(f"{f.service} {f.kind}" for f in self.faults)
        return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items()))


async def attempt(client: httpx.AsyncClient, max_tokens: int, seen: Transcript | None = None) -> Attempt:
    """One streaming echo request; `seen` is filled meanwhile."""
    began = time.monotonic()
    body: dict[str, object] = {"model": "echo", "prompt": "one two three", "max_tokens": max_tokens, "ignore_eos": True}
    seen = await stream_completion(client, body, seen=seen)
    return Attempt(began, time.monotonic(), seen, max_tokens)


async def attempt_until_accepted(client: httpx.AsyncClient, max_tokens: int, give_up_s: float) -> list[Attempt]:
    """Try again while refused; the last one is the accepted one unless `give_up_s` passed."""
    end = time.monotonic() + give_up_s
    tries = [await attempt(client, max_tokens)]
    while tries[-1].ending == "refused" and time.monotonic() < end:
        await asyncio.sleep(0.3)
        tries.append(await attempt(client, max_tokens))
    return tries


class Door(Protocol):
    """Where requests go and with which key; a stack is one."""

    @property
    def url(self) -> str: ...

    @property
    def headers(self) -> dict[str, str]: ...


class Streams:
    """Clients that stream one answer after the other, each of so many tokens as `size` says."""

    def __init__(self, door: Door, size: Callable[[], int], *, refused_pause_s: float = 0.3) -> None:
        self.attempts: list[Attempt] = []
        self._door, self._size, self._refused_pause_s = door, size, refused_pause_s
        self._transcripts: dict[int, Transcript] = {}

    @contextlib.asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        """So many clients until the end of the block, which lets their last answers end."""
        stop = asyncio.Event()
        async with open_client(self._door) as client, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._ask_until(stop, client, number))
            try:
                yield
            finally:
                stop.set()

    def in_flight(self) -> int:
        """Streams that have begun to answer and have not ended."""
        return sum(bool(seen.text) for seen in self._transcripts.values())

    async def wait_in_flight(self, count: int, within_s: float = 240.0) -> None:
        """Blocks until so many are in flight. Raises TimeoutError."""
        await until(lambda: self.in_flight() >= count, within_s=within_s)

    async def wait_ended(self, more: int, within_s: float = 240.0) -> None:
        """Blocks until so many more that were accepted have ended. Raises TimeoutError."""
        enough = len(self.accepted()) + more
        await until(lambda: len(self.accepted()) >= enough, every_s=0.1, within_s=within_s)

    def accepted(self) -> list[Attempt]:
        """What has ended and was not refused."""
        return [a for a in self.attempts if a.ending != "refused"]

    async def _ask_until(self, stop: asyncio.Event, client: httpx.AsyncClient, number: int) -> None:
        while not stop.is_set():
            self._transcripts[number] = Transcript()
            self.attempts.append(await attempt(client, self._size(), self._transcripts[number]))
            del self._transcripts[number]
            if self.attempts[-1].ending == "refused":
                await asyncio.sleep(self._refused_pause_s)


def open_client(door: Door, timeout_s: float = 60.0) -> httpx.AsyncClient:
    """A client of an HTTP door that never reuses a connection, so that a restart breaks no idle one."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=door.url, headers=door.headers, timeout=timeout_s, limits=limits)


async def free_blocks(router_address: str) -> list[int]:
    """Free cache blocks of each healthy worker by the router's view, sorted; empty while the router is down."""
    async with open_channel(router_address) as channel:
        stub = router_service_pb2_grpc.RouterServiceStub(channel)
        try:
            answer = await stub.GetStatus(router_service_pb2.GetStatusRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return []
    return sorted(e.free_block_count for e in answer.endpoints if e.healthy and not e.draining)


async def baseline_blocks(stack: Stack, workers: int = 2, within_s: float = 30.0) -> list[int]:
    """Free blocks of a stack without load, once the router has heard from every worker."""
    end = time.monotonic() + within_s
    while len(blocks := await free_blocks(stack.state.router_address)) != workers:
        if time.monotonic() > end:
            raise AssertionError(f"the router knows {len(blocks)} of {workers} workers")
        await asyncio.sleep(0.1)
    return blocks


def held_in_redis(stack: Stack) -> dict[str, int]:
    """As `held_keys`, of a stack's own Redis."""
    with redis.Redis(unix_socket_path=redis_socket(stack)) as client:
        return held_keys(client)


def held_keys(client: redis.Redis) -> dict[str, int]:
    """Keys of requests, reservations, leases and queues that still hold something, with how much; tokens of budgets."""
    counters = {"zset": "zcard", "hash": "hlen", "stream": "xlen", "set": "scard", "list": "llen"}
    held: dict[str, int] = {}
    for key in client.scan_iter("mr:*"):
        name = key.decode()
        last = name.partition("}:")[2]
        if last in ("live", "lease", "unsettled", "res") or last.startswith("w:"):
            kind = client.type(key).decode()
            if kind in counters and (count := int(getattr(client, counters[kind])(key))):
                held[name] = count
        elif last.partition("|")[0] == "budget" and (tokens := int(client.hget(key, "reserved") or 0)):
            held[name] = tokens
    return held


def redis_socket(stack: Stack) -> str:
    """Path of the stack's Redis, which lies beside the router's socket."""
    return str(Path(stack.state.router_address.removeprefix("unix:")).with_name("redis.sock"))


async def assert_idle(stack: Stack, baseline: list[int], within_s: float = SETTLING_S) -> None:
    """Fresh requests work, nothing is held in Redis, and every block is free again."""
    end = time.monotonic() + within_s
    state: tuple[str, dict[str, int], list[int]] = ("", {}, [])
    while time.monotonic() < end:
        async with open_client(stack, 20) as client:
            fresh = await attempt(client, 3)
        await asyncio.sleep(1.5)
        try:
            state = (fresh.ending, held_in_redis(stack), await free_blocks(stack.state.router_address))
        except (redis.ConnectionError, OSError):
            continue
        if state == ("completed", {}, baseline):
            return
    raise AssertionError(f"not idle after {within_s:g} s: (request, held, free blocks) {state}, at first {baseline}")


def _bill_mistake(a: Attempt, row: dict[str, Any], nemesis: Nemesis) -> str | None:
    billed, delivered = row["billed_completion_tokens"], len(a.seen.token_ids)
    if a.ending != "cut":
        return None if billed == delivered else f"{a.ending}: billed {billed}, delivered {delivered}"
    if not nemesis.killed("gateway", a.began, a.ended + 1):
        return f"cut at {delivered} tokens though no gateway was killed: {a.seen.broken}"
    if nemesis.lost_bill(billed, delivered, a.began, a.ended):
        return None
    return f"gateway killed: billed {billed}, delivered {delivered}"


def mistakes_of(attempts: list[Attempt], rows: list[dict[str, Any]], nemesis: Nemesis) -> list[str]:
    """What is wrong with what clients saw and with the ledger's rows of it."""
    by_id = {row["request_id"]: row for row in rows}
    found = [f"{id_}: {n} rows" for id_, n in Counter(row["request_id"] for row in rows).items() if n != 1]
    for a in attempts:
        who = a.seen.request_id
        if a.ending == "unclassified":
            found.append(f"{who}: unclassified {a.seen.broken}, {len(a.seen.token_ids)} tokens")
        if not a.seen.is_echo_prefix(VOCAB):
            found.append(f"{who}: not a prefix of its echo sequence")
        if a.ending == "completed" and len(a.seen.token_ids) != a.max_tokens:
            found.append(f"{who}: completed with {len(a.seen.token_ids)} of {a.max_tokens} tokens")
        if a.ending == "refused":
            continue
        if who not in by_id:
            found.append(f"{who}: {a.ending} without a row")
        elif (wrong := _bill_mistake(a, by_id[who], nemesis)) is not None:
            found.append(f"{who} ({by_id[who]['terminal_state']}, {by_id[who]['error_reason']}): {wrong}")
    return found


def assert_usage_answers(stack: Stack, within_s: float = 30.0) -> None:
    """The supervisor pauses up to 8 s before it starts a service again that died often."""
    end = time.monotonic() + within_s
    while (done := millrace(stack.home, "usage", "export", "--format", "jsonl")).returncode != 0:
        assert time.monotonic() < end, done.stderr
        time.sleep(0.5)
