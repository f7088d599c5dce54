"""Where tests take Redis and PostgreSQL from: containers where an engine answers and holds the image, else local
binaries. Nothing is pulled. `describe()` says which, for the header of the test run.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from tests.helpers.postgres import Databases, PostgresProcess, postgres_folder
from tests.helpers.redis import RedisProcess, redis_binary

REDIS_IMAGE = "redis:7-bookworm"
POSTGRES_IMAGE = "postgres:15-bookworm"
ENGINE_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """A started server: where it came from, the URL of a fresh database in it, how to end it."""

    source: str
    new_url: Callable[[], str]
    stop: Callable[[], None]


def image_is_local(image: str) -> bool:
    """Whether an engine answers and holds the image already."""
    if shutil.which("docker") is None:
        return False
    try:
        found = subprocess.run(
            ["docker", "image", "inspect", image], capture_output=True, timeout=ENGINE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return found.returncode == 0


def redis_source() -> str:
    """`container <image>`, or the path of the local binary."""
    return f"container {REDIS_IMAGE}" if image_is_local(REDIS_IMAGE) else redis_binary()


def postgres_source() -> str | None:
    """`container <image>`, or the folder of the local binaries, or None where there is neither."""
    if image_is_local(POSTGRES_IMAGE):
        return f"container {POSTGRES_IMAGE}"
    folder = postgres_folder()
    return None if folder is None else str(folder)


def describe() -> str:
    """One line for the header of the test run."""
    return f"backends: redis from {redis_source()}, postgresql from {postgres_source() or 'nowhere (tests skip it)'}"


def start_redis() -> Backend:
    """A Redis from whichever source there is. Blocks."""
    source = redis_source()
    if not source.startswith("container "):
        process = RedisProcess(append_only=False).start()
        return Backend(source, lambda: process.tcp_url, process.stop)
    container = _container(REDIS_IMAGE).with_exposed_ports(6379)
    started = _started(container, "Ready to accept connections")
    url = f"redis://{_address(started, 6379)}/0"
    return Backend(source, lambda: url, started.stop)


def start_postgres() -> Backend:
    """A PostgreSQL from whichever source there is. Blocks. Raises FileNotFoundError where there is none."""
    source = postgres_source()
    if source is None or not source.startswith("container "):
        process = PostgresProcess().start()
        return Backend(str(source), process.new_database, process.stop)
    container = _container(POSTGRES_IMAGE).with_exposed_ports(5432)
    for name, value in (("POSTGRES_USER", "millrace"), ("POSTGRES_PASSWORD", "millrace"), ("POSTGRES_DB", "postgres")):
        container = container.with_env(name, value)
    started = _started(container, "ready to accept connections", times=2)
    databases = Databases(f"postgresql://millrace:millrace@{_address(started, 5432)}")
    return Backend(source, databases.new, started.stop)


def _container(image: str) -> Any:
    # The reaper is an image of its own, which is not here; tests stop what they start.
    os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"
    from testcontainers.core.container import DockerContainer

    return DockerContainer(image)


def _started(container: Any, line: str, times: int = 1) -> Any:
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    return container.waiting_for(LogMessageWaitStrategy(line, times=times)).start()


def _address(container: Any, port: int) -> str:
    return f"{container.get_container_host_ip()}:{container.get_exposed_port(port)}"
