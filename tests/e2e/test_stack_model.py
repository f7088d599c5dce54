"""The whole stack with the real model, as a newcomer meets it."""

from __future__ import annotations

import asyncio
import json
import operator
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2, gateway_service_pb2_grpc

from tests.helpers.stack import Stack, millrace, running_stack, with_shared_kernels

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(with_shared_kernels(tmp_path_factory.mktemp("model") / "home")) as stack:
        yield stack


def test_the_printed_curl_line_answers_with_paris(stack: Stack) -> None:
    done = subprocess.run(stack.curl_line, shell=True, capture_output=True, text=True, timeout=90, check=True)

    answer = json.loads(done.stdout)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


def test_the_openai_sdk_works_sync_streaming_and_async(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key)
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=32)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )

    async def ask() -> str | None:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=stack.key) as async_client:
            answer = await async_client.chat.completions.create(
                model=MODEL, messages=QUESTION, temperature=0, max_tokens=32
            )
        return answer.choices[0].message.content

    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert streamed == whole.choices[0].message.content == asyncio.run(ask())
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    client.close()


def test_a_generated_grpc_client_gets_the_same_text_and_usage(stack: Stack) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    http = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=90).json()
    request = gateway_service_pb2.GenerateRequest(
        model=MODEL,
        chat=gateway_service_pb2.ChatInput(messages=[gateway_service_pb2.ChatMessage(**m) for m in QUESTION]),
        temperature=0,
        max_token_count=32,
    )

    with grpc.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_service_pb2_grpc.GatewayServiceStub(channel)
        events = list(stub.Generate(request, metadata=[("authorization", f"Bearer {stack.key}")], timeout=90))

    text = "".join(e.delta.text for e in events if e.WhichOneof("event") == "delta")
    usage = events[-1].completed.usage
    assert text == http["choices"][0]["message"]["content"]
    assert usage.prompt_token_count == http["usage"]["prompt_tokens"]
    assert usage.completion_token_count == http["usage"]["completion_tokens"]
    finishes = [e.delta.finish_reason for e in events if e.WhichOneof("event") == "delta" and e.delta.finish_reason]
    assert [common_pb2.FinishReason.Name(f).removeprefix("FINISH_REASON_").lower() for f in finishes] == [
        http["choices"][0]["finish_reason"]
    ]


def test_every_answer_so_far_is_one_ledger_row(stack: Stack) -> None:
    before = {row["request_id"] for row in stack.ledger()}
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 8}
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=90)

    rows = {row["request_id"]: row for row in stack.wait_ledger(len(before) + 1)}
    row = rows[response.headers["x-request-id"]]
    assert set(rows) - before == {response.headers["x-request-id"]}
    assert row["tenant"] == "demo"
    assert row["billed_prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
    assert row["billed_completion_tokens"] == response.json()["usage"]["completion_tokens"]


def test_the_openai_sdk_gets_embeddings_that_know_what_is_alike_and_pays_for_the_prompt(stack: Stack) -> None:
    before = {row["request_id"] for row in stack.ledger()}
    texts = ["The cat sleeps on the sofa.", "A cat is asleep on the couch.", "SELECT name FROM orders WHERE id = 7;"]
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key) as client:
        answer = client.embeddings.create(model=MODEL, input=texts)

    first, second, third = (each.embedding for each in answer.data)
    assert sum(x * x for x in first) == pytest.approx(1.0, abs=1e-4)
    assert sum(map(operator.mul, first, second)) > sum(map(operator.mul, first, third))
    rows = [row for row in stack.wait_ledger(len(before) + 3) if row["request_id"] not in before]
    assert sorted(row["billed_completion_tokens"] for row in rows) == [0, 0, 0]
    assert sum(row["billed_prompt_tokens"] for row in rows) == answer.usage.prompt_tokens


