"""The four services as processes over a Redis that a test owns: `millrace up` takes only its own."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from tests.helpers.redis import free_port
from tests.helpers.stack import ROOT, START_TIMEOUT_S, clean_environment

ADMIN_TOKEN = "mra_test_0123456789abcdef0123456789abcdef"


@dataclasses.dataclass(frozen=True)
class ServiceProcesses:
    """Where they are. Logs, sockets and the ledger lie in `folder`."""

    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def usage_address(self) -> str:
        return self.address("usage")

    @property
    def router_address(self) -> str:
        return self.address("router")

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.sqlite3"

    @property
    def operator(self) -> dict[str, str]:
        """What the commands of `millrace` are told by."""
        return {"MILLRACE_USAGE_ADDRESS": self.usage_address, "MILLRACE_ADMIN_TOKEN": ADMIN_TOKEN}

    def address(self, service: str) -> str:
        return f"unix:{self.folder / service}.sock"

    def settings(self, service: str, redis_url: str) -> dict[str, str]:
        """The variables of one of them, each in a folder of its own."""
        named: dict[str, dict[str, str]] = {
            "usage": {"database_url": f"sqlite:///{self.ledger}", "admin_token": ADMIN_TOKEN},
            "worker": {"model": "echo"},
            "router": {},
            "gateway": {"http_listen": f"127.0.0.1:{self.port}", "cache_secret": "test"},
        }
        own = named[service] | {"redis_url": redis_url}
        own["grpc_listen"] = "127.0.0.1:0" if service == "gateway" else self.address(service)
        if service in ("usage", "gateway"):
            own["data_dir"] = str(self.folder / service)
        return {f"MILLRACE_{name.upper()}": value for name, value in own.items()}


@contextlib.contextmanager
def service_processes(
    redis_url: str, folder: Path, *, worker: Mapping[str, str] | None = None
) -> Iterator[ServiceProcesses]:
    """All four, once the gateway is ready; they are killed at the end. `worker` is added to the worker's environment.
    The path of `folder` must leave room for the name of a socket."""
    services = ServiceProcesses(folder, free_port())
    folder.mkdir(exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []
    try:
        for service in ("usage", "worker", "router", "gateway"):
            own = services.settings(service, redis_url) | dict(worker or {} if service == "worker" else {})
            environment = clean_environment(folder / service, own)
            with (folder / f"{service}.log").open("wb") as log:
                argv = [sys.executable, "-m", f"services.{service}"]
                running.append(subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=log, stderr=log))
        _wait_ready(services, running)
        yield services
    finally:
        for process in running:
            process.kill()
            process.wait()


def _wait_ready(services: ServiceProcesses, running: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{services.url}/readyz").is_success:
                return
        if time.monotonic() > deadline or any(process.poll() is not None for process in running):
            logs = "\n".join(path.read_text(errors="replace") for path in sorted(services.folder.glob("*.log")))
            raise AssertionError(f"the services are not ready:\n{logs}")
        time.sleep(0.05)
