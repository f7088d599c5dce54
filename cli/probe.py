"""Whether a new process of the local stack does all that the old one does. Asks them, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.common.v1 import common_pb2
from millrace.router.v1 import router_service_pb2, router_service_pb2_grpc

from cli.supervisor import Child
from services.common.grpc_client import open_channel
from services.common.tls import ROUTER, Tls

_CALL_S = 2.0


class Probe:
    """Asks by the operator's certificate `tls`. `router` is where the router in place answers."""

    def __init__(self, router: str, tls: Tls | None, gateway_count: int) -> None:
        self._router = router
        self._tls = tls
        self._gateway_count = gateway_count

    async def does_as(self, new: Child, old: Child) -> bool:
        """It serves; a worker is reached by the router and by gateways, a router reaches what the old one does."""
        try:
            if not await self._serves(new):
                return False
            if new.spec.service == "router":
                known, seen = await self._workers(old.address), await self._workers(new.address)
                return {e.address for e in known if e.healthy} <= {e.address for e in seen if e.healthy}
            if new.spec.service == "worker":
                seen = await self._workers(self._router)
                return any(e.healthy and e.address == new.address and self._is_reached(e) for e in seen)
        except grpc.aio.AioRpcError:
            return False
        return True

    def _is_reached(self, worker: router_service_pb2.EndpointStatus) -> bool:
        """Every gateway has a stream to the worker; none has one to those that prefill."""
        prefills = worker.role == common_pb2.WORKER_ROLE_PREFILL
        return prefills or worker.attached_gateway_count >= self._gateway_count

    async def _serves(self, child: Child) -> bool:
        # Gateways reach each other without certificates.
        tls = None if child.spec.service == "gateway" else self._tls
        async with open_channel(child.address, tls=tls, server_role=child.spec.service) as channel:
            request = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_CALL_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def _workers(self, router: str) -> Sequence[router_service_pb2.EndpointStatus]:
        async with open_channel(router, tls=self._tls, server_role=ROUTER) as channel:
            stub = router_service_pb2_grpc.RouterServiceStub(channel)
            return (await stub.GetStatus(router_service_pb2.GetStatusRequest(), timeout=_CALL_S)).endpoints
