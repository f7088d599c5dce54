"""The stack's half of `millrace upgrade`: one process after the other is replaced by a new one that came up beside it.

Runs beside the supervisor, and is told by a socket what to do: one JSON line asks, one a step answers. Whoever hangs up
ends the upgrade after the process under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from cli.stack import StackError, engine_knobs, grace_s
from cli.supervisor import Child, Supervisor
from services.common.config import env_name
from services.common.lifecycle import end_tasks
from services.worker.config import WorkerRole

# What stands behind comes first: a new gateway finds everything in place.
ORDER = ("usage", "worker", "router", "gateway")
_LOOK_S = 0.1
_LINE_BYTES = 65_536


class UpgradeError(Exception):
    """The process `name` could not be replaced, or "" for none at all; `str()` is one sentence for the operator."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What happened to a process: `stage` is starting, draining, done or failed; `seconds` since it began."""

    name: str
    stage: str
    seconds: float = 0.0
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """Which services to replace, each with variables over those it has, and how long a process may take to be ready."""

    services: Mapping[str, Mapping[str, str]]
    timeout_s: float


class Rolling:
    """Replaces the processes of one supervisor. `does_as` tells whether a new process does all that the old one does;
    `changed` is called when process ids have."""

    def __init__(
        self, supervisor: Supervisor, does_as: Callable[[Child, Child], Awaitable[bool]], changed: Callable[[], None]
    ) -> None:
        self._supervisor = supervisor
        self._does_as = does_as
        self._changed = changed
        self._running: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def listening(self, path: str) -> AsyncIterator[None]:
        """Takes orders at this socket, in a folder of this user. An upgrade under way at the end is broken off."""
        server = await asyncio.start_unix_server(self._serve, path, limit=_LINE_BYTES)
        try:
            yield
        finally:
            server.close()
            if self._running is not None:
                await end_tasks([self._running])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def tell(step: Step) -> None:
            writer.write(json.dumps(dataclasses.asdict(step)).encode() + b"\n")

        try:
            order = _order(await reader.readline())
            if self._running is not None:
                raise UpgradeError("Another upgrade is under way.")
            self._running = asyncio.create_task(self._replace_all(order, tell, reader.at_eof), name="upgrade")
            try:
                await self._running
            finally:
                self._running = None
        except UpgradeError as error:
            tell(Step(error.name, "failed", text=str(error)))
        finally:
            writer.close()

    async def _replace_all(self, order: Order, tell: Callable[[Step], None], hung_up: Callable[[], bool]) -> None:
        for service in (s for s in ORDER if s in order.services):
            for old in [child for child in self._supervisor.children if child.spec.service == service]:
                await self._replace(old, order, tell)
                if hung_up():
                    return

    async def _replace(self, old: Child, order: Order, tell: Callable[[Step], None]) -> None:
        name, began = old.spec.name, time.monotonic()
        tell(Step(name, "starting"))
        env = {**old.spec.env, **_settings(old, order)}
        new = old.successor(env, grace_s(env))
        self._supervisor.passing.add(new)
        try:
            new.start()
            async with asyncio.timeout(order.timeout_s):
                await self._ready(new, old)
        except BaseException as error:
            await new.stop()
            self._supervisor.passing.discard(new)
            if isinstance(error, TimeoutError):
                raise UpgradeError(f"The new {name} was not ready within {order.timeout_s:g} s.", name) from None
            raise
        self._supervisor.replace(old, new)
        self._changed()
        tell(Step(name, "draining", time.monotonic() - began))
        await old.stop()
        self._supervisor.passing.discard(old)
        tell(Step(name, "done", time.monotonic() - began))

    async def _ready(self, new: Child, old: Child) -> None:
        """Until `new` does all that `old` does. Raises UpgradeError when its process ends before."""
        while not await self._does_as(new, old):
            if (code := new.exit_code()) is not None:
                name = new.spec.name
                raise UpgradeError(f"The new {name} ended with code {code}: {new.last_error()}", name)
            await asyncio.sleep(_LOOK_S)


def _order(line: bytes) -> Order:
    try:
        return Order(**json.loads(line))
    except (TypeError, ValueError):
        raise UpgradeError("The stack was started by another version of `millrace up`: restart it.") from None


def _settings(old: Child, order: Order) -> Mapping[str, str]:
    """What a successor is told anew. Knobs of the engine do not change the worker's role."""
    settings, variable = order.services[old.spec.service], env_name("engine")
    if variable not in settings:
        return settings
    kind = old.spec.name.split("-")[1:-1]
    try:
        knobs = engine_knobs(settings[variable], WorkerRole(kind[0]) if kind else WorkerRole.AGGREGATED)
    except StackError as error:
        raise UpgradeError(str(error), old.spec.name) from error
    return {**settings, variable: knobs}
