"""The compose stack on a real container engine: images built offline, an answer, a ledger row, a pause, a kill."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.redis import free_port
from tests.helpers.transcripts import Transcript, stream_completion

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1_500)]

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
SITE_PACKAGES = "/opt/venv/lib/python3.11/site-packages"
SIZE_LIMIT_MB = {"gateway": 320, "router": 250, "usage": 300, "worker": 1_400}
SERVICES = ("usage", "worker", "router", "gateway")
STREAMS = 6
MAX_TOKENS = 120
# The longest a client may wait for a byte: PROTOCOL's 15 s, and some for a machine that is busy with the rest.
SILENCE_S = 25.0


def run(*command: str, timeout: float = 120, environment: dict[str, str] | None = None) -> str:
    """Standard output of a command that must succeed; its last lines are the message when it does not."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{tail}", pytrace=False)
    return done.stdout


def compose_command() -> list[str]:
    """`docker compose` where the plugin is there, else docker-compose 1.28 or newer."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        pytest.fail("neither 'docker compose' nor 'docker-compose' is installed", pytrace=False)
    return ["docker-compose"]


class ComposeStack:
    """The stack of docker-compose.yml under a project name and ports of its own."""

    def __init__(self) -> None:
        self.project = f"millrace-test-{os.getpid()}"
        self.port = free_port()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        ports = {"PORT": str(self.port), "GRPC_PORT": str(free_port())}
        self.environment = (
            kept
            | ports
            | {
                "TAG": "test",
                "COMPOSE_PROJECT_NAME": self.project,
                "MILLRACE_ADMIN_TOKEN": "mra_root_of_the_test",
            }
        )
        self._command = compose_command()
        self.key = ""

    def compose(self, *arguments: str, timeout: float = 120) -> str:
        return run(*self._command, *arguments, timeout=timeout, environment=self.environment)

    def millrace(self, *arguments: str) -> str:
        return self.compose("exec", "-T", "usage", "millrace", *arguments)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).split()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def wait(self, what: str, ready: Any, timeout_s: float) -> None:
        """Poll `ready()` to the deadline; fails with the end of every container's log."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                logs = self.compose("logs", "--no-color", "--tail", "25")
                pytest.fail(f"{what} did not come within {timeout_s:.0f} s:\n{logs}", pytrace=False)
            time.sleep(0.5)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def is_healthy(self, *services: str) -> bool:
        ids = [container for service in services for container in self.containers(service)]
        states = run("docker", "inspect", "--format", "{{.State.Health.Status}}", *ids).split()
        return bool(states) and set(states) == {"healthy"}

    def attached_worker_count(self) -> int:
        """Workers that the router sees healthy, by its own status call."""
        code = (
            "import asyncio,sys;from services.common.grpc_client import open_channel;"
            "from millrace.router.v1 import router_service_pb2 as p, router_service_pb2_grpc as g\n"
            "async def main():\n"
            " async with open_channel('127.0.0.1:7201') as c:\n"
            "  a=await g.RouterServiceStub(c).GetStatus(p.GetStatusRequest(),timeout=5)\n"
            "  print(sum(e.healthy and not e.draining for e in a.endpoints))\n"
            "asyncio.run(main())"
        )
        return int(self.compose("exec", "-T", "router", "python", "-c", code))

    def ledger(self) -> dict[str, dict[str, Any]]:
        rows = [json.loads(line) for line in self.millrace("usage", "export", "--format", "jsonl").splitlines()]
        assert len({row["request_id"] for row in rows}) == len(rows), "a request is billed twice"
        return {row["request_id"]: row for row in rows}

    def wait_ledger(self, request_ids: set[str], timeout_s: float = 30) -> dict[str, dict[str, Any]]:
        """The rows of these requests, once all are there."""
        self.wait("the ledger rows", lambda: request_ids <= set(self.ledger()), timeout_s)
        return {request_id: row for request_id, row in self.ledger().items() if request_id in request_ids}

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", timeout=180)


