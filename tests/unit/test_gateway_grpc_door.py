"""The gRPC door: the key, errors with their reason, cancellation, models of the key, refused values."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc
from millrace.gateway.v1 import usage_sums_pb2

from services.common.errors import MillraceError, QueueFull, WorkerLost
from services.common.grpc_server import start_server
from services.common.lifecycle import StartupError
from services.common.metrics import Metrics
from services.gateway.app import create_app
from services.gateway.grpc_service import SERVICE_NAME, GatewayService
from tests.helpers.echo_generation import (
    REQUEST_ID,
    AsgiClient,
    FakeDirectory,
    FakeGenerator,
    FakeKeyRing,
    front_parts,
    key,
    one_by_one,
    served,
    tokens,
)
from tests.helpers.waiting import until

METADATA = (("authorization", "Bearer secret"),)


@contextlib.asynccontextmanager
async def door(generator: FakeGenerator, *allowed: str) -> AsyncIterator[Any]:
    keyring = FakeKeyRing(secret=key("acme", *allowed))
    service = GatewayService(front_parts(generator, served(), served("other"), keyring=keyring))
    server = await start_server("127.0.0.1:0", service.add_to, service_names=[SERVICE_NAME])
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield pb_grpc.GatewayServiceStub(channel)
    finally:
        await server.stop(0)


async def test_a_shared_port_takes_a_second_server_and_no_other() -> None:
    def nothing(_: grpc.aio.Server) -> None:
        return None

    first = await start_server("shared:127.0.0.1:0", nothing, service_names=[])
    second = await start_server(f"shared:{first.address}", nothing, service_names=[])

    assert second.address == first.address
    with pytest.raises(StartupError, match="cannot be bound"):
        await start_server(first.address, nothing, service_names=[])
    for server in (first, second):
        await server.stop(0)


async def failure(call: Any) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo]:
    """Code and ErrorInfo that a call ended with."""

    async def drained() -> None:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drained()
    status = rpc_status.from_call(caught.value)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return caught.value.code(), info


async def test_each_method_asks_for_a_key() -> None:
    async with door(FakeGenerator()) as stub:
        for call in (
            stub.Generate(pb.GenerateRequest(model="tiny", prompt="x")),
            stub.Embed(pb.EmbedRequest(model="tiny")),
            stub.ListModels(pb.ListModelsRequest()),
            stub.Cancel(pb.CancelRequest(request_id=REQUEST_ID)),
            stub.GetUsage(usage_sums_pb2.GetUsageRequest()),
            stub.ListModels(pb.ListModelsRequest(), metadata=(*METADATA, *METADATA)),
        ):
            code, info = await failure(call)
            assert (code, info.reason) == (grpc.StatusCode.UNAUTHENTICATED, "INVALID_API_KEY")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({}, "input"),
        ({"prompt": "x", "choice_count": 0}, "n"),
        ({"prompt": "x", "choice_count": 9}, "n"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "top_p": float("inf")}, "top_p"),
        ({"prompt": "x", "stop": list("abcde")}, "stop"),
        ({"prompt": "x", "stop_token_ids": [2**32 - 1]}, "stop_token_ids"),
        ({"prompt": "x", "logit_bias": [common_pb2.LogitBias(token_id=1, bias=float("nan"))]}, "logit_bias"),
        ({"prompt": "x", "priority_class": 77}, "priority_class"),
        ({"prompt": "x", "resume_policy": 77}, "resume_policy"),
        ({"prompt": "x", "grammar": common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, text="a")}, "grammar"),
        ({"chat": pb.ChatInput()}, "messages"),
        ({"chat": pb.ChatInput(messages=[pb.ChatMessage(role="critic", content="x")])}, "messages[0].role"),
        ({"prompt_token_ids": common_pb2.TokenIds(token_ids=[2**32 - 1])}, "prompt"),
    ],
)
async def test_a_wrong_value_is_invalid_argument_and_names_its_field(fields: dict[str, object], param: str) -> None:
    generator = FakeGenerator()
    async with door(generator) as stub:
        request = pb.GenerateRequest(model="tiny", **fields)  # type: ignore[arg-type]
        code, info = await failure(stub.Generate(request, metadata=METADATA))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert info.metadata["param"] == param
    assert generator.requests == []


@pytest.mark.parametrize("error", [QueueFull("Full.", retry_after_s=2.0), WorkerLost("Lost."), ValueError("/secret")])
@pytest.mark.parametrize("phase", ["start", "stream"])
async def test_a_failure_has_the_code_and_reason_of_its_row(error: Exception, phase: str) -> None:
    generator = FakeGenerator([tokens([65]), error])
    if phase == "start":
        generator.refusal = error
    async with door(generator) as stub:
        code, info = await failure(stub.Generate(pb.GenerateRequest(model="tiny", prompt="x"), metadata=METADATA))

    row = error.row if isinstance(error, MillraceError) else None
    assert code is (row.grpc_code if row else grpc.StatusCode.INTERNAL)
    assert info.reason == (row.reason if row else "INTERNAL")
    if phase == "stream":
        failed = common_pb2.TERMINAL_STATE_FAILED
        assert generator.only.endings == [(failed, common_pb2.FINISH_REASON_ERROR, info.reason)]


async def test_a_cancelled_call_cancels_the_work_exactly_once() -> None:
    hold = asyncio.Event()
    generator = FakeGenerator([tokens([65]), hold])
    async with door(generator) as stub:
        call = stub.Generate(pb.GenerateRequest(model="tiny", prompt="x"), metadata=METADATA)
        async for response in call:
            if response.HasField("delta"):
                break
        await generator.only.reading.wait()
        call.cancel()
        await until(lambda: generator.only.endings)

    cancelled = (common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED, "CANCELLED")
    assert generator.only.endings == [cancelled]


async def test_a_calls_deadline_is_the_requests_and_zero_is_a_value() -> None:
    generator = FakeGenerator(one_by_one([65]))
    async with door(generator) as stub:
        request = pb.GenerateRequest(model="tiny", prompt="x", temperature=0, top_p=0.1, seed=0)
        async for _ in stub.Generate(request, metadata=METADATA, timeout=700):
            pass

    valid = generator.requests[0][1]
    assert 600 < valid.timeout_s <= 700
    assert (valid.sampling.temperature, valid.sampling.seed) == (0, 0)
    assert valid.sampling.top_p == pytest.approx(0.1)


async def test_models_are_those_of_the_key() -> None:
    async with door(FakeGenerator(), "tiny") as stub:
        answer = await stub.ListModels(pb.ListModelsRequest(), metadata=METADATA)
        code, _ = await failure(stub.Generate(pb.GenerateRequest(model="other", prompt="x"), metadata=METADATA))

    assert [model.id for model in answer.models] == ["tiny", "tiny@v1"]
    assert code is grpc.StatusCode.NOT_FOUND


async def test_models_are_those_of_http_by_every_name() -> None:
    old, new = served("tiny", "v1"), served("tiny", "v2")
    parts = front_parts(FakeGenerator(), old, new, served("other"))
    assert isinstance(parts.directory, FakeDirectory)
    parts.directory.routed = {"stable": old, "tiny": new}
    server = await start_server("127.0.0.1:0", GatewayService(parts).add_to, service_names=[SERVICE_NAME])
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = pb_grpc.GatewayServiceStub(channel)
            listed = (await stub.ListModels(pb.ListModelsRequest(), metadata=METADATA)).models
    finally:
        await server.stop(0)
    over_http = await AsgiClient(create_app(parts, metrics=Metrics(), ready=lambda: True)).ask("GET", "/v1/models")

    assert [(m.id, m.model.version) for m in listed][-2:] == [("stable", "v1"), ("tiny", "v2")]
    assert [
        (m.id, m.model.version, m.owner, m.max_model_len, m.deterministic, list(m.capabilities)) for m in listed
    ] == [
        (m["id"], own["version"], m["owned_by"], m["max_model_len"], own["deterministic"], own["capabilities"])
        for m in over_http.json()["data"]
        for own in (m["millrace"],)
    ]


async def test_cancel_tells_whose_request_it_is_only_to_its_tenant() -> None:
    generator = FakeGenerator()
    async with door(generator) as stub:
        answer = await stub.Cancel(pb.CancelRequest(request_id=REQUEST_ID), metadata=METADATA)
        code, info = await failure(stub.Cancel(pb.CancelRequest(request_id="foreign"), metadata=METADATA))

    assert answer.cancelled
    assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")
    assert generator.cancelled[0] == ("acme", REQUEST_ID)


async def test_embed_gives_a_vector_an_input_and_one_usage() -> None:
    generator = FakeGenerator([tokens([], finish=common_pb2.FINISH_REASON_STOP)])
    generator.embedding_of = lambda request: struct.pack("<2f", 0.5, len(request.prompt_token_ids))
    inputs = [pb.EmbedInput(text="abc"), pb.EmbedInput(token_ids=common_pb2.TokenIds(token_ids=[65]))]
    async with door(generator) as stub:
        answer = await stub.Embed(pb.EmbedRequest(model="tiny", inputs=inputs), metadata=METADATA)

    assert [list(each.values) for each in answer.embeddings] == [[0.5, 3.0], [0.5, 1.0]]
    assert answer.usage == common_pb2.TokenUsage(prompt_token_count=4)
    assert answer.model.version == "v1"
    assert [g.endings[0][0] for g in generator.generations] == [common_pb2.TERMINAL_STATE_COMPLETED] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"inputs": [pb.EmbedInput()]}, "inputs[0]"),
        ({"inputs": [pb.EmbedInput(text="a"), pb.EmbedInput(text="")]}, "inputs[1]"),
        ({"inputs": [pb.EmbedInput(text="a")], "priority_class": 9}, "priority_class"),
    ],
)
async def test_embed_refuses_by_name(fields: dict[str, Any], param: str) -> None:
    async with door(FakeGenerator()) as stub:
        code, info = await failure(stub.Embed(pb.EmbedRequest(model="tiny", **fields), metadata=METADATA))

    assert (code, info.metadata["param"]) == (grpc.StatusCode.INVALID_ARGUMENT, param)
