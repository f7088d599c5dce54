"""A whole local stack as a user starts it: `millrace up` in a home of its own, on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cli.stack_state import StackState, demo_key, process_alive, read_state
from tests.helpers.redis import free_port
from tests.helpers.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0


def clean_environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos" / "gen"), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return kept | {"MILLRACE_HOME": str(home), "PYTHONPATH": path} | dict(extra or {})


def millrace(
    home: Path, *arguments: str, timeout: float = 300, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one `millrace` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        cwd=home.parent,
        env=clean_environment(home, env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def new_key(home: Path, tenant: str, *options: str, env: Mapping[str, str] | None = None) -> str:
    """A key of a new tenant, which gets the options of `tenant create`."""
    for arguments in (("tenant", "create", tenant, *options), ("key", "create", "--tenant", tenant)):
        done = millrace(home, *arguments, env=env)
        assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def with_shared_kernels(home: Path) -> Path:
    """A home whose first worker finds the kernels that this machine has compiled before."""
    shared = Path.home() / ".cache" / "millrace" / "kernels"
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    worker = home / "worker-1"
    for folder in (home, worker):
        folder.mkdir(mode=0o700)
    (worker / "kernels").symlink_to(shared)
    return home


class Stack:
    """A running `millrace up`."""

    def __init__(self, home: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.port, self.grpc_port = free_port(), free_port()
        self.output = home.parent / f"{home.name}.out"
        argv = [sys.executable, "-m", "cli.main", "up", "--port", str(self.port), "--grpc-port", str(self.grpc_port)]
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [*argv, *arguments],
                cwd=home.parent,
                env=clean_environment(home, env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait_ready(self) -> Stack:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.curl_line:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill_all()
                raise AssertionError(f"the stack did not start:\n{self.output.read_text()}\n{self.logs()}")
            time.sleep(0.05)
        return self

    @property
    def curl_line(self) -> str:
        lines = self.output.read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("curl ")), "")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def key(self) -> str:
        return demo_key(self.home) or ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def state(self) -> StackState:
        state = read_state(self.home)
        assert state is not None, self.output.read_text()
        return state

    def logs(self) -> str:
        return "\n".join(
            f"== {p.name}\n" + "\n".join(p.read_text(errors="replace").splitlines()[-25:])
            for p in sorted((self.home / "logs").glob("*.log"))
        )

    def signal(self, name: str, number: int) -> int:
        """Signal one process by its name (`router`, `worker-1` …); returns its process id."""
        pid = self.state.processes[name]
        os.kill(pid, number)
        return pid

    def ledger(self) -> list[dict[str, Any]]:
        done = millrace(self.home, "usage", "export", "--format", "jsonl")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def wait_ledger(self, count: int, timeout_s: float = WAIT_S) -> list[dict[str, Any]]:
        """The ledger once it has `count` rows (or at the timeout, for the test to judge)."""
        return self._wait_rows(lambda rows: len(rows) >= count, timeout_s)

    def wait_requests(self, request_ids: Iterable[str], timeout_s: float) -> list[dict[str, Any]]:
        """The ledger once it has a row of each of these (or at the timeout, for the test to judge)."""
        wanted = set(request_ids)
        return self._wait_rows(lambda rows: wanted <= {row["request_id"] for row in rows}, timeout_s)

    def _wait_rows(self, enough: Callable[[list[dict[str, Any]]], bool], timeout_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        while not enough(rows := self.ledger()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return rows

    def stop(self) -> int:
        """Ctrl-C; returns the exit code. Raises when a process is left behind."""
        if self.process.poll() is not None:
            return self.process.returncode
        children = dict(self.state.processes)
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(60)
        left = [name for name, pid in children.items() if process_alive(pid)]
        assert left == [], f"left behind: {left}"
        return code

    def kill_all(self) -> None:
        state = read_state(self.home)
        for pid in [*(state.processes.values() if state else ()), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)


@contextlib.contextmanager
def running_stack(home: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """A stack that is ready; it must stop well at the end, and nothing is left of it in any case."""
    stack = Stack(home, *arguments, env=env)
    try:
        yield stack.wait_ready()
        assert stack.stop() == 0
    finally:
        if stack.process.poll() is None:
            stack.kill_all()
