"""`millrace down`: drain and stop the local stack."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Annotated

import typer

from cli.stack_state import home_dir, process_alive, read_state
from cli.up import fail


def down(
    timeout: Annotated[float, typer.Option(help="Seconds to wait for running streams before they are cut.")] = 60.0,
) -> None:
    """Stop the local stack: no new work, running streams finish, then every process ends."""
    state = read_state(home_dir())
    if state is None:
        print("No stack is running.")
        return
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while process_alive(state.pid):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGTERM)
            deadline = time.monotonic() + 10
            timeout, waited = float("inf"), timeout
            print(f"Streams were still running after {waited:g} s; cutting them.")
        time.sleep(0.1)
    left = [name for name, pid in state.processes.items() if process_alive(pid)]
    if left:
        raise fail(f"Still running: {', '.join(left)}.")
    print("Stopped.")
