"""Clients of the wild against one running stack: each reads whole answers, streams and errors as its makers mean to."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc

from millrace_client import (
    AsyncClient,
    Client,
    Message,
    MillraceError,
    Options,
    Tool,
    UsageGroup,
    UsageQuery,
)
from services.worker.engine.fake_model_runner import echo_token
from tests.helpers.stack import Stack, millrace

pytestmark = pytest.mark.timeout(180)

VOCAB = 32_000
COUNT = 8
ASKED: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": COUNT}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
NODE = Path(__file__).parent / "node"


def echoed(answer_id: str, choice: int = 0) -> str:
    """What the echo model says to a request; answers name it `chatcmpl-<id>`."""
    request_id = answer_id.rpartition("-")[2]
    return "".join(f"t{echo_token(request_id, choice, i, vocab_size=VOCAB)} " for i in range(COUNT))


def sdk(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key, max_retries=0)


def test_openai_python(echo: Stack) -> None:
    with sdk(echo) as client:
        whole = client.chat.completions.create(**ASKED, n=2)
        text = client.completions.create(model="echo", prompt="hi", max_tokens=COUNT)
        chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
        models = [model.id for model in client.models.list()]

    assert [c.message.content for c in whole.choices] == [echoed(whole.id, c) for c in range(2)]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2 * COUNT
    assert text.choices[0].text == echoed(text.id)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == echoed(chunks[0].id)
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert "echo" in models


def test_openai_python_stream_helper(echo: Stack) -> None:
    with sdk(echo) as client:
        with client.chat.completions.stream(**ASKED, extra_body={"stop": [" t"]}) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        # The helper takes an answer that was cut for no answer.
        with client.chat.completions.stream(**ASKED) as cut, pytest.raises(openai.LengthFinishReasonError) as raised:
            cut.get_final_completion()

    assert "".join(deltas) == final.choices[0].message.content == echoed(final.id).partition(" t")[0]
    assert final.choices[0].finish_reason == "stop"
    assert raised.value.completion.choices[0].message.content == echoed(raised.value.completion.id)


def test_openai_python_async(echo: Stack) -> None:
    async def ask() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{echo.url}/v1", api_key=echo.key, max_retries=0) as client:

            async def one() -> tuple[str, str]:
                text, answer_id = "", ""
                async for chunk in await client.chat.completions.create(**ASKED, stream=True):
                    answer_id = chunk.id
                    text += chunk.choices[0].delta.content or ""
                return answer_id, text

            return await asyncio.gather(*(one() for _ in range(8)))

    answers = asyncio.run(ask())

    assert [text for _, text in answers] == [echoed(answer_id) for answer_id, _ in answers]
    assert len({answer_id for answer_id, _ in answers}) == 8


def test_openai_python_raises_its_own_errors(echo: Stack) -> None:
    with sdk(echo) as client:
        with pytest.raises(openai.BadRequestError) as invalid:
            client.chat.completions.create(**ASKED, n=0)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**ASKED, "model": "nobody"})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").chat.completions.create(**ASKED)

    assert (invalid.value.param, invalid.value.code) == ("n", "INVALID_REQUEST")


def test_openai_python_with_tools_and_their_results(echo: Stack) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: Any = [
        *ASKED["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    with sdk(echo) as client:
        answer = client.chat.completions.create(model="echo", messages=messages, tools=[TOOL], max_tokens=COUNT)  # type: ignore[list-item]
        # What an SDK gave back can be sent again.
        again = [*messages, answer.choices[0].message.model_dump(exclude_none=True), *ASKED["messages"]]
        second = client.chat.completions.create(model="echo", messages=again, max_tokens=COUNT)
        with pytest.raises(openai.BadRequestError) as unanswered:
            client.chat.completions.create(model="echo", messages=messages[:2], max_tokens=COUNT)

    assert answer.choices[0].message.content == echoed(answer.id)
    assert answer.choices[0].message.tool_calls is None
    assert second.choices[0].message.content == echoed(second.id)
    assert unanswered.value.param == "messages[1].tool_calls"


def test_httpx_reads_the_events_as_the_standard_has_them(echo: Stack) -> None:
    body = {**ASKED, "stream": True}
    with (
        httpx.Client(base_url=echo.url, headers=echo.headers, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]

    assert all(line.startswith("data: ") for line in lines if not line.startswith("id: "))
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(item) for item in data[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == echoed(chunks[0]["id"])


def test_curl(echo: Stack) -> None:
    command = [
        "curl", "--silent", "--show-error", "--no-buffer", "--fail-with-body", f"{echo.url}/v1/chat/completions",
        "-H", f"Authorization: Bearer {echo.key}", "-H", "Content-Type: application/json",
        "-d", json.dumps({**ASKED, "stream": True}),
    ]  # fmt: skip

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    ids = set(re.findall(r'"id":"(chatcmpl-\w+)"', done.stdout))
    assert len(ids) == 1
    assert "".join(re.findall(r'"content":"([^"]*)"', done.stdout)) == echoed(ids.pop())
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_a_generated_grpc_client_and_reflection(echo: Stack) -> None:
    metadata = (("authorization", f"Bearer {echo.key}"),)
    with grpc.insecure_channel(echo.grpc_address) as channel:
        request = pb.GenerateRequest(model="echo", prompt="hi", max_token_count=COUNT)
        responses = list(pb_grpc.GatewayServiceStub(channel).Generate(request, metadata=metadata, timeout=60))
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        listed = next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=60))

    assert responses[0].HasField("accepted")
    assert "".join(r.delta.text for r in responses) == echoed(responses[0].request_id)
    assert responses[-1].completed.usage.completion_token_count == COUNT
    assert responses[-2].delta.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert "millrace.gateway.v1.GatewayService" in {s.name for s in listed.list_services_response.service}


def test_the_python_client(echo: Stack) -> None:
    options = Options(max_tokens=COUNT, tools=[Tool("add")])
    messages = [Message("user", "hi")]
    with Client(echo.grpc_address, echo.key, timeout_s=60) as client:
        answer = client.generate("echo", messages, options)
        with client.stream("echo", "hi", options) as stream:
            text = "".join(delta.text for delta in stream)
        models = client.list_models()
        with client.stream("echo", "hi", Options(max_tokens=4_000)) as long:
            next(iter(long))
            assert client.cancel(long.request_id)
            with pytest.raises(MillraceError) as cancelled:
                long.answer()
        with pytest.raises(MillraceError) as refused:
            client.generate("nobody", "hi")

    async def ask() -> Any:
        async with AsyncClient(echo.grpc_address, echo.key, timeout_s=60) as client:
            return await client.generate("echo", messages, options)

    other = asyncio.run(ask())
    assert answer.text == echoed(answer.request_id)
    assert text == echoed(stream.request_id)
    assert other.text == echoed(other.request_id)
    assert answer.usage.completion_tokens == COUNT
    assert models[0].name == "echo"
    assert cancelled.value.reason == "CANCELLED"
    assert refused.value.reason == "MODEL_NOT_FOUND"


def test_the_python_client_asks_once_under_a_key_and_reads_the_bill(echo: Stack) -> None:
    options = Options(max_tokens=COUNT, metadata={"order": "7"})
    with Client(echo.grpc_address, echo.key, timeout_s=60) as client:
        first = client.generate("echo", "hi", options, idempotency_key="order 7")
        again = client.generate("echo", [Message("user", "hi")], options, idempotency_key="order 8")
        joined = client.generate("echo", "hi", options, idempotency_key="order 7")
        with pytest.raises(MillraceError) as other:
            client.generate("echo", "ho", options, idempotency_key="order 7")
    created = millrace(echo.home, "key", "create", "--tenant", "demo", "--scope", "usage:read")
    assert created.returncode == 0, created.stderr

    async def ask() -> UsageGroup:
        async with (
            AsyncClient(echo.grpc_address, created.stdout.strip(), timeout_s=60) as client,
            asyncio.timeout(60),
        ):
            while True:
                groups = await client.get_usage(UsageQuery(metadata={"order": "7"}, group_by=["model"]))
                if groups and groups[0].requests >= 2:
                    return groups[0]
                await asyncio.sleep(0.05)

    group = asyncio.run(ask())
    assert joined == first
    assert again.request_id != first.request_id
    assert other.value.reason == "IDEMPOTENCY_CONFLICT"
    assert (group.keys, group.requests, group.billed.completion_tokens) == (("echo",), 2, 2 * COUNT)


def test_langchain(echo: Stack) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="echo",
        base_url=f"{echo.url}/v1",
        api_key=echo.key,  # type: ignore[arg-type]
        max_completion_tokens=COUNT,
        max_retries=0,
        stream_usage=True,
    )
    answer = model.invoke("hi")
    chunks = list(model.stream("hi"))
    with_tools = model.bind_tools([TOOL]).invoke("hi")

    for message in (answer, with_tools):
        assert message.content == echoed(message.response_metadata["id"])
        assert message.tool_calls == []
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == COUNT
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    # Its chunks carry an id of its own.
    assert re.fullmatch(r"(t\d+ ){8}", str(streamed.content))
    assert streamed.usage_metadata is not None
    assert streamed.usage_metadata["output_tokens"] == COUNT


def test_openai_for_node(echo: Stack) -> None:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules" / "openai").exists():
        pytest.skip("needs node and its openai package: npm ci --prefix tests/contract/node")
    environment = {"PATH": os.environ["PATH"], "ZOO_URL": f"{echo.url}/v1", "ZOO_KEY": echo.key}

    done = subprocess.run(
        [node, "zoo.mjs"], cwd=NODE, env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    for kind in ("whole", "stream", "final"):
        assert seen[kind]["text"] == echoed(seen[kind]["id"])
    assert seen["whole"]["usage"]["completion_tokens"] == seen["stream"]["usage"]["completion_tokens"] == COUNT
    assert seen["final"]["reason"] == "length"
    assert seen["refused"] == {"name": "BadRequestError", "status": 400, "param": "n", "code": "INVALID_REQUEST"}
    assert "echo" in seen["models"]
