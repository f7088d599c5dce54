"""A real PostgreSQL for tests, from Debian's binaries, in a folder of its own on a free port."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psycopg

from tests.helpers.redis import free_port

START_TIMEOUT_S = 30.0
# PostgreSQL refuses to run as root; Debian's package makes this account.
SERVER_ACCOUNT = "postgres"


def postgres_folder() -> Path | None:
    """The newest installed version's folder of binaries, or None."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), key=lambda path: int(path.split("/")[4]))
    if found:
        return Path(found[-1]).parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


class Databases:
    """Makes empty databases in a running server; `server_url` has no path."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._numbers = itertools.count(1)

    def new(self) -> str:
        """URL of an empty database."""
        return self.named(f"ledger_{next(self._numbers)}")

    def named(self, name: str) -> str:
        """URL of the database of this name, made where there is none."""
        with (
            psycopg.connect(f"{self._server_url}/postgres", autocommit=True) as connection,
            contextlib.suppress(psycopg.errors.DuplicateDatabase),
        ):
            connection.execute(f'CREATE DATABASE "{name}"')
        return f"{self._server_url}/{name}"


class PostgresProcess:
    """Owns one server process and its folder. `new_database()` gives each test an empty database.

    `settings` go over what suits tests (no fsync, little memory). A `folder` that holds a server's
    data goes on with it.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, *, folder: Path | None = None) -> None:
        self._settings = {"listen_addresses": "127.0.0.1", "fsync": "off", "shared_buffers": "32MB", **(settings or {})}
        self.folder = folder if folder is not None else Path(tempfile.mkdtemp(prefix="mr-pg-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = Databases(f"postgresql://millrace@127.0.0.1:{self.port}")
        self._account = SERVER_ACCOUNT if os.geteuid() == 0 else None

    @property
    def admin_url(self) -> str:
        return f"postgresql://millrace@127.0.0.1:{self.port}/postgres"

    def start(self) -> PostgresProcess:
        """Create the cluster if it is new, start the server, wait until it answers. Blocks."""
        binaries = postgres_folder()
        if binaries is None:
            raise FileNotFoundError("no initdb: apt-get install postgresql")
        data = self.folder / "data"
        if not data.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._account is not None:
                account = pwd.getpwnam(self._account)
                os.chown(self.folder, account.pw_uid, account.pw_gid)
            argv = [str(binaries / "initdb"), "-D", str(data), "-U", "millrace", "-A", "trust", "-E", "UTF8"]
            self._run([*argv, "--locale", "C.UTF-8", "--no-sync"])
        self._process = subprocess.Popen(
            [
                *(str(binaries / "postgres"), "-D", str(data), "-p", str(self.port), "-k", str(self.folder)),
                *(part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            **self._identity(),
        )
        self._wait()
        return self

    def new_database(self) -> str:
        """URL of an empty database."""
        return self._databases.new()

    def database(self, name: str) -> str:
        """URL of the database of this name, made where there is none."""
        return self._databases.named(name)

    def kill(self) -> None:
        """End the server at once (immediate shutdown: no checkpoint, no goodbye); the folder stays."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=START_TIMEOUT_S)
            self._process = None

    def stop(self) -> None:
        """End the server and delete its folder. Idempotent."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with psycopg.connect(self.admin_url, connect_timeout=2):
                    return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process is None or self._process.poll() is not None:
                    self.stop()
                    raise
                time.sleep(0.05)

    def _identity(self) -> dict[str, object]:
        if self._account is None:
            return {}
        account = pwd.getpwnam(self._account)
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def _run(self, argv: list[str]) -> None:
        subprocess.run(argv, check=True, capture_output=True, cwd=self.folder, **self._identity())
