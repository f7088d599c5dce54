"""Blocks from one process to another: GB/s of both transports by block size, with the embedded model's layout.

`python -m benchmarks.transfer` moves blocks in batches as workers do, and says that each has landed; no model runs.
Prints a table and writes `benchmarks/results/transfer.json`; takes less than a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np
from millrace.worker.v1 import worker_service_pb2 as pb
from millrace.worker.v1 import worker_service_pb2_grpc
from rich.console import Console
from rich.table import Table

from benchmarks.results import RESULTS, machine, save
from services.common.grpc_client import open_channel
from services.common.grpc_server import start_server
from services.worker.engine.kv_blocks import KVBlock, KVLayout, is_intact, sealed
from services.worker.kv_staging import StagingArea
from services.worker.kv_transport import KVTransfer, share_of
from services.worker.prefill_desk import BATCH_BYTES
from services.worker.runtime.transfers.grpc_stream import GrpcTransfer
from services.worker.runtime.transfers.nixl import NixlTransfer, nixl_module
from services.worker.wiring import SERVICE_NAME

TRANSPORTS = ("grpc", "nixl")
BLOCK_SIZES = (16, 64, 256)
STAGING_BYTES = 128 << 20
# Payloads are distinct, so that a block in the wrong slot is noticed.
DISTINCT_BLOCKS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """What is moved, and for how long each repeat sends."""

    transport: str
    block_size: int
    layout: KVLayout
    repeat_s: float

    @property
    def batch(self) -> int:
        """Blocks that are sent together."""
        return max(1, BATCH_BYTES // self.layout.block_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """`gb_per_s` are 10⁹ bytes a second, from the call's start to the word that all has landed; its repeats."""

    transport: str
    block_size: int
    block_bytes: int
    batch: int
    gb_per_s: float
    repeats: list[float]


def embedded_layout() -> KVLayout:
    """Of blocks of the smallest size, as the embedded model is served by default."""
    # The model is loaded here only: senders start without torch.
    from services.worker.runtime.factory import RunnerOptions, load_runner

    size = min(BLOCK_SIZES)
    return load_runner(RunnerOptions(block_size=size, num_blocks=2, max_model_len=size)).runner.kv_layout


def scaled(layout: KVLayout, factor: int) -> KVLayout:
    """Blocks of `factor` times as many tokens."""
    return dataclasses.replace(layout, shape=(*layout.shape[:-1], layout.shape[-1] * factor))


def _transfer(cell: Cell, staging: StagingArea, agent: str) -> KVTransfer:
    if cell.transport == "grpc":
        return GrpcTransfer()
    api = nixl_module()
    if api is None:
        raise SystemExit("the package nixl is not installed: install the extra `transfer`, or name --transports grpc")
    return NixlTransfer(api, staging, agent=agent, batch=cell.batch)


def _blocks(layout: KVLayout) -> list[KVBlock]:
    random = np.random.default_rng(1)
    payloads = [random.bytes(layout.block_bytes) for _ in range(DISTINCT_BLOCKS)]
    return [sealed(bytes([number]) * 32, payload, layout) for number, payload in enumerate(payloads)]


class Sender(worker_service_pb2_grpc.WorkerServiceServicer):
    """Answers `Prefill` with the same few blocks, over and over, into the slots of the start."""

    def __init__(self, cell: Cell, transfer: KVTransfer) -> None:
        self._cell = cell
        self._transfer = transfer
        self._blocks = _blocks(cell.layout)

    async def Prefill(  # type: ignore[override]  # a coroutine that writes, as the worker's
        self,
        request_iterator: AsyncIterator[pb.PrefillRequest],
        context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillResponse],
    ) -> None:
        """Send for the time of a repeat."""
        start = (await anext(request_iterator)).start
        if not self._transfer.accepts(start):
            raise ValueError("the transports do not fit")
        sender = await self._transfer.sender(start, context.write)
        slots, sent = list(start.slots), 0
        await context.write(pb.PrefillResponse(accepted=pb.PrefillAccepted(transport=self._cell.transport)))
        began = time.perf_counter()
        while time.perf_counter() - began < self._cell.repeat_s:
            numbers = range(sent, sent + min(self._cell.batch, len(slots)))
            batch = [(slots[n % len(slots)], self._blocks[n % DISTINCT_BLOCKS]) for n in numbers]
            await sender.send(batch)
            landed = [pb.LandedBlock(slot=s, full_hash=b.full_hash, checksum=b.checksum) for s, b in batch]
            await context.write(pb.PrefillResponse(landed=pb.KVLanded(blocks=landed)))
            sent += len(batch)
        await sender.close()
        await context.write(pb.PrefillResponse(done=pb.PrefillDone(block_count=sent)))
        # What a caller has not read yet is lost to it once the call is over.
        async for _ in request_iterator:
            pass