@pytest.fixture(scope="module")
def images() -> ComposeStack:
    """Base images, wheelhouse and service images; built again only where something changed."""
    engine = subprocess.run(["docker", "version"], capture_output=True, check=False) if shutil.which("docker") else None
    if engine is None or engine.returncode != 0:
        pytest.fail("no container engine answers: run deploy/airgap/start-dockerd.sh", pytrace=False)
    started = time.monotonic()
    run("deploy/airgap/build-base-images.sh", "python:3.11-slim", "redis:7-bookworm", timeout=600)
    run("deploy/airgap/fill-wheelhouse.sh", timeout=600)
    based = time.monotonic()
    stack = ComposeStack()
    stack.compose("build", *SERVICES, timeout=1_200)
    print(f"\nbase images and wheelhouse {based - started:.0f} s, service images {time.monotonic() - based:.0f} s")
    return stack


@pytest.fixture(scope="module")
def stack(images: ComposeStack) -> Iterator[ComposeStack]:
    """The default profile with a CPU worker, Redis started last."""
    started = time.monotonic()
    try:
        images.compose("up", "-d", "--no-deps", *SERVICES)
        time.sleep(3)
        images.compose("up", "-d", "redis")
        images.wait("readiness", images.is_ready, 240)
        print(f"\nready {time.monotonic() - started:.0f} s after the first container")
        images.millrace("tenant", "create", "demo")
        images.key = images.millrace("key", "create", "--tenant", "demo").split()[-1]
        yield images
        images.compose("stop", timeout=180)
        codes = {name: exit_codes(images, name) for name in SERVICES}
        assert codes == {name: [0] * len(codes[name]) for name in SERVICES}, "a service did not drain"
    finally:
        images.down()
        left = run("docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={images.project}")
        assert left.split() == []


def exit_codes(stack: ComposeStack, service: str) -> list[int]:
    ids = run(
        "docker",
        "ps",
        "-aq",
        "--filter",
        f"label=com.docker.compose.project={stack.project}",
        "--filter",
        f"label=com.docker.compose.service={service}",
    ).split()
    return [int(code) for code in run("docker", "inspect", "--format", "{{.State.ExitCode}}", *ids).split()]


@pytest.mark.parametrize("service", SERVICES)
def test_only_the_worker_image_carries_torch_and_all_stay_small(images: ComposeStack, service: str) -> None:
    image = f"millrace-{service}:test"
    size_mb = int(run("docker", "image", "inspect", "--format", "{{.Size}}", image)) // 1_000_000
    pip = ("/usr/local/bin/python", image, "-m", "pip", "list", "--path", SITE_PACKAGES, "--format", "json")
    listed = run("docker", "run", "--rm", "--network", "none", "--entrypoint", *pip)
    installed = {package["name"].lower(): package["version"] for package in json.loads(listed)}
    print(f"\n{image}: {size_mb} MB, {len(installed)} packages")

    assert "millrace" in installed
    assert size_mb < SIZE_LIMIT_MB[service]
    assert not [name for name in installed if name.startswith(("nvidia", "cuda", "triton"))]
    if service == "worker":
        assert installed["torch"].endswith("+cpu")
    else:
        assert "torch" not in installed


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_runs_unprivileged_and_reaches_nothing_outside(stack: ComposeStack, service: str) -> None:
    assert stack.compose("exec", "-T", service, "id", "-u").strip() == "10001"
    denied = stack.compose("exec", "-T", service, "sh", "-c", "touch /opt/x 2>/dev/null || echo refused")
    assert denied.strip() == "refused"
    capabilities = stack.compose("exec", "-T", service, "grep", "CapBnd", "/proc/self/status").split()
    assert int(capabilities[1], 16) == 0


