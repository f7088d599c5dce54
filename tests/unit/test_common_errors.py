"""The error table: unique reasons, sane codes, and the way over gRPC and back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pbg

from services.common.errors import Internal, MillraceError, Retry, error_classes, error_of
from services.common.grpc_client import error_from_rpc, open_channel
from services.common.grpc_server import GrpcServer, start_server
from services.common.lifecycle import StartupError

CLASSES = list(error_classes().values())


class Failing(pbg.UsageServiceServicer):
    def __init__(self) -> None:
        self.error: Exception = RuntimeError("unset")

    async def GetUsage(self, request: pb.GetUsageRequest, context: object) -> pb.GetUsageResponse:
        raise self.error

    async def ExportUsage(
        self, request: pb.ExportUsageRequest, context: object
    ) -> AsyncIterator[pb.ExportUsageResponse]:
        yield pb.ExportUsageResponse()
        raise self.error


async def serve(servicer: Failing) -> GrpcServer:
    return await start_server(
        "127.0.0.1:0",
        lambda server: pbg.add_UsageServiceServicer_to_server(servicer, server),
        service_names=["millrace.usage.v1.UsageService"],
    )


def test_every_reason_is_one_class() -> None:
    assert len({cls.row.reason for cls in CLASSES}) == len(CLASSES) == len(MillraceError.__subclasses__())


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.row.reason)
def test_only_unavailable_retries_by_itself_and_aborted_one_level_up(cls: type[MillraceError]) -> None:
    row = cls.row

    assert (row.retry is Retry.AUTOMATIC) <= (row.grpc_code is grpc.StatusCode.UNAVAILABLE)
    assert (row.retry is Retry.ONE_UP) == (row.grpc_code is grpc.StatusCode.ABORTED)
    assert 400 <= row.http_status < 600


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.row.reason)
async def test_an_error_crosses_grpc_with_its_class_field_and_wait(cls: type[MillraceError]) -> None:
    servicer = Failing()
    servicer.error = cls("One sentence.", param="max_tokens", retry_after_s=2.5)
    server = await serve(servicer)
    async with open_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pbg.UsageServiceStub(channel).GetUsage(pb.GetUsageRequest())
    await server.stop(0)

    error = error_from_rpc(caught.value)
    retry = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(caught.value)
    assert (type(error), error.message, error.param) == (cls, "One sentence.", "max_tokens")
    assert caught.value.code() == cls.row.grpc_code
    assert any(d.Unpack(retry) for d in status.details)
    assert retry.retry_delay.ToMilliseconds() == 2_500


async def test_our_own_faults_are_dull_also_in_the_middle_of_a_stream(capsys: pytest.CaptureFixture[str]) -> None:
    servicer = Failing()
    servicer.error = KeyError("/secret/path")
    server = await serve(servicer)
    async with open_channel(server.address) as channel:
        rows = pbg.UsageServiceStub(channel).ExportUsage(pb.ExportUsageRequest())
        first = await rows.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rows.read()
    await server.stop(0)

    assert first == pb.ExportUsageResponse()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "Internal error."


async def test_an_unreachable_service_is_not_ready() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pbg.UsageServiceStub(channel).GetUsage(pb.GetUsageRequest())

    assert error_from_rpc(caught.value).row.reason == "NOT_READY"


async def test_a_taken_port_is_a_plain_startup_error() -> None:
    server = await serve(Failing())

    with pytest.raises(StartupError, match="cannot be bound"):
        await start_server(server.address, lambda _: None, service_names=[])
    await server.stop(0)


def test_an_unknown_reason_is_internal() -> None:
    assert type(error_of("NEVER_HEARD_OF", "x")) is Internal