def send(cell: Cell, pipe: Connection) -> None:
    """The sending process: tells its address, serves until told to end."""
    asyncio.run(_serve(cell, pipe))


async def _serve(cell: Cell, pipe: Connection) -> None:
    area = StagingArea(block_bytes=cell.layout.block_bytes, area_bytes=STAGING_BYTES)
    transfer = _transfer(cell, area, "bench-sender")
    server = await start_server(
        "127.0.0.1:0",
        lambda made: worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(Sender(cell, transfer), made),
        service_names=[SERVICE_NAME],
    )
    pipe.send(server.address)
    await asyncio.to_thread(pipe.recv)
    await server.stop(0.1)
    await transfer.close()


async def receive(cell: Cell, address: str, repeats: int) -> Result:
    """The receiving process: GB/s of each repeat, after one that does not count."""
    staging = StagingArea(block_bytes=cell.layout.block_bytes, area_bytes=STAGING_BYTES)
    transfer = _transfer(cell, staging, "bench-receiver")
    speeds = []
    async with open_channel(address) as channel:
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        for _ in range(repeats + 1):
            speeds.append(await _repeat(cell, stub, transfer, staging))
    await transfer.close()
    speeds = [round(speed, 3) for speed in speeds[1:]]
    median = round(statistics.median(speeds), 3)
    return Result(cell.transport, cell.block_size, cell.layout.block_bytes, cell.batch, median, speeds)


async def _repeat(
    cell: Cell, stub: worker_service_pb2_grpc.WorkerServiceStub, transfer: KVTransfer, staging: StagingArea
) -> float:
    slots = staging.lease(share_of(staging, batch_bytes=BATCH_BYTES))
    start = pb.PrefillStart(request_id="bench", slots=slots)
    transfer.offer(start)
    call = stub.Prefill()
    await call.write(pb.PrefillRequest(start=start))
    began, block_count = 0.0, 0
    landed: dict[int, pb.LandedBlock] = {}
    async for message in call:
        match message.WhichOneof("message"):
            case "accepted":
                began = time.perf_counter()
            case "part":
                staging.write(message.part.slot, message.part.offset, message.part.data)
            case "landed":
                landed |= {block.slot: block for block in message.landed.blocks}
                block_count += len(message.landed.blocks)
            case "done":
                break
    spent = time.perf_counter() - began
    await call.done_writing()
    blocks = [KVBlock(each.full_hash, staging.read(slot), each.checksum) for slot, each in landed.items()]
    if not blocks or not all(is_intact(block, cell.layout) for block in blocks):
        raise SystemExit(f"{cell.transport}: what landed is not what was sent")
    staging.release(slots)
    return block_count * cell.layout.block_bytes / spent / 1e9


def measure(cell: Cell, repeats: int) -> Result:
    """One transport at one block size, with a sending process of its own."""
    spawn = multiprocessing.get_context("spawn")
    pipe, far = spawn.Pipe()
    process = spawn.Process(target=send, args=(cell, far), daemon=True)
    process.start()
    far.close()
    try:
        return asyncio.run(receive(cell, pipe.recv(), repeats))
    finally:
        pipe.send(None)
        process.join(10)
        process.kill()


def table(results: list[Result]) -> Table:
    """What is printed."""
    made = Table(title="Keys and values between two processes")
    made.add_column("transport")
    for name in ("block tokens", "block MB", "blocks a batch", "GB/s median", "best"):
        made.add_column(name, justify="right")
    for each in results:
        figures = (each.block_size, round(each.block_bytes / 1e6, 2), each.batch, each.gb_per_s, max(each.repeats))
        made.add_row(each.transport, *(f"{figure:g}" for figure in figures))
    return made


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--block-sizes", nargs="+", type=int, choices=BLOCK_SIZES, default=list(BLOCK_SIZES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.7, help="that each repeat sends")
    parser.add_argument("--json", type=Path, default=RESULTS / "transfer.json")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or not arguments.seconds > 0:
        parser.error("--repeats and --seconds are above 0")
    layout, smallest = embedded_layout(), min(BLOCK_SIZES)
    results = []
    for transport in arguments.transports:
        for size in arguments.block_sizes:
            cell = Cell(transport, size, scaled(layout, size // smallest), arguments.seconds)
            results.append(measure(cell, arguments.repeats))
            print(f"{transport}, {size} tokens: {results[-1].gb_per_s} GB/s", flush=True)
    Console().print(table(results))
    config = {"repeats": arguments.repeats, "repeat_s": arguments.seconds, "staging_bytes": STAGING_BYTES}
    config |= {"layout": dataclasses.asdict(layout), "load_after": machine()["load"]}
    print(save("transfer", config, [dataclasses.asdict(each) for each in results], arguments.json))


if __name__ == "__main__":
    main()
