"""Finds workers by their leases and keeps a stream of views and one of cache changes to each. The lease is discovery
only: the view decides.

A Redis that is away changes nothing here. Owns the channels to workers. Called by the claim loop and the dispatcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable

import grpc
import structlog
from millrace.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

from services.common.admission_store import AdmissionStore
from services.common.admission_types import Pool, WorkerRecord
from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.common.grpc_client import Dial, open_channel
from services.common.lifecycle import end_tasks
from services.router.cache_watch import CacheWatch
from services.router.endpoint import Endpoint, View
from services.router.prefix_index import PrefixIndex
from services.router.roster import Roster
from services.router.submit_link import SubmitLink

DISCOVERY_PERIOD_S = 1.0
# Views of workers with plenty of room that this router wants to hear at most, those with answers aside.
VIEWS_PER_S = 500
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 2.0
_NOBODY = Roster()


@dataclasses.dataclass(slots=True)
class _Link:
    endpoint: Endpoint
    channel: grpc.aio.Channel
    submits: SubmitLink
    tasks: tuple[asyncio.Task[None], ...]


class EndpointRegistry:
    """The workers this router may use. `on_change` is called after each view and each change of the set."""

    def __init__(
        self,
        store: AdmissionStore,
        router_instance: str,
        clock: Clock,
        on_change: Callable[[], None],
        dial: Dial = open_channel,
    ) -> None:
        self._store = store
        self._dial = dial
        self._router_instance = router_instance
        self._clock = clock
        self._on_change = on_change
        self._links: dict[str, _Link] = {}
        self._rosters: dict[Pool, Roster] = {}
        self.prefixes = PrefixIndex()

    def endpoints(self, pool: Pool | None = None) -> list[Endpoint]:
        """All endpoints, or those of one pool."""
        if pool is None:
            return [link.endpoint for link in self._links.values()]
        return self._rosters[pool].endpoints if pool in self._rosters else []

    def roster(self, pool: Pool) -> Roster:
        """The workers of a pool by how free they are; without any where none is known."""
        return self._rosters.get(pool, _NOBODY)

    def pools(self) -> list[Pool]:
        """Pools that some known worker serves."""
        return list(self._rosters)

    def submits(self, instance: str) -> SubmitLink | None:
        """What carries submits to a worker, or None when it has left."""
        link = self._links.get(instance)
        return link.submits if link is not None else None

    async def run(self) -> None:
        """Discover each second until cancelled."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self.discover()
            await self._clock.sleep(DISCOVERY_PERIOD_S)

    async def discover(self) -> None:
        """Add workers with a lease; drop those without one whose Watch is silent too. Raises StoreUnavailable."""
        listed = {record.instance: record for record in await self._store.list_workers()}
        for instance, record in listed.items():
            if instance not in self._links:
                self._add(record)
        now = self._clock.monotonic()
        for instance, link in list(self._links.items()):
            if instance not in listed and not link.endpoint.fresh(now):
                await self._drop(instance)

    async def close(self) -> None:
        """End every Watch and channel."""
        for instance in list(self._links):
            await self._drop(instance)

    def _add(self, record: WorkerRecord) -> None:
        channel = self._dial(record.address)
        stub: worker_service_pb2_grpc.WorkerServiceAsyncStub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        endpoint = Endpoint(record)
        submits = SubmitLink(
            channel,
            self._clock,
            on_view=functools.partial(self._seen, endpoint),
            view_patience_s=lambda: len(self._links) / VIEWS_PER_S,
        )
        cache = CacheWatch(record.instance, stub, self.prefixes, self._clock, router_instance=self._router_instance)
        tasks = (
            asyncio.create_task(self._watch(endpoint, stub), name=f"watch-{record.instance}"),
            asyncio.create_task(cache.run(), name=f"cache-{record.instance}"),
            asyncio.create_task(submits.run(), name=f"submits-{record.instance}"),
        )
        self._links[record.instance] = _Link(endpoint, channel, submits, tasks)
        self._rosters.setdefault(record.pool, Roster()).add(endpoint)
        structlog.get_logger().info("worker_found", worker=record.instance, address=record.address)

    async def _drop(self, instance: str) -> None:
        link = self._links.pop(instance)
        roster = self._rosters[link.endpoint.pool]
        roster.remove(link.endpoint)
        if not roster.endpoints:
            del self._rosters[link.endpoint.pool]
        await end_tasks(link.tasks)
        await link.channel.close()
        self.prefixes.forget(instance)
        structlog.get_logger().info("worker_gone", worker=instance)
        self._on_change()

    def _seen(self, endpoint: Endpoint, message: worker_service_pb2.WatchResponse) -> None:
        endpoint.observe(View.of(message), self._clock.monotonic())
        self._on_change()

    async def _watch(self, endpoint: Endpoint, stub: worker_service_pb2_grpc.WorkerServiceAsyncStub) -> None:
        """Read views for ever; a broken stream is opened again. Ends when the address is another worker's by now."""
        backoff = _FIRST_BACKOFF_S
        request = worker_service_pb2.WatchRequest(router_instance=self._router_instance)
        while True:
            try:
                async for message in stub.Watch(request):
                    if message.worker_instance != endpoint.instance:
                        return
                    self._seen(endpoint, message)
                    backoff = _FIRST_BACKOFF_S
            except grpc.aio.AioRpcError as error:
                structlog.get_logger().info("watch_broken", worker=endpoint.instance, code=error.code().name)
            # What a broken stream last said is not the present: a dead worker's room must not be filled.
            endpoint.unseen()
            await self._clock.sleep(backoff)
            backoff = min(_LONGEST_BACKOFF_S, backoff * 2)
