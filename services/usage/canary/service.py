"""The gRPC face of the canary controller: what it knows of a rollout. Owns nothing."""

from __future__ import annotations

from millrace.usage.v1 import canary_service_pb2 as pb
from millrace.usage.v1 import canary_service_pb2_grpc

from services.common.errors import NotFound
from services.usage.account_service import CallContext, authorization_of
from services.usage.admin_keys import AdminKeys
from services.usage.canary.controller import ProgressStore


class CanaryService(canary_service_pb2_grpc.CanaryServiceServicer):
    """For administrators."""

    def __init__(self, progress: ProgressStore, admins: AdminKeys) -> None:
        self._progress = progress
        self._admins = admins

    async def GetRolloutProgress(
        self, request: pb.GetRolloutProgressRequest, context: CallContext
    ) -> pb.GetRolloutProgressResponse:
        """Raises NotFound before the controller has looked at the rollout once, StoreUnavailable."""
        await self._admins.administrator(authorization_of(context))
        progress = await self._progress.read(request.alias)
        if progress is None:
            raise NotFound(f"No rollout of `{request.alias[:128]}` was judged yet.", param="alias")
        return pb.GetRolloutProgressResponse(progress=progress)
