"""The small tools around the images: requirement lists, entry point, health check, and the scripts' refusals."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
AIRGAP = ROOT / "deploy" / "airgap"
PROJECT = """
[build-system]
requires = ["hatchling>=1.27"]
[project]
dependencies = ["grpcio>=1.85", "Redis>=6.4"]
[project.optional-dependencies]
worker = ["torch>=2.11", "triton>=3.6; platform_system == 'Linux'", "numpy>=2.0"]
router = []
"""


def call(*command: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    path = tmp_path / "pyproject.toml"
    path.write_text(PROJECT)
    return path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["Redis>=6.4", "grpcio>=1.85"]),
        (["router"], ["Redis>=6.4", "grpcio>=1.85"]),
        (["build-system", "router"], ["Redis>=6.4", "grpcio>=1.85", "hatchling>=1.27"]),
        (["worker", "--without", "Torch", "--without", "triton"], ["Redis>=6.4", "grpcio>=1.85", "numpy>=2.0"]),
    ],
)
def test_requirements_are_the_base_and_the_extras_less_what_is_left_out(
    project: Path, arguments: list[str], expected: list[str]
) -> None:
    done = call(sys.executable, DOCKER / "requirements.py", project, *arguments)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected


def test_an_unknown_extra_is_one_sentence_and_exit_code_2(project: Path) -> None:
    done = call(sys.executable, DOCKER / "requirements.py", project, "wroker")

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "wroker" in done.stderr
    assert "worker" in done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{hostname}:7301", f"{socket.gethostname()}:7301"),
        ("worker.example:7301", "worker.example:7301"),
        ("", ""),
    ],
)
def test_the_entry_point_advertises_the_containers_own_name(given: str, expected: str) -> None:
    command = ("sh", DOCKER / "run-service.sh", "sh", "-c", 'printf %s "$MILLRACE_ADVERTISE"')

    done = call(*command, environment={"MILLRACE_ADVERTISE": given})

    assert done.stdout == expected


@pytest.fixture
def health_port() -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 503)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_health_check_is_red_for_anything_but_200(health_port: int) -> None:
    check = (sys.executable, "-S", "-E", DOCKER / "healthcheck.py")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{unused.getsockname()[1]}"

        assert call(*check, f"127.0.0.1:{health_port}", "/healthz").returncode == 0
        assert call(*check, f"127.0.0.1:{health_port}", "/readyz").returncode == 1
        assert call(*check, closed, "/healthz").returncode == 1


@pytest.mark.parametrize("script", ["build-base-images.sh", "fill-wheelhouse.sh", "start-dockerd.sh"])
def test_a_script_explains_itself_and_refuses_what_it_does_not_know(script: str) -> None:
    helped = call("bash", AIRGAP / script, "--help")
    refused = call("bash", AIRGAP / script, "--frobnicate")

    assert helped.returncode == 0
    assert helped.stdout.startswith(f"Usage: {script}")
    assert "Exit codes" in helped.stdout
    assert refused.returncode == 2
    assert "--frobnicate" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_the_wheelhouse_is_refused_for_another_python(tmp_path: Path) -> None:
    other = tmp_path / "python3.12"
    other.write_text("#!/bin/sh\necho 3.12\n")
    other.chmod(0o755)

    done = call("bash", AIRGAP / "fill-wheelhouse.sh", "--python", other, "--dir", tmp_path / "wheels")

    assert done.returncode == 2
    assert "3.12" in done.stderr
    assert not (tmp_path / "wheels").exists()


def test_building_base_images_without_an_engine_says_so(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexit 1\n")
    docker.chmod(0o755)
    bash = shutil.which("bash") or "bash"

    done = call(bash, AIRGAP / "build-base-images.sh", environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})

    assert done.returncode == 2
    assert "no container engine answers" in done.stderr
