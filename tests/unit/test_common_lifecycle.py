"""Start and end of a process, ids, crash points, metrics and log lines."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import httpx
import pytest

from services.common.lifecycle import new_ulid
from services.common.metrics import Metrics, start_metrics_server

PROGRAM = """
import asyncio, os, sys
from services.common.config import ConfigError
from services.common.lifecycle import StartupError, crash_point, run
async def main(stop):
    {body}
sys.exit(run(main))
"""


def run_program(body: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    code = PROGRAM.format(body=body)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)} | (env or {}),
    )


def test_a_signal_asks_for_a_clean_end() -> None:
    done = run_program("os.kill(os.getpid(), 15); await stop.wait(); print('drained')")

    assert (done.returncode, done.stdout.strip()) == (0, "drained")


@pytest.mark.parametrize("error", ["StartupError", "ConfigError"])
def test_an_operators_mistake_is_one_sentence_and_exit_code_2(error: str) -> None:
    done = run_program(f"raise {error}('The port 1 is taken.')")

    assert (done.returncode, done.stderr) == (2, "error: The port 1 is taken.\n")


def test_a_crash_point_kills_only_when_it_is_named() -> None:
    body = "crash_point('a.b'); print('alive')"

    assert run_program(body).stdout.strip() == "alive"
    assert run_program(body, {"MILLRACE_CRASH_AT": "a.c"}).stdout.strip() == "alive"
    assert run_program(body, {"MILLRACE_CRASH_AT": "a.b"}).returncode == 137


def test_a_second_signal_ends_at_once() -> None:
    body = "os.kill(os.getpid(), 15); await stop.wait(); os.kill(os.getpid(), 2); await asyncio.sleep(30)"

    assert run_program(body).returncode == 128 + signal.SIGINT


def test_ulids_sort_by_time_and_never_repeat() -> None:
    early, late = new_ulid(1_000_000.0), new_ulid(1_000_000.001)

    assert early < late
    assert len({new_ulid(5.0) for _ in range(1_000)}) == 1_000
    assert all(len(u) == 26 for u in (early, late))


def test_log_lines_are_json_with_service_and_instance() -> None:
    code = (
        "from services.common.telemetry import setup_logging; import structlog;"
        "setup_logging('router', 'router-1', 'info'); structlog.get_logger().info('claimed', count=3);"
        "structlog.get_logger().debug('hidden')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )

    line = json.loads(done.stderr)
    assert {k: line[k] for k in ("event", "service", "instance", "count", "level")} == {
        "event": "claimed",
        "service": "router",
        "instance": "router-1",
        "count": 3,
        "level": "info",
    }


async def test_the_metrics_listener_answers_health_readiness_and_metrics() -> None:
    metrics = Metrics()
    metrics.refusals_total.labels("QUEUE_FULL").inc()
    healthy = True
    server = await start_metrics_server("127.0.0.1:0", metrics, lambda: healthy, lambda: False)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        page = await client.get("/metrics")
        good, not_ready, missing = [await client.get(p) for p in ("/healthz", "/readyz", "/nothing")]
        healthy = False
        bad = await client.get("/healthz")
    await server.close()

    assert 'millrace_refusals_total{reason="QUEUE_FULL"} 1.0' in page.text
    assert [r.status_code for r in (good, not_ready, missing, bad)] == [200, 503, 404, 503]


async def test_a_client_that_says_nothing_does_not_stop_the_metrics_listener() -> None:
    server = await start_metrics_server("127.0.0.1:0", Metrics(), lambda: True)
    _, silent = await asyncio.open_connection("127.0.0.1", server.port)

    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{server.port}/healthz")
    silent.close()
    await silent.wait_closed()
    await server.close()

    assert answer.status_code == httpx.codes.OK


def test_tenants_beyond_the_cap_share_one_label() -> None:
    metrics = Metrics(tenant_cap=2)

    labels = [metrics.tenant_label(t) for t in ("a", "b", "c", "a", "d")]

    assert labels == ["a", "b", "other", "a", "other"]
