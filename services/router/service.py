"""The router's gRPC face: what it sees, and drain. Owns nothing."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from google.protobuf import duration_pb2
from millrace.common.v1 import common_pb2
from millrace.router.v1 import router_service_pb2, router_service_pb2_grpc

from services.common.clock import Clock
from services.router.claim import ClaimLoop
from services.router.endpoint import Endpoint
from services.router.filters import ejected, is_routable
from services.router.registry import EndpointRegistry


class RouterService(router_service_pb2_grpc.RouterServiceServicer):
    """`millrace.router.v1.RouterService`. `begin_drain` stops claiming in the background."""

    def __init__(
        self,
        *,
        router_instance: str,
        registry: EndpointRegistry,
        claims: ClaimLoop,
        clock: Clock,
        begin_drain: Callable[[float], None],
    ) -> None:
        self._router_instance = router_instance
        self._registry = registry
        self._claims = claims
        self._clock = clock
        self._begin_drain = begin_drain

    async def GetStatus(
        self,
        request: router_service_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> router_service_pb2.GetStatusResponse:
        """Workers, their room, and the claims this router holds."""
        now = self._clock.monotonic()
        registry = self._registry
        out = frozenset[str]().union(*(ejected(registry.endpoints(pool), now) for pool in registry.pools()))
        return router_service_pb2.GetStatusResponse(
            router_instance=self._router_instance,
            endpoints=[_status(endpoint, now, out) for endpoint in registry.endpoints()],
            held_claim_count=self._claims.held_count,
            draining=self._claims.draining,
        )

    async def Drain(
        self, request: router_service_pb2.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> router_service_pb2.DrainResponse:
        """Stop claiming; what is held is submitted or given back."""
        self._begin_drain(request.grace.ToTimedelta().total_seconds())
        return router_service_pb2.DrainResponse(held_claim_count=self._claims.held_count)


def _status(endpoint: Endpoint, now: float, out: frozenset[str]) -> router_service_pb2.EndpointStatus:
    view, record = endpoint.view, endpoint.record
    slots, blocks = endpoint.free(now)
    status = router_service_pb2.EndpointStatus(
        worker_instance=endpoint.instance,
        address=record.address,
        model=view.model if view is not None else common_pb2.ModelRef(model=record.model, version=record.version),
        pool=common_pb2.PoolRef(model=record.pool.model, pool=record.pool.pool, shard=record.pool.shard),
        role=view.role if view is not None else common_pb2.WORKER_ROLE_UNSPECIFIED,
        healthy=is_routable(endpoint, now) and endpoint.instance not in out,
        draining=view is not None and view.draining,
        free_slot_count=slots,
        free_block_count=blocks,
        in_flight_count=view.in_flight_count if view is not None else 0,
        attached_gateway_count=len(view.attached_gateways) if view is not None else 0,
    )
    if view is not None:
        age = duration_pb2.Duration()
        age.FromMilliseconds(int((now - endpoint.seen_at) * 1000))
        status.view_age.CopyFrom(age)
    return status
