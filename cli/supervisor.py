"""Child processes of the local stack: start, restart after a crash, stop in order, leave none behind."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_CONFIG_ERROR = 2
_MAX_BACKOFF_S = 8.0
_STEADY_S = 30.0


class ChildFailedError(Exception):
    """A child ended in a way that a restart cannot mend; `str()` is one sentence for the operator."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: `name` for people, `grace_s` seconds between SIGTERM and SIGKILL."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    grace_s: float = 35.0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One supervised process; its output goes to `<log_dir>/<name>.log`."""

    def __init__(self, spec: ChildSpec, log_dir: Path) -> None:
        self.spec = spec
        self.log_path = log_dir / f"{spec.name}.log"
        self.restarts = 0
        self._started_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process in a session of its own, so that a terminal's Ctrl-C reaches the supervisor only."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                list(self.spec.argv),
                env=dict(self.spec.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one prctl call, no Python state touched
            )
        self._started_at = time.monotonic()

    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def last_error(self) -> str:
        """The last `error: …` line of its log, else its last line."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["no output"])[-1]

    def ran_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started_at

    async def stop(self) -> None:
        """SIGTERM, wait for the grace, then SIGKILL."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, self.spec.grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


class Supervisor:
    """All children of one stack, in start order."""

    def __init__(self, specs: Sequence[ChildSpec], log_dir: Path, notify: Callable[[str], None]) -> None:
        self.children = [Child(spec, log_dir) for spec in specs]
        self._notify = notify

    def start(self) -> None:
        """Start every child."""
        for child in self.children:
            child.start()

    def processes(self) -> dict[str, int]:
        """Process ids by name."""
        return {child.spec.name: child.pid for child in self.children}

    def check_started(self) -> None:
        """Raise ChildFailedError when a child ended while the stack was coming up."""
        for child in self.children:
            code = child.exit_code()
            if code == _CONFIG_ERROR or (code is not None and child.restarts == 0):
                raise ChildFailedError(f"{child.spec.name} could not start: {child.last_error()}")

    async def watch(self, stop: asyncio.Event, changed: Callable[[], None]) -> None:
        """Restart children that crash, with a growing pause, until `stop` is set."""
        due: dict[str, float] = {}
        while not stop.is_set():
            for child in self.children:
                code = child.exit_code()
                if code is None:
                    continue
                name = child.spec.name
                if name not in due:
                    child.restarts = 0 if child.ran_s() > _STEADY_S else child.restarts
                    pause = min(_MAX_BACKOFF_S, 0.25 * 2**child.restarts)
                    due[name] = time.monotonic() + pause
                    self._notify(f"{name} ended with code {code}; starting it again in {pause:g} s")
                elif time.monotonic() >= due[name]:
                    del due[name]
                    child.restarts += 1
                    child.start()
                    changed()
            try:
                await asyncio.wait_for(stop.wait(), 0.2)
            except TimeoutError:
                continue

    async def stop(self, order: Sequence[Sequence[str]]) -> None:
        """Stop groups of children one after the other, each group at once; a prefix names its instances."""
        for group in order:
            members = [c for c in self.children if any(c.spec.name.split("-")[0] == name for name in group)]
            await asyncio.gather(*(child.stop() for child in members))

    def kill(self) -> None:
        """Last resort: SIGKILL what still runs."""
        for child in self.children:
            if child.pid and child.exit_code() is None:
                subprocess.run(["kill", "-9", str(child.pid)], check=False)
