"""Usage over the gateway's gRPC door: the answers and the errors of `/v1/usage`, for the key's own tenant only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc
from millrace.gateway.v1 import usage_sums_pb2 as pb
from millrace.usage.v1 import usage_service_pb2 as usage_pb

from services.common.admission_store import AdmissionStore
from services.common.clock import SystemClock
from services.common.errors import (
    InvalidRequest,
    MillraceError,
    NotReady,
    PermissionDenied,
    Unauthenticated,
    Unsupported,
)
from services.common.grpc_client import error_from_rpc, open_channel
from services.common.grpc_server import start_server
from services.common.redis_client import connect
from services.gateway.auth import CachedKeyRing
from services.gateway.grpc_service import SERVICE_NAME, GatewayService
from services.gateway.usage_reader import UsageReader
from services.usage.accounts import KeySpec, TenantSpec
from services.usage.config import UsageConfig
from services.usage.store import open_store
from services.usage.wiring import UsageApp, build
from tests.helpers.echo_generation import FakeGenerator, front_parts
from tests.helpers.redis import RedisProcess
from tests.helpers.usage import insert, make_entry

ROOT = "root-token-for-tests"


@dataclasses.dataclass(frozen=True)
class Platform:
    """A usage service with rows of acme and of zeta, and keys of acme."""

    app: UsageApp
    redis_url: str
    reading: str
    generating: str

    @contextlib.asynccontextmanager
    async def door(self, address: str) -> AsyncIterator[Any]:
        """The gRPC door of a gateway that was told where the usage service is."""
        redis = connect(self.redis_url)
        keyring, reader = CachedKeyRing(AdmissionStore(redis), SystemClock()), UsageReader(address, open_channel)
        parts = dataclasses.replace(front_parts(FakeGenerator()), keyring=keyring, usage=reader)
        server = await start_server("127.0.0.1:0", GatewayService(parts).add_to, service_names=[SERVICE_NAME])
        try:
            async with grpc.aio.insecure_channel(server.address) as channel:
                yield pb_grpc.GatewayServiceStub(channel)
        finally:
            await server.stop(0)
            await reader.close()
            await redis.aclose()


@pytest.fixture
async def platform(redis_server: RedisProcess, tmp_path: Path) -> AsyncIterator[Platform]:
    url = f"sqlite:///{tmp_path}/usage.sqlite3"
    store = open_store(url)
    insert(store, [make_entry(f"r{number}", ("acme", "zeta")[number % 2]) for number in range(7)])
    store.close()
    app = build(
        UsageConfig(redis_url=redis_server.url, database_url=url, data_dir=str(tmp_path / "data"), admin_token=ROOT)
    )
    await app.start()
    await app.accounts.create_tenant(TenantSpec("acme"))
    _, reading = await app.accounts.create_key(KeySpec("acme", scopes=("usage:read",)))
    _, generating = await app.accounts.create_key(KeySpec("acme"))
    yield Platform(app, redis_server.url, reading, generating)
    await app.stop()


def sent(secret: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {secret}"),)}


async def failure(call: Any) -> MillraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_a_key_reads_over_grpc_what_it_reads_over_http(platform: Platform) -> None:
    # Whichever tenant the bytes name: the field is zeta's in the usage service's own message.
    foreign = usage_pb.QueryUsageRequest(tenant="zeta", group_by=["tenant", "day"]).SerializeToString()
    async with platform.door(platform.app.address) as stub:
        everything = await stub.GetUsage(pb.GetUsageRequest(), **sent(platform.reading))
        asked = await stub.GetUsage(pb.GetUsageRequest.FromString(foreign), **sent(platform.reading))
        none = await stub.GetUsage(pb.GetUsageRequest(model="other", group_by=["model"]), **sent(platform.reading))
    url, headers = (
        f"http://127.0.0.1:{platform.app.admin_port}/v1/usage",
        {"authorization": f"Bearer {platform.reading}"},
    )
    async with httpx.AsyncClient(headers=headers) as http:
        over_http = (await http.get(url)).json()

    assert json_format.MessageToDict(everything, preserving_proto_field_name=True) == over_http
    assert [group.request_count for group in everything.groups] == [4]
    assert everything.groups[0].billed.prompt_token_count == 40
    assert [(list(group.keys), group.request_count) for group in asked.groups] == [(["acme", "2026-03-01"], 4)]
    assert list(none.groups) == []


async def test_whoever_may_not_read_usage_is_refused_by_the_gateway_itself(platform: Platform) -> None:
    async with platform.door("127.0.0.1:1") as stub:
        unknown = [
            await failure(stub.GetUsage(pb.GetUsageRequest())),
            await failure(stub.GetUsage(pb.GetUsageRequest(), **sent("wrong"))),
            # An administrator has no tenant of its own.
            await failure(stub.GetUsage(pb.GetUsageRequest(), **sent(ROOT))),
        ]
        other_scope = await failure(stub.GetUsage(pb.GetUsageRequest(), **sent(platform.generating)))

    assert {type(error) for error in unknown} == {Unauthenticated}
    assert isinstance(other_scope, PermissionDenied)


async def test_the_usage_services_refusal_reaches_the_client_with_its_field(platform: Platform) -> None:
    async with platform.door(platform.app.address) as stub:
        error = await failure(stub.GetUsage(pb.GetUsageRequest(group_by=["colour"]), **sent(platform.reading)))

    assert (type(error), error.param) == (InvalidRequest, "group_by")


async def test_without_a_usage_service_the_error_is_typed_and_tells_no_address(platform: Platform) -> None:
    async with platform.door("127.0.0.1:1") as stub:
        away = await failure(stub.GetUsage(pb.GetUsageRequest(), **sent(platform.reading)))
    async with platform.door("") as stub:
        none = await failure(stub.GetUsage(pb.GetUsageRequest(), **sent(platform.reading)))

    assert (type(away), away.message) == (NotReady, "Usage cannot be read at the moment.")
    assert isinstance(none, Unsupported)


def test_the_gateways_messages_are_the_usage_services() -> None:
    def fields(message: Descriptor) -> dict[int, Any]:
        return {
            field.number: (field.name, field.type, field.is_repeated, field.message_type and field.message_type.name)
            for field in message.fields
        }

    pairs = {
        "GetUsageRequest": ("QueryUsageRequest", {1}),
        "GetUsageResponse": ("QueryUsageResponse", set()),
        "UsageGroup": ("UsageGroup", set()),
        "TokenSums": ("TokenSums", set()),
        "Cost": ("Cost", set()),
        "AcceleratorUse": ("AcceleratorUse", {8}),
    }
    assert set(pairs) == set(pb.DESCRIPTOR.message_types_by_name)
    for name, (other, hidden) in pairs.items():
        theirs = fields(usage_pb.DESCRIPTOR.message_types_by_name[other])
        assert fields(pb.DESCRIPTOR.message_types_by_name[name]) == {
            number: field for number, field in theirs.items() if number not in hidden
        }
