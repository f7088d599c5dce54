"""One router process: requests a second from the queue to a worker's acceptance and recorded ownership, and its growth.

Three parts. `throughput`: real Redis, a router of its own process, workers in this one that take every Submit at once,
end it 50 ms later and tell of their room as workers do. The queue is full before the workers show room; the time is
that until no request is without an owner. Router, Redis and workers share the machine: their processor time a request,
in microseconds, says which of them it went to. `idle`: an idle stack of the echo model with all services in this
process; the time from the last byte of a body handed to the gateway's connection until a worker has accepted the
request, one request after the other. `frames`: see `worker_frames`. Prints tables, writes
`benchmarks/results/router.json` and `.md`. Never run by tests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
from millrace.worker.v1 import worker_service_pb2
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.results import RESULTS, cpu_ms, save
from benchmarks.worker_frames import GATEWAYS, frames
from services.common.admission_store import AdmissionStore
from services.common.admission_types import PoolCaps, Queued
from services.common.clock import SystemClock
from services.common.redis_client import connect
from services.common.telemetry import setup_telemetry
from services.worker.view_feed import ViewFeed
from tests.helpers.admission import POOL, make_entry
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.four_services import KEY, four_services
from tests.helpers.redis import RedisProcess
from tests.helpers.waiting import until

ROOT = Path(__file__).parents[1]
PARTS = ("throughput", "idle", "frames")
TENANTS = (1, 100, 10_000)
WORKERS = (1, 16, 256)
PROMPT_TOKENS = 256
SLOTS = 256
RUNS_S = 0.05
REGISTER_PERIOD_S = 1.5
ENQUEUE_TOGETHER = 64
# Enough that the streams, which are opened at a worker's first submit, are not what is measured.
REQUESTS_A_WORKER = 64
LOOK_PERIOD_S = 0.02
CAPS = PoolCaps(requests=1_000_000, tokens=10**12, bytes=1 << 40, tenant_requests=1_000_000, predicted_wait_ms=10**9)


@dataclasses.dataclass(frozen=True, slots=True)
class Throughput:
    """One measurement of claim → accepted → owned."""

    tenants: int
    workers: int
    requests: int
    per_second: int
    router_cpu_us: float
    redis_cpu_us: float
    workers_cpu_us: float


@dataclasses.dataclass(frozen=True, slots=True)
class Idle:
    """Milliseconds from body received to submit accepted."""

    requests: int
    p50_ms: float
    p99_ms: float


class EagerWorker(FakeWorker):
    """Takes every request and ends it soon; tells its room as a worker does. No room until `open`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"worker-{number}", slots=0)
        self.watched = asyncio.Event()
        self.views = ViewFeed(self.numbered_view, SystemClock())
        self.taken = 0

    def open(self) -> None:
        """From here on there is room."""
        self.slots = SLOTS
        self.views.press()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_service_pb2.WatchResponse]:
        """Say that a router listens, then views."""
        self.watched.set()
        async for view in self.views.watch(request.router_instance):
            yield view

    async def SubmitStream(
        self, request_iterator: AsyncIterator[worker_service_pb2.SubmitStreamRequest], context: Any
    ) -> AsyncIterator[worker_service_pb2.SubmitStreamResponse]:
        """Accept."""
        async for message in request_iterator:
            responses = [self._take(request) for request in message.requests]
            self.views.note()
            asyncio.get_running_loop().call_later(RUNS_S, self._end, [one.request_id for one in responses])
            view = self.views.answer(
                message.requests[0].router_instance, message.view_patience.ToTimedelta().total_seconds()
            )
            yield worker_service_pb2.SubmitStreamResponse(responses=responses, view=view)

    def _take(self, request: worker_service_pb2.SubmitRequest) -> worker_service_pb2.SubmitResponse:
        self.taken += 1
        request_id = request.entry.request_id
        self.running[request_id] = 1
        return worker_service_pb2.SubmitResponse(
            request_id=request_id,
            epoch=request.epoch,
            worker_instance=self.instance,
            accepted=True,
            watch_sequence=self.views.sequence,
        )

    def _end(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)
        self.views.note()


