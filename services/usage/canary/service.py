"""The gRPC face of the canary controller: what it knows of a rollout. Owns nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from millrace.usage.v1 import canary_service_pb2 as pb
from millrace.usage.v1 import canary_service_pb2_grpc

from services.common.admission_types import WorkerRecord
from services.common.errors import NotFound
from services.common.route_store import RouteStore
from services.common.routes import RouteTable
from services.usage.account_service import CallContext, authorization_of
from services.usage.admin_keys import AdminKeys
from services.usage.canary.controller import ProgressStore
from services.usage.release_gate import serve_another


class CanaryService(canary_service_pb2_grpc.CanaryServiceServicer):
    """For administrators."""

    def __init__(
        self,
        progress: ProgressStore,
        admins: AdminKeys,
        routes: RouteStore,
        workers: Callable[[], Awaitable[Sequence[WorkerRecord]]],
    ) -> None:
        """`workers` lists those that live."""
        self._progress = progress
        self._admins = admins
        self._routes = routes
        self._workers = workers

    async def GetRolloutProgress(
        self, request: pb.GetRolloutProgressRequest, context: CallContext
    ) -> pb.GetRolloutProgressResponse:
        """Raises NotFound before the controller has looked at the rollout once, StoreUnavailable."""
        await self._admins.administrator(authorization_of(context))
        progress = await self._progress.read(request.alias)
        if progress is None:
            raise NotFound(f"No rollout of `{request.alias[:128]}` was judged yet.", param="alias")
        answer = pb.GetRolloutProgressResponse(progress=progress)
        route = (await self._routes.read() or RouteTable()).routes.get(request.alias)
        if route is not None and route.rollout is not None:
            answer.release_digest = route.rollout.release_digest
            for worker in serve_another(route.rollout, await self._workers()):
                answer.other_releases.add(worker_instance=worker.instance, manifest_digest=bytes.fromhex(worker.digest))
        return answer
