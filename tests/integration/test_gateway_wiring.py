"""The whole gateway as __main__ builds it: both doors over one back, start, drain and the operator's mistakes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import redis.asyncio as aioredis
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc

from services.common.admission_store import AdmissionStore
from services.common.grpc_client import open_channel
from services.common.http_server import listen
from services.common.lifecycle import StartupError
from services.gateway.config import GatewayConfig
from services.gateway.wiring import GatewayApp, build
from services.worker.model_source import load_model
from services.worker.wiring import build as build_worker
from tests.helpers.gateway import KEY, FakeRouter
from tests.helpers.redis import RedisProcess
from tests.helpers.waiting import WAIT_S, until
from tests.helpers.worker import echo_config, echo_tokens

ROOT = Path(__file__).parents[2]
SECRET = "mr_test_secret"
HEADERS = {"Authorization": f"Bearer {SECRET}"}


@pytest.fixture
async def store(redis_client: aioredis.Redis) -> AdmissionStore:
    store = AdmissionStore(redis_client)
    await store.replace_keys({hashlib.sha256(SECRET.encode()).digest(): KEY})
    return store


@pytest.fixture
async def router(store: AdmissionStore) -> AsyncIterator[FakeRouter]:
    """A router, and a worker that it submits to."""
    config = echo_config(step_ms=2.0)
    worker = build_worker(config, store=store, model=load_model(config))
    await worker.start()
    router = FakeRouter(store).start()
    yield router
    await router.stop()
    await worker.stop()


def config_of(redis_server: RedisProcess, folder: Path, **settings: object) -> GatewayConfig:
    values = {
        "redis_url": redis_server.url,
        "http_listen": "127.0.0.1:0",
        "grpc_listen": "127.0.0.1:0",
        "data_dir": str(folder),
        "cache_secret": "secret",
        **settings,
    }
    return GatewayConfig(**values)  # type: ignore[arg-type]


@pytest.fixture
async def app(redis_server: RedisProcess, router: FakeRouter, tmp_path: Path) -> AsyncIterator[GatewayApp]:
    app = build(config_of(redis_server, tmp_path))
    await app.start()
    await until(app.back.ready)
    yield app
    await app.stop()


@pytest.fixture
async def client(app: GatewayApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{app.http_port}", headers=HEADERS, timeout=WAIT_S
    ) as client:
        yield client


def text_of(request_id: str, count: int) -> str:
    return "".join(f"t{token} " for token in echo_tokens(request_id, 0, count))


async def test_http_and_grpc_give_the_echo_of_their_request(app: GatewayApp, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"model": "echo", "prompt": "t1 t2 ", "max_tokens": 12})

    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["choices"][0]["text"] == text_of(answer.headers["x-request-id"], 12)
    assert body["usage"]["completion_tokens"] == 12
    async with open_channel(app.grpc_address) as channel:
        stub = gateway_service_pb2_grpc.GatewayServiceStub(channel)
        call = stub.Generate(
            pb.GenerateRequest(model="echo", prompt="t1 t2 ", max_token_count=12),
            metadata=(("authorization", f"Bearer {SECRET}"),),
            timeout=WAIT_S,
        )
        messages = [message async for message in call]
    text = "".join(m.delta.text for m in messages)
    assert text == text_of(messages[0].request_id, 12)
    assert messages[-1].completed.usage.completion_token_count == 12


async def test_a_stream_that_is_cut_stops_the_work(app: GatewayApp, client: httpx.AsyncClient) -> None:
    body = {"model": "echo", "prompt": "t1 ", "max_tokens": 400, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                break
    await until(lambda: app.back.parts.outbox.records)

    (record,) = app.back.parts.outbox.records
    assert record.event.billed.completion_token_count < 400


async def test_a_drain_finishes_streams_and_refuses_new_work(
    app: GatewayApp, router: FakeRouter, client: httpx.AsyncClient
) -> None:
    body = {"model": "echo", "prompt": "t1 ", "max_tokens": 100, "stream": True}
    router.paused = True
    running = asyncio.create_task(client.post("/v1/completions", json=body))
    await until(lambda: len(app.back.parts.table))

    draining = asyncio.create_task(app.drain(WAIT_S))
    await until(lambda: app.back.draining)
    refused = await client.post("/v1/completions", json=body)
    not_ready = await client.get("/readyz")
    router.paused = False
    await draining

    assert (await running).text.rstrip().endswith("data: [DONE]")
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert not_ready.status_code == 503


async def test_a_stream_that_outlives_the_grace_ends_with_an_error(app: GatewayApp, client: httpx.AsyncClient) -> None:
    body = {"model": "echo", "prompt": "t1 ", "max_tokens": 450, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        seen = [await anext(lines)]

        await app.drain(0.0)

        seen += [line async for line in lines]
    assert "data: [DONE]" not in seen
    last = [line for line in seen if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "DRAINING"


async def test_without_redis_it_starts_and_says_503(tmp_path: Path) -> None:
    app = build(GatewayConfig(
        redis_url=f"unix://{tmp_path}/none.sock", http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0",
        data_dir=str(tmp_path), cache_secret="s",
    ))  # fmt: skip
    await app.start()

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.http_port}", headers=HEADERS) as client:
        ready = await client.get("/readyz")
        answer = await client.post("/v1/completions", json={"model": "echo", "prompt": "t1 ", "max_tokens": 2})
        alive = await client.get("/healthz")

    assert (ready.status_code, answer.status_code, alive.status_code) == (503, 503, 200)
    assert "retry-after" in answer.headers
    await app.stop()


async def test_a_taken_port_stops_the_start_and_frees_what_was_opened(
    redis_server: RedisProcess, tmp_path: Path
) -> None:
    taken = listen("127.0.0.1:0")
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    for door in ("http_listen", "grpc_listen"):
        app = build(config_of(redis_server, tmp_path, **{door: address}))

        with pytest.raises(StartupError, match="cannot be bound"):
            await app.start()
    taken.close()


async def test_a_shared_door_is_no_address_of_one_gateway(redis_server: RedisProcess, tmp_path: Path) -> None:
    app = build(config_of(redis_server, tmp_path, grpc_listen="shared:127.0.0.1:0"))

    with pytest.raises(StartupError, match="MILLRACE_ADVERTISE"):
        await app.start()


def process(redis_server: RedisProcess, folder: Path, *arguments: str, **settings: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}
    env = kept | {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos' / 'gen'}", "MILLRACE_REDIS_URL": redis_server.url}
    env |= {"MILLRACE_DATA_DIR": str(folder), "MILLRACE_HTTP_LISTEN": "127.0.0.1:0"}
    env |= {"MILLRACE_GRPC_LISTEN": "127.0.0.1:0"}
    env |= {f"MILLRACE_{name.upper()}": value for name, value in settings.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "services.gateway", *arguments],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigterm_ends_the_process_with_zero_and_leaves_nothing(redis_server: RedisProcess, tmp_path: Path) -> None:
    gateway = process(redis_server, tmp_path)
    assert gateway.stderr is not None
    for line in gateway.stderr:
        if "gateway_started" in line:
            break

    gateway.send_signal(signal.SIGTERM)
    _, errors = gateway.communicate(timeout=WAIT_S)

    assert gateway.returncode == 0, errors
    assert "Traceback" not in errors
    assert list((tmp_path / "outbox").iterdir()) == []


@pytest.mark.parametrize("settings", [{"http_listen": "nonsense"}, {"htp_listen": "x:1"}, {"data_dir": "/proc/none"}])
def test_a_mistake_of_the_operator_is_one_sentence_and_exit_code_two(
    redis_server: RedisProcess, tmp_path: Path, settings: dict[str, str]
) -> None:
    _, errors = (gateway := process(redis_server, tmp_path, **settings)).communicate(timeout=WAIT_S)

    assert gateway.returncode == 2
    assert errors.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in errors


def test_print_config_hides_secrets(redis_server: RedisProcess, tmp_path: Path) -> None:
    shown, _ = process(redis_server, tmp_path, "--print-config", cache_secret="hush").communicate(timeout=WAIT_S)

    assert "MILLRACE_CACHE_SECRET=***" in shown
    assert "hush" not in shown