def test_the_command_line_chats_shows_status_and_creates_keys(stack: Stack) -> None:
    chat = millrace(stack.home, "chat", "What is the capital of France?", "--temperature", "0", timeout=90)
    status = millrace(stack.home, "status")
    tenant = millrace(stack.home, "tenant", "create", "team-a")
    key = millrace(stack.home, "key", "create", "--tenant", "team-a")

    assert "Paris" in chat.stdout, chat.stderr
    assert status.returncode == 0, status.stdout + status.stderr
    assert "healthy" in status.stdout
    assert tenant.returncode == 0, tenant.stderr
    secret = next(word for word in key.stdout.split() if word.startswith("mr_"))
    answer = httpx.get(f"{stack.url}/v1/models", headers={"Authorization": f"Bearer {secret}"})
    assert answer.status_code == httpx.codes.OK


BAD = [
    ({"model": MODEL, "messages": []}, 400, "messages"),
    ({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, 400, "temperature"),
    ({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 10**9}, 400, "max_tokens"),
    ({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 0}, 400, "n"),
    ({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "seed": 2**64}, 400, "seed"),
    ({"model": "nobody", "messages": [{"role": "user", "content": "x"}]}, 404, "model"),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD)
def test_a_bad_request_names_the_field(stack: Stack, body: dict[str, object], status: int, param: str) -> None:
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers)

    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "text", ["", "{", '{"model":"smollm2-135m","messages":[{"role":"user","content":"x"}],"temperature":NaN}']
)
def test_malformed_json_is_a_400(stack: Stack, text: str) -> None:
    response = httpx.post(f"{stack.url}/v1/chat/completions", content=text, headers=stack.headers)

    assert response.status_code == httpx.codes.BAD_REQUEST
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_key_is_a_401(stack: Stack) -> None:
    response = httpx.get(f"{stack.url}/v1/models", headers={"Authorization": "Bearer mr_nobody_x"})

    assert response.status_code == httpx.codes.UNAUTHORIZED


def test_an_empty_prompt_is_a_400_for_this_call_only(stack: Stack) -> None:
    empty = httpx.post(f"{stack.url}/v1/completions", json={"model": MODEL, "prompt": ""}, headers=stack.headers)
    good = httpx.post(
        f"{stack.url}/v1/completions",
        json={"model": MODEL, "prompt": "Hi", "max_tokens": 2},
        headers=stack.headers,
        timeout=60,
    )

    assert empty.status_code == httpx.codes.BAD_REQUEST
    assert good.status_code == httpx.codes.OK


def test_prompt_and_output_past_the_context_is_a_400_with_the_numbers(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": "word " * 9000, "max_tokens": 10}

    response = httpx.post(f"{stack.url}/v1/completions", json=body, headers=stack.headers)

    assert response.status_code == httpx.codes.BAD_REQUEST
    assert response.json()["error"]["code"] == "CONTEXT_LENGTH_EXCEEDED"
    assert any(ch.isdigit() for ch in response.json()["error"]["message"])


def test_operator_mistakes_are_one_plain_sentence_and_exit_code_2(stack: Stack, tmp_path: Path) -> None:
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"GGUF" + b"\xff" * 64)
    taken = millrace(tmp_path / "h1", "up", "--port", str(stack.port), "--grpc-port", "1")
    missing = millrace(tmp_path / "h2", "up", "--model", str(tmp_path / "nothing.gguf"))
    broken = millrace(tmp_path / "h3", "up", "--model", str(corrupt), "--port", "18080", "--grpc-port", "18081")
    unknown = millrace(tmp_path / "h4", "up", env={"MILLRACE_MODLE": "x"})

    for done, word in (
        (taken, f"127.0.0.1:{stack.port} cannot be bound"),
        (missing, "does not exist"),
        (broken, "corrupt.gguf"),
        (unknown, "MILLRACE_MODEL"),
    ):
        assert done.returncode == 2, done.stdout + done.stderr
        assert word in done.stderr
        assert "Traceback" not in done.stderr + done.stdout
