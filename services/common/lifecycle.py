"""Start and end of a service process: signals, exit codes, instance ids, named crash points.

Exit 0 after a clean drain, 2 for a mistake of the operator (one plain sentence, no traceback).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import uvloop

from services.common.config import ConfigError

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class StartupError(Exception):
    """The service cannot start; `str()` is one plain sentence for the operator."""


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `main(stop)` until it returns; SIGTERM or SIGINT sets `stop`, a second one ends the process at once."""

    async def supervised() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if stop.is_set():
                os._exit(130)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        await main(stop)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(supervised())
    except (ConfigError, StartupError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel until every task is done; never raises what they raised.

    Once is not enough: libraries lose a cancellation that comes while they handle a timeout of their own.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=0.2)
        for task in done:
            if not task.cancelled():
                task.exception()


def new_ulid(now_s: float | None = None) -> str:
    """A ULID: 48 bits of milliseconds, 80 random bits, 26 characters that sort by time."""
    milliseconds = int((time.time() if now_s is None else now_s) * 1000)
    value = (milliseconds << 80) | secrets.randbits(80)
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5))


def new_instance_id(room: str) -> str:
    """Identity of one incarnation of a process, e.g. `worker-01J…`."""
    return f"{room}-{new_ulid()}"


def crash_point(name: str) -> None:
    """Die here, without clean-up, when MILLRACE_CRASH_AT names this point (fault tests only)."""
    if os.environ.get("MILLRACE_CRASH_AT") == name:
        os._exit(137)
