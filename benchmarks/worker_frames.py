"""Frames a second of one worker process of the echo model at 1, 32 and 256 gateways. A part of `benchmarks.router`.

256 requests run at once, as many of each gateway; the gateways are in this process and acknowledge each frame. The time
is that from the first submit to the end of the last request; `worker_cpu_us` is the worker's own processor time a
frame, steps of its engine included.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from pathlib import Path

from millrace.worker.v1 import worker_service_pb2 as pb

from benchmarks.results import cpu_ms
from services.common.admission_store import AdmissionStore
from services.common.redis_client import connect
from tests.helpers.redis import RedisProcess
from tests.helpers.waiting import until
from tests.helpers.worker import GatewayClient, entry
from tests.helpers.worker_processes import WorkerProcesses

GATEWAYS = (1, 32, 256)
REQUESTS = 256
OUTPUT_TOKENS = 128
STEP_MS = 5
ENGINE = f"max_num_seqs={REQUESTS},max_model_len=2048,num_blocks=8192"


@dataclasses.dataclass(frozen=True, slots=True)
class Frames:
    """One measurement; `events` are deltas and the like, of which a frame carries those of all its requests."""

    gateways: int
    frames: int
    per_second: int
    events_per_second: int
    worker_cpu_us: float


async def frames(redis: RedisProcess, gateway_count: int) -> Frames:
    """Start a worker, run all requests. Raises SystemExit when a stream had a gap or no end."""
    redis.flush()
    client = connect(redis.url)
    store = AdmissionStore(client)
    with tempfile.TemporaryDirectory() as folder:
        workers = WorkerProcesses(redis.url, Path(folder), step_ms=STEP_MS)
        process = workers.start("worker", engine=ENGINE)
        try:
            await until(lambda: _is_registered(store))
            [record] = await store.list_workers()
            gateways = [GatewayClient(record.address, f"gateway-{n}") for n in range(gateway_count)]
            try:
                return await _measure(gateways, process.pid)
            finally:
                await asyncio.gather(*(gateway.close() for gateway in gateways))
        finally:
            workers.stop()
            await client.aclose()


async def _measure(gateways: list[GatewayClient], pid: int) -> Frames:
    await asyncio.gather(*(gateway.attach() for gateway in gateways))
    async for view in gateways[0].stub.Watch(pb.WatchRequest(router_instance="router-1")):
        if len(view.attached_gateways) == len(gateways):
            break
    works = [entry(f"r{n}", gateway=f"gateway-{n % len(gateways)}", max_tokens=OUTPUT_TOKENS) for n in range(REQUESTS)]
    owners = [gateways[n % len(gateways)] for n in range(REQUESTS)]
    cpu, began = cpu_ms(pid), time.perf_counter()
    answers = await asyncio.gather(*(gateway.submit(work) for gateway, work in zip(owners, works, strict=True)))
    if not all(answer.accepted for answer in answers):
        raise SystemExit("the worker refused a request")
    await asyncio.gather(*(g.finished(work.request_id) for g, work in zip(owners, works, strict=True)))
    spent, used = time.perf_counter() - began, cpu_ms(pid) - cpu
    for gateway, work in zip(owners, works, strict=True):
        held = gateway.of(work.request_id)
        if held.problems or [len(tokens) for tokens in held.tokens.values()] != [OUTPUT_TOKENS]:
            raise SystemExit(f"the stream of {work.request_id} is broken: {held.problems}")
    count = sum(len(gateway.frames) for gateway in gateways)
    events = sum(len(frame.events) for gateway in gateways for frame in gateway.frames)
    return Frames(len(gateways), count, round(count / spent), round(events / spent), round(used * 1000 / count, 1))


async def _is_registered(store: AdmissionStore) -> bool:
    return bool(await store.list_workers())
