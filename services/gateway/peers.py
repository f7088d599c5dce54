"""Answers that another gateway holds, read from it over gRPC with the client's own key."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc

from services.common.errors import GatewayLost, MillraceError, NotReady
from services.common.grpc_client import error_from_rpc, open_channel
from services.gateway.answer_log import Head

RETRY_AFTER_S = 1.0
# Metadata of a reply that has an answer to give.
HOLDS = "millrace-holds"


class Peers:
    """Channels to the other gateways. `gateways` lists instance and address of those whose lease is alive."""

    def __init__(self, gateways: Callable[[], Awaitable[dict[str, str]]]) -> None:
        self._gateways = gateways
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def open(
        self, instance: str, request: pb.ContinueRequest, authorization: str
    ) -> AsyncGenerator[Head | bytes, None] | None:
        """The answer as that gateway gives it; None when the gateway is dead or does not hold the answer.

        Raises NotReady while its lease is alive and it does not answer. The generator raises GatewayLost.
        """
        address = (await self._gateways()).get(instance)
        if address is None:
            return None
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        stub = pb_grpc.GatewayServiceStub(self._channels[address])
        call = stub.Continue(request, metadata=(("authorization", authorization),))
        try:
            # The other gateway says that it holds the answer before there is anything to send.
            if HOLDS not in [name for name, _ in await call.initial_metadata() or ()]:
                await call.read()
                return None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise error_from_rpc(error) from error
            await self._forget(address)
            raise NotReady(
                "The gateway that runs this answer cannot be reached.", retry_after_s=RETRY_AFTER_S
            ) from error
        return _parts(call)

    async def close(self) -> None:
        """Close every channel."""
        for address in list(self._channels):
            await self._forget(address)

    async def _forget(self, address: str) -> None:
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()


async def _parts(call: Any) -> AsyncGenerator[Head | bytes, None]:
    try:
        async for response in call:
            if response.WhichOneof("part") == "head":
                yield Head(response.head.status, [(header.name, header.value) for header in response.head.headers])
            else:
                yield response.body
    except grpc.aio.AioRpcError as error:
        found: MillraceError = error_from_rpc(error)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            found = GatewayLost("The gateway that ran this answer was lost.")
        raise found from error
    finally:
        call.cancel()
