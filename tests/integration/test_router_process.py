"""The router as a process: start in any order, clean exit, plain errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.redis import RedisProcess

ROOT = Path(__file__).parents[2]


def start_router(**settings: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "protos" / "gen")])
    environment.update({f"MILLRACE_{name.upper()}": value for name, value in settings.items()})
    return subprocess.Popen(
        [sys.executable, "-m", "services.router"], env=environment, stderr=subprocess.PIPE, text=True
    )


def ends_cleanly(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for `router_ready`, send SIGTERM, return exit code and log."""
    assert process.stderr is not None
    log = ""
    with process:
        for line in process.stderr:
            log += line
            if "router_ready" in line:
                break
        process.send_signal(signal.SIGTERM)
        log += process.communicate(timeout=30)[1]
    return process.returncode, log


def test_a_router_ends_with_code_zero(redis_server: RedisProcess) -> None:
    code, log = ends_cleanly(start_router(redis_url=redis_server.url))

    assert code == 0
    assert "Traceback" not in log


def test_a_router_starts_before_redis_and_ends_without_it(tmp_path: Path) -> None:
    code, log = ends_cleanly(start_router(redis_url=f"unix://{tmp_path}/not-there.sock"))

    assert code == 0
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("grpc_listen", "nonsense", "MILLRACE_GRPC_LISTEN='nonsense': expected host:port or unix:/path."),
        ("reddis_url", "x", "MILLRACE_REDDIS_URL is not a setting of this service; did you mean MILLRACE_REDIS_URL?"),
        ("grpc_listen", "203.0.113.1:1", "The address 203.0.113.1:1 cannot be bound: is the port taken?"),
    ],
)
def test_a_mistake_of_the_operator_is_one_sentence_and_code_two(setting: str, value: str, sentence: str) -> None:
    process = start_router(**{setting: value})
    _, log = process.communicate(timeout=30)

    assert process.returncode == 2
    assert f"error: {sentence}\n" in log
    assert "Traceback" not in log
