"""Follows what one worker has cached into the prefix index, by one stream that is opened again when it breaks.

A gap in its sequence means that something was lost: the stream is opened again too, and begins with a snapshot.
Run by the registry, one for each worker.
"""

from __future__ import annotations

import grpc
import structlog
from millrace.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

from services.common.block_hash import unpack_truncated
from services.common.clock import Clock
from services.router.prefix_index import PrefixIndex

REOPEN_S = 1.0


class CacheWatch:
    """One worker's cache as the router follows it."""

    def __init__(
        self,
        instance: str,
        stub: worker_service_pb2_grpc.WorkerServiceAsyncStub,
        prefixes: PrefixIndex,
        clock: Clock,
        *,
        router_instance: str,
    ) -> None:
        self._instance = instance
        self._stub = stub
        self._prefixes = prefixes
        self._clock = clock
        self._request = worker_service_pb2.WatchCacheRequest(router_instance=router_instance)

    async def run(self) -> None:
        """Follow until cancelled; ends for a worker that does not say what it caches."""
        while True:
            try:
                await self._read()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
                structlog.get_logger().info("cache_watch_broken", worker=self._instance, code=error.code().name)
            self._prefixes.unreported(self._instance)
            await self._clock.sleep(REOPEN_S)

    async def _read(self) -> None:
        """Read one stream until it ends, is another worker's, or has a gap."""
        call = self._stub.WatchCache(self._request)
        expected = 1
        async for message in call:
            if message.worker_instance != self._instance or message.sequence != expected:
                structlog.get_logger().warning("cache_watch_gap", worker=self._instance, sequence=message.sequence)
                call.cancel()
                return
            expected += 1
            if message.snapshot:
                self._prefixes.replace(self._instance, unpack_truncated(message.stored))
            else:
                self._prefixes.change(
                    self._instance,
                    stored=unpack_truncated(message.stored),
                    removed=unpack_truncated(message.removed),
                )
