"""A worker that only has slots: real gRPC, no engine. Tests decide when its requests end and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

from services.common.admission_store import AdmissionStore
from services.common.admission_types import SUSPECT_DEATHS, WorkerRecord
from services.common.grpc_server import GrpcServer, start_server
from tests.helpers.admission import POOL


class FakeWorker(worker_service_pb2_grpc.WorkerServiceServicer):
    """Takes `slots` requests; `submits` are all requests it was sent, `running` those it holds."""

    def __init__(
        self,
        instance: str,
        *,
        slots: int = 2,
        version: str = "1",
        gateways: tuple[str, ...] = ("gateway-1",),
        role: str = "aggregated",
    ) -> None:
        self.instance = instance
        self.role = role
        self.slots = slots
        self.version = version
        self.gateways = list(gateways)
        self.ready = True
        self.draining = False
        self.silent = False
        self.hang = False
        self.abort_with: grpc.StatusCode | None = None
        self.refuse_with: worker_service_pb2.SubmitRefusal.ValueType | None = None
        self.submits: list[worker_service_pb2.SubmitRequest] = []
        self.running: dict[str, int] = {}
        self.suspects: set[str] = set()
        self.most_running = 0
        self.overbooked = 0
        self._sequence = 0
        self._changed = asyncio.Event()
        self._server: GrpcServer | None = None

    async def start(self, listen: str = "127.0.0.1:0") -> FakeWorker:
        def add(server: Any) -> None:
            worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

        self._server = await start_server(listen, add, service_names=["millrace.worker.v1.WorkerService"])
        return self

    @property
    def sequence(self) -> int:
        """Number of the last view that was made."""
        return self._sequence

    @property
    def record(self) -> WorkerRecord:
        assert self._server is not None
        return WorkerRecord(self.instance, self._server.address, "echo", self.version, POOL, self.role)

    async def register(self, store: AdmissionStore) -> None:
        await store.register_worker(self.record)

    async def kill(self) -> None:
        """The process is gone: connections break at once."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def finish(self, request_id: str) -> None:
        self.running.pop(request_id, None)
        self.change()

    def change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def view(self) -> worker_service_pb2.WatchResponse:
        self._sequence += 1
        return self.numbered_view(self._sequence)

    def numbered_view(self, sequence: int) -> worker_service_pb2.WatchResponse:
        return worker_service_pb2.WatchResponse(
            worker_instance=self.instance,
            sequence=sequence,
            model=common_pb2.ModelRef(model="echo", version=self.version),
            pool=common_pb2.PoolRef(model="echo", pool="default"),
            role=common_pb2.WorkerRole.Value(f"WORKER_ROLE_{self.role.upper()}"),
            free_slot_count=self.slots - sum(self.running.values()),
            free_block_count=1_000,
            block_size=16,
            running_count=len(self.running),
            in_flight_count=len(self.running),
            attached_gateways=self.gateways,
            draining=self.draining,
            ready=self.ready,
            suspect_count=len(self.suspects & self.running.keys()),
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_service_pb2.WatchResponse]:
        while True:
            changed = self._changed
            if not self.silent:
                yield self.view()
            try:
                async with asyncio.timeout(1.0):
                    await changed.wait()
            except TimeoutError:
                continue

    async def WatchCache(self, request: Any, context: Any) -> AsyncIterator[worker_service_pb2.WatchCacheResponse]:
        yield worker_service_pb2.WatchCacheResponse(worker_instance=self.instance, sequence=1, snapshot=True)
        await asyncio.Event().wait()

    async def SubmitStream(
        self, request_iterator: AsyncIterator[worker_service_pb2.SubmitStreamRequest], context: Any
    ) -> AsyncIterator[worker_service_pb2.SubmitStreamResponse]:
        async for message in request_iterator:
            responses = [await self.Submit(request, context) for request in message.requests]
            yield worker_service_pb2.SubmitStreamResponse(responses=responses)

    async def Submit(
        self, request: worker_service_pb2.SubmitRequest, context: Any
    ) -> worker_service_pb2.SubmitResponse:
        self.submits.append(request)
        if len(request.entry.lost_workers) >= SUSPECT_DEATHS:
            self.suspects.add(request.entry.request_id)
        if self.hang:
            await asyncio.Event().wait()
        if self.abort_with is not None:
            await context.abort(self.abort_with, "broken by the test")
        response = worker_service_pb2.SubmitResponse(
            request_id=request.entry.request_id, epoch=request.epoch, worker_instance=self.instance
        )
        slots = max(1, request.entry.sampling.choice_count)
        if self.refuse_with is not None:
            response.refusal = self.refuse_with
        elif sum(self.running.values()) + slots > self.slots:
            self.overbooked += 1
            response.refusal = worker_service_pb2.SUBMIT_REFUSAL_NO_ROOM
        else:
            response.accepted = True
            self.running[request.entry.request_id] = slots
            self.most_running = max(self.most_running, sum(self.running.values()))
            self.change()
        return response