@contextlib.contextmanager
def router_process(redis_url: str) -> Iterator[int]:
    """A router as an operator starts it; gives its process id."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos" / "gen")])}
    environment |= {"MILLRACE_REDIS_URL": redis_url, "MILLRACE_LOG_LEVEL": "error", "GRPC_VERBOSITY": "NONE"}
    with subprocess.Popen([sys.executable, "-m", "services.router"], env=environment) as process:
        try:
            yield process.pid
        finally:
            process.terminate()


@contextlib.asynccontextmanager
async def eager_workers(store: AdmissionStore, count: int) -> AsyncIterator[list[EagerWorker]]:
    """Workers whose leases are kept."""
    workers = [EagerWorker(number) for number in range(count)]

    async def keep() -> None:
        while True:
            await asyncio.gather(*(worker.register(store) for worker in workers))
            await asyncio.sleep(REGISTER_PERIOD_S)

    for worker in workers:
        await worker.start()
    async with asyncio.TaskGroup() as tasks:
        keeper = tasks.create_task(keep())
        try:
            yield workers
        finally:
            keeper.cancel()
            await asyncio.gather(*(worker.kill() for worker in workers))


async def fill(store: AdmissionStore, requests: int, tenants: int) -> None:
    """Queue as many requests of each tenant."""
    numbers = iter(range(requests))

    async def some() -> None:
        for number in numbers:
            entry = make_entry(f"r{number}", f"tenant-{number % tenants}", prompt=PROMPT_TOKENS)
            if not isinstance(await store.enqueue(POOL, entry, CAPS, remaining_ms=600_000), Queued):
                raise SystemExit("a request was refused that should have been queued")

    await asyncio.gather(*(some() for _ in range(ENQUEUE_TOGETHER)))


async def is_empty(store: AdmissionStore) -> bool:
    """No request is without an owner."""
    return await store.count_queued(POOL) == 0


async def throughput(redis: RedisProcess, *, tenants: int, workers: int, requests: int) -> Throughput:
    """One router, one full queue. Raises SystemExit when a request was submitted twice or never."""
    redis.flush()
    requests = max(requests, tenants, REQUESTS_A_WORKER * workers)
    client = connect(redis.url)
    store = AdmissionStore(client)
    try:
        await fill(store, requests, tenants)
        with router_process(redis.url) as pid:
            async with eager_workers(store, workers) as served:
                # What the start made stays: it is not looked through again and again while the measurement runs.
                gc.freeze()
                async with asyncio.timeout(30):
                    await asyncio.gather(*(worker.watched.wait() for worker in served))
                began, before = time.perf_counter(), _cpu_us(pid, redis)
                for worker in served:
                    worker.open()
                await until(lambda: is_empty(store), every_s=LOOK_PERIOD_S)
                spent, after = time.perf_counter() - began, _cpu_us(pid, redis)
        taken = sum(worker.taken for worker in served)
        if taken != requests:
            raise SystemExit(f"{taken} submits were accepted of {requests} requests")
    finally:
        await client.aclose()
    used = [round((late - early) / requests, 1) for early, late in zip(before, after, strict=True)]
    return Throughput(tenants, workers, requests, round(requests / spent), *used)


def _cpu_us(router_pid: int, redis: RedisProcess) -> tuple[float, ...]:
    """Processor time so far of router, Redis and this process."""
    return tuple(cpu_ms(pid) * 1000 for pid in (router_pid, redis.pid, os.getpid()))


async def idle(redis: RedisProcess, count: int) -> Idle:
    """One request after the other through gateway and router to an echo worker."""
    redis.flush()
    spans = InMemorySpanExporter()
    telemetry = setup_telemetry("bench", instance="bench", log_level="error", span_exporter=spans)
    body = json.dumps({"model": "echo", "prompt": "one two three four", "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    taken: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with four_services(redis.url, Path(folder)) as client:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            for _ in range(count + 20):
                spans.clear()
                sent = time.time_ns()
                writer.write(head.encode() + body)
                answer = await reader.readuntil(b"\r\n\r\n")
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"the gateway answered {answer.splitlines()[0].decode()}")
                length = next(line for line in answer.lower().splitlines() if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                [accepted] = [s.end_time for s in spans.get_finished_spans() if s.name == "router.submit"]
                taken.append(((accepted or 0) - sent) / 1e6)
            writer.close()
    telemetry.shutdown()
    measured = sorted(taken[20:])
    return Idle(count, round(statistics.median(measured), 2), round(measured[int(count * 0.99)], 2))


def table(rows: Sequence[Any]) -> str:
    """Markdown of results of one kind."""
    columns = [field.name for field in dataclasses.fields(rows[0])]
    lines = ["| " + " | ".join(str(value) for value in dataclasses.astuple(each)) + " |" for each in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *lines])


async def run(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    """Rows by part, on one Redis."""
    rows: dict[str, list[Any]] = {}
    redis = RedisProcess(append_only=False).start()
    try:
        for part in arguments.parts:
            rows[part] = [row async for row in _measured(redis, part, arguments)]
            print(f"{table(rows[part])}\n", flush=True)
    finally:
        redis.stop()
    return rows


async def _measured(redis: RedisProcess, part: str, arguments: argparse.Namespace) -> AsyncIterator[Any]:
    if part == "throughput":
        for workers in arguments.workers:
            for tenants in arguments.tenants:
                yield await throughput(redis, tenants=tenants, workers=workers, requests=arguments.requests)
    elif part == "idle":
        yield await idle(redis, arguments.idle_requests)
    else:
        for gateways in arguments.gateways:
            yield await frames(redis, gateways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tenants", nargs="+", type=int, default=list(TENANTS))
    parser.add_argument("--workers", nargs="+", type=int, default=list(WORKERS))
    parser.add_argument("--gateways", nargs="+", type=int, default=list(GATEWAYS))
    parser.add_argument(
        "--requests", type=int, default=4_000, help="requests a measurement, at least one a tenant and 64 a worker"
    )
    parser.add_argument("--idle-requests", type=int, default=300)
    arguments = parser.parse_args()
    rows = uvloop.run(run(arguments))
    config = {**vars(arguments), "prompt_tokens": PROMPT_TOKENS, "slots": SLOTS}
    tables = "\n\n".join(f"## {part}\n\n{table(measured)}" for part, measured in rows.items())
    (RESULTS / "router.md").write_text(f"# Router\n\n`python -m benchmarks.router`\n\n{tables}\n")
    print(save("router", config, [{part: [*map(dataclasses.asdict, measured)]} for part, measured in rows.items()]))


if __name__ == "__main__":
    main()
