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
    """One process: `name` for people, `grace_s` seconds between SIGTERM and SIGKILL, open files `fds` that it is given.

    `socket` is where its own address lies, `<socket>.<generation>.sock`; the variable `address_name` tells it.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    grace_s: float = 35.0
    socket: str = ""
    address_name: str = ""
    fds: Sequence[int] = ()

    @property
    def service(self) -> str:
        """`worker` of `worker-1`."""
        return self.name.partition("-")[0]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One supervised process; its output goes to `<log_dir>/<name>.log`. Its successor is of the next generation."""

    def __init__(self, spec: ChildSpec, log_dir: Path, generation: int = 1) -> None:
        self.spec = spec
        self.generation = generation
        self.restarts = 0
        self._log_path = log_dir / f"{spec.name}.log"
        self._log_start = 0
        self._started_at = 0.0
        self._told_to_end = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def address(self) -> str:
        """Where this very process answers over gRPC; empty for one that does not."""
        return f"unix:{self.spec.socket}.{self.generation}.sock" if self.spec.socket else ""

    def successor(self, env: Mapping[str, str], grace_s: float) -> Child:
        """Who shall take its place, not started yet."""
        spec = dataclasses.replace(self.spec, env=env, grace_s=grace_s)
        return Child(spec, self._log_path.parent, self.generation + 1)

    def publish(self) -> None:
        """Let the name that clients know, `<socket>.sock`, lead to this process."""
        if self.spec.socket:
            known, made = Path(f"{self.spec.socket}.sock"), Path(f"{self.spec.socket}.next")
            made.unlink(missing_ok=True)
            made.symlink_to(Path(self.address).name)
            made.replace(known)

    def start(self) -> None:
        """Start the process in a session of its own, so that a terminal's Ctrl-C reaches the supervisor only."""
        own = {self.spec.address_name: self.address} if self.address else {}
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                list(self.spec.argv),
                env={**self.spec.env, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=self.spec.fds,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one prctl call, no Python state touched
            )
        self._started_at = time.monotonic()
        self._told_to_end = False

    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def last_error(self) -> str:
        """The last `error: …` line of its log since it started, else its last line."""
        with self._log_path.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["no output"])[-1]

    def ran_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started_at

    async def stop(self) -> None:
        """SIGTERM, wait for the grace, then SIGKILL. A second call waits too: told twice, a service ends at once."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        if not self._told_to_end:
            self._told_to_end = True
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, self.spec.grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


class Supervisor:
    """All children of one stack, in start order. `passing` are those that come up to take a child's place, and those
    that leave theirs: nobody starts them again."""

    def __init__(self, specs: Sequence[ChildSpec], log_dir: Path, notify: Callable[[str], None]) -> None:
        self.children = [Child(spec, log_dir) for spec in specs]
        self.passing: set[Child] = set()
        self._notify = notify

    def start(self) -> None:
        """Start every child."""
        for child in self.children:
            child.publish()
            child.start()

    def replace(self, old: Child, new: Child) -> None:
        """From now on `new`, which came up beside it, stands in its place; `old` is to be stopped."""
        new.publish()
        self.children[self.children.index(old)] = new
        self.passing.remove(new)
        self.passing.add(old)

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
            members = [c for c in (*self.children, *self.passing) if c.spec.service in group]
            await asyncio.gather(*(child.stop() for child in members))

    def kill(self) -> None:
        """Last resort: SIGKILL what still runs."""
        for child in (*self.children, *self.passing):
            if child.pid and child.exit_code() is None:
                subprocess.run(["kill", "-9", str(child.pid)], check=False)
