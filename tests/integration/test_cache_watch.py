"""A router follows what real workers cache: by the hashes that a gateway computes, across evictions and gaps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from millrace.worker.v1 import worker_service_pb2 as pb
from millrace.worker.v1 import worker_service_pb2_grpc

from services.common.block_hash import chain_hashes, pack_tokens, pack_truncated, root_hash, truncated
from services.common.grpc_client import open_channel
from services.common.grpc_server import start_server
from services.common.lifecycle import end_tasks
from services.router import cache_watch
from services.router.cache_watch import CacheWatch
from services.router.prefix_index import PrefixIndex
from tests.helpers.fake_clock import FakeClock
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.waiting import until
from tests.helpers.worker import echo_config, entry, running_worker


def routing_hashes(card: pb.ModelCard, prompt: list[int]) -> list[int]:
    """As the gateway puts them into an admission entry."""
    version = f"{card.model.model}@{card.model.version}:{card.model.manifest_digest.hex()}"
    root = root_hash(model_version=version, adapter_digest=b"", tenant_salt=b"salt")
    return [truncated(full) for full in chain_hashes(root, pack_tokens(prompt), block_size=card.block_size)]


async def test_the_index_follows_what_a_worker_caches_and_evicts() -> None:
    index = PrefixIndex()
    async with running_worker(config=echo_config(num_blocks=24, max_model_len=384)) as rig:
        gateway = await rig.gateway()
        watch = CacheWatch(rig.app.instance, gateway.stub, index, FakeClock(), router_instance="router-1")
        task = asyncio.create_task(watch.run())
        card = (await gateway.stub.GetModelCard(pb.GetModelCardRequest())).card
        prompts = {name: list(range(start, start + 160)) for name, start in (("r1", 1), ("r2", 20), ("r3", 40))}

        await gateway.submit(entry("r1", prompt=prompts["r1"]))
        await gateway.finished("r1")
        hashes = {name: routing_hashes(card, prompt) for name, prompt in prompts.items()}
        await until(lambda: index.leading(rig.app.instance, hashes["r1"], 0.0) == 10)

        for name in ("r2", "r3"):
            await gateway.submit(entry(name, prompt=prompts[name]))
            await gateway.finished(name)
        await until(lambda: index.leading(rig.app.instance, hashes["r3"], 0.0) == 10)
        await until(lambda: index.leading(rig.app.instance, hashes["r1"], 0.0) < 10)

        await end_tasks([task])
        await gateway.close()


class GappedWorker(FakeWorker):
    """Says at first that it lost a message, then all it has."""

    def __init__(self) -> None:
        super().__init__("worker-1")
        self.opened = 0

    async def WatchCache(self, request: Any, context: Any) -> AsyncIterator[pb.WatchCacheResponse]:
        self.opened += 1
        hashes = [number.to_bytes(8, "little") for number in (1, 2, 3)]
        answers = [(1, True, hashes[:1]), (3 if self.opened == 1 else 2, False, hashes[1:])]
        for sequence, snapshot, stored in answers:
            yield pb.WatchCacheResponse(
                worker_instance="worker-1", sequence=sequence, snapshot=snapshot, stored=pack_truncated(stored)
            )
        await asyncio.Event().wait()


async def test_after_a_gap_the_stream_is_opened_again_and_nothing_old_is_believed() -> None:
    index, clock = PrefixIndex(), FakeClock()
    worker = await GappedWorker().start()
    channel = open_channel(worker.record.address)
    stub: Any = worker_service_pb2_grpc.WorkerServiceStub(channel)
    task = asyncio.create_task(CacheWatch("worker-1", stub, index, clock, router_instance="router-1").run())
    await until(lambda: worker.opened == 1 and clock.sleeper_count == 1)
    assert index.leading("worker-1", (1, 2, 3), 0.0) == 0

    await clock.advance(cache_watch.REOPEN_S)

    await until(lambda: index.leading("worker-1", (1, 2, 3), 0.0) == 3)
    assert worker.opened == 2
    await end_tasks([task])
    await channel.close()
    await worker.kill()


async def test_a_worker_that_cannot_say_what_it_caches_is_left_alone() -> None:
    server = await start_server("127.0.0.1:0", lambda _: None, service_names=[])
    channel = open_channel(server.address)
    stub: Any = worker_service_pb2_grpc.WorkerServiceStub(channel)

    await CacheWatch("worker-1", stub, PrefixIndex(), FakeClock(), router_instance="router-1").run()

    await channel.close()
    await server.stop(0)
