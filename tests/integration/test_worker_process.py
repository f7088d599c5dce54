"""The worker as a process: start-up refusals, readiness, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.admission_store import AdmissionStore
from services.common.redis_client import connect
from tests.helpers.redis import RedisProcess
from tests.helpers.waiting import WAIT_S
from tests.helpers.worker import GatewayClient, echo_tokens, entry

ROOT = Path(__file__).parents[2]


def environment(**settings: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}
    kept["PYTHONPATH"] = f"{ROOT}:{ROOT / 'protos' / 'gen'}"
    return kept | {f"MILLRACE_{name.upper()}": value for name, value in settings.items()}


def run_to_end(**settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.worker"],
        cwd=ROOT, env=environment(**settings), capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip


@pytest.fixture
def worker(redis_server: RedisProcess) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "services.worker"],
        cwd=ROOT,
        env=environment(model="echo", echo_step_ms="5", redis_url=redis_server.url, engine="max_num_seqs=4"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield process
    process.kill()
    process.wait()


async def registered(store: AdmissionStore) -> str:
    """Address of the only worker, once its lease is there."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for record in await store.list_workers():
                return record.address
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "no/such/file.gguf"},
        {"model": "echo", "engine": "max_num_seqs=none"},
        {"model": "echo", "metrics_listen": "no-such-host.invalid:1"},
        {"model": "echo", "grpc_listen": "no-such-host.invalid:1"},
        {"modle": "echo"},
    ],
)
def test_a_mistake_of_the_operator_is_one_sentence_and_exit_code_two(settings: dict[str, str]) -> None:
    result = run_to_end(**settings)

    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 2
    assert last.startswith("error: ")
    assert "Traceback" not in result.stderr


async def test_sigterm_lets_streams_end_and_leaves_no_lease(
    redis_server: RedisProcess, worker: subprocess.Popen[bytes]
) -> None:
    client = connect(redis_server.url)
    store = AdmissionStore(client)
    gateway = await GatewayClient(await registered(store)).attach()
    accepted = False
    while not accepted:
        accepted = (await gateway.submit(entry("r1", max_tokens=100))).accepted
    await gateway.until(lambda: bool(gateway.of("r1").tokens))

    worker.send_signal(signal.SIGTERM)
    await gateway.finished("r1")
    code = await asyncio.to_thread(worker.wait, WAIT_S)

    assert gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 100)
    assert code == 0
    assert await store.list_workers() == []
    await gateway.close()
    await client.aclose()