def test_the_answer_is_paris_and_the_ledger_has_its_tokens(stack: ComposeStack) -> None:
    body = QUESTION | {"temperature": 0, "max_tokens": 32}
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=120)

    assert response.status_code == httpx.codes.OK, response.text
    answer = response.json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    request_id = response.headers["x-request-id"]
    row = stack.wait_ledger({request_id})[request_id]
    assert row["tenant"] == "demo"
    assert row["terminal_state"] == "completed"
    assert row["billed_prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert row["billed_completion_tokens"] == answer["usage"]["completion_tokens"]


def test_a_request_without_a_key_is_refused(stack: ComposeStack) -> None:
    assert httpx.get(f"{stack.url}/v1/models", timeout=30).status_code == httpx.codes.UNAUTHORIZED


def running_choices(container: str) -> float:
    """Choices in the batch of one worker, by its own metrics."""
    code = "import urllib.request as u;print(u.urlopen('http://127.0.0.1:9090/metrics',timeout=5).read().decode())"
    text = run("docker", "exec", container, "python", "-c", code)
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("millrace_running_requests{"))


async def streams_with_a_fault(stack: ComposeStack, victim: str, *fault: str) -> list[Transcript]:
    """Streams on both workers; the fault comes while the victim decodes some. A silent stream ends by read timeout."""
    body: dict[str, object] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": MAX_TOKENS}
    body |= {"ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(base_url=stack.url, headers=stack.headers, timeout=SILENCE_S) as client:
        streams = [asyncio.create_task(stream_completion(client, body)) for _ in range(STREAMS)]
        while await asyncio.to_thread(running_choices, victim) < 1:
            assert not any(stream.done() for stream in streams), "the victim got no stream"
        await asyncio.to_thread(run, "docker", *fault, victim)
        assert not all(stream.done() for stream in streams), "the fault came too late"
        return await asyncio.gather(*streams)


def assert_no_stream_is_silent_or_billed_twice(stack: ComposeStack, seen: list[Transcript]) -> None:
    print(f"\nendings: {sorted(transcript.ending for transcript in seen)}")
    assert {transcript.ending for transcript in seen} <= {"completed", "error"}, seen
    assert len({transcript.text for transcript in seen if transcript.ending == "completed"}) == 1
    rows = stack.wait_ledger({transcript.request_id for transcript in seen})
    for transcript in seen:
        row = rows[transcript.request_id]
        if transcript.ending == "completed":
            assert transcript.usage is not None
            assert row["billed_completion_tokens"] == transcript.usage["completion_tokens"] == MAX_TOKENS
        else:
            assert row["billed_completion_tokens"] < MAX_TOKENS


@pytest.fixture
def two_workers(stack: ComposeStack) -> Iterator[list[str]]:
    stack.compose("up", "-d", "--no-recreate", "--scale", "worker=2", "worker")
    stack.wait("two workers", lambda: stack.attached_worker_count() == 2, 240)
    yield stack.containers("worker")
    stack.compose("up", "-d", "--no-recreate", "--scale", "worker=2", "worker")


def test_a_paused_worker_leaves_no_silent_stream(stack: ComposeStack, two_workers: list[str]) -> None:
    try:
        seen = asyncio.run(streams_with_a_fault(stack, two_workers[0], "pause"))
    finally:
        run("docker", "unpause", two_workers[0])

    assert_no_stream_is_silent_or_billed_twice(stack, seen)
    stack.wait("the paused worker", lambda: stack.attached_worker_count() == 2, 60)


def test_a_killed_worker_leaves_no_silent_stream(stack: ComposeStack, two_workers: list[str]) -> None:
    seen = asyncio.run(streams_with_a_fault(stack, two_workers[0], "kill", "--signal", "KILL"))

    assert_no_stream_is_silent_or_billed_twice(stack, seen)
    assert any(transcript.ending == "completed" for transcript in seen)
    after = QUESTION | {"temperature": 0, "max_tokens": 16}
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=after, headers=stack.headers, timeout=120)
    assert response.status_code == httpx.codes.OK, response.text


def test_new_work_is_refused_in_time_while_redis_is_away_and_accepted_after(stack: ComposeStack) -> None:
    body = QUESTION | {"temperature": 0, "max_tokens": 4}
    stack.compose("stop", "redis")
    try:
        refused = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=30)
    finally:
        stack.compose("start", "redis")

    assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert int(refused.headers["retry-after"]) >= 1
    stack.wait("readiness after Redis came back", stack.is_ready, 60)
    again = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=120)
    assert again.status_code == httpx.codes.OK, again.text
