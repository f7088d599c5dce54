"""Sums of a tenant's own usage, asked of the usage service with the client's own key. Called by the gRPC door."""

from __future__ import annotations

import grpc
from millrace.gateway.v1 import usage_sums_pb2 as pb
from millrace.usage.v1 import usage_service_pb2 as usage_pb
from millrace.usage.v1 import usage_service_pb2_grpc as usage_pb_grpc

from services.common.errors import NotReady, Unsupported
from services.common.grpc_client import Dial, error_from_rpc

TIMEOUT_S = 15.0
RETRY_AFTER_S = 1.0
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class UsageReader:
    """A channel to the usage service at `address`, opened when first needed; an empty address refuses every call."""

    def __init__(self, address: str, dial: Dial) -> None:
        self._address = address
        self._dial = dial
        self._channel: grpc.aio.Channel | None = None

    async def read(self, tenant: str, request: pb.GetUsageRequest, authorization: str) -> pb.GetUsageResponse:
        """Usage of `tenant`. Raises NotReady while the usage service is away, Unsupported where none is named, and what
        the usage service raises."""
        if not self._address:
            raise Unsupported("This gateway does not serve usage.")
        if self._channel is None:
            self._channel = self._dial(self._address)
        # The same fields under the same numbers; whatever else the bytes hold, the tenant is the key's.
        query = usage_pb.QueryUsageRequest.FromString(request.SerializeToString())
        query.tenant = tenant
        stub = usage_pb_grpc.UsageServiceStub(self._channel)
        try:
            answer = await stub.QueryUsage(query, metadata=(("authorization", authorization),), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in _AWAY:
                raise NotReady("Usage cannot be read at the moment.", retry_after_s=RETRY_AFTER_S) from error
            raise error_from_rpc(error) from error
        return pb.GetUsageResponse.FromString(answer.SerializeToString())

    async def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            await self._channel.close()
