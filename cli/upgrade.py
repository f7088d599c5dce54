"""`millrace upgrade`: new processes for the running stack, one after the other, while it serves."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from cli.rolling import ORDER, Order, Step
from cli.stack import StackError, service_settings
from cli.stack_state import StackState, home_dir, read_state
from cli.up import fail


def upgrade(
    services: Annotated[
        list[str] | None, typer.Argument(metavar="SERVICE", help="usage, worker, router, gateway; else all.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting of the new processes; once for each."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a new process has to be ready.")] = 300.0,
) -> None:
    """Replace the processes of the running stack one by one; no request fails.

    A new process comes up beside the old one: a worker loads its model and makes
    a first token, a gateway reaches every worker. Once it is ready it takes over,
    and the old one ends with its last answer, after MILLRACE_DRAIN_GRACE_S (30)
    seconds at the latest. A worker needs memory for its model twice meanwhile.

    If a new process is not ready it is ended, the old one serves on, and nothing
    after it is touched (exit code 2). Ctrl-C stops after the process under way.

    New is what is installed now: install first, then upgrade. Redis and
    `millrace up` itself are not replaced.

    Examples:

      millrace upgrade

      millrace upgrade worker --set engine=max_num_seqs=32

      millrace upgrade gateway router --set log_level=debug
    """
    state = read_state(home_dir())
    if state is None or not state.control:
        raise fail("No stack is running that could be upgraded; `millrace up` starts one.")
    try:
        chosen = _by_service(services or ORDER, settings or ())
    except StackError as error:
        raise fail(str(error)) from error
    asyncio.run(_follow(state, Order(chosen, timeout)))


def _by_service(services: Sequence[str], settings: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """The variables of each service. Raises StackError."""
    for name in services:
        if name not in ORDER:
            raise StackError(f"{name} is not a service that can be upgraded: those are {', '.join(ORDER)}.")
    return service_settings(services, settings)


async def _follow(state: StackState, order: Order) -> None:
    """Give the order and tell what happens. Raises typer.Exit unless every process was replaced."""
    left = [name for name in state.processes if name.partition("-")[0] in order.services]
    try:
        reader, writer = await asyncio.open_unix_connection(state.control)
    except OSError:
        raise fail("The stack takes no orders: it is starting or stopping.") from None
    writer.write(json.dumps(dataclasses.asdict(order)).encode() + b"\n")
    try:
        async for line in reader:
            step = Step(**json.loads(line))
            if step.stage == "failed":
                raise fail(f"{step.text} {_unchanged(left)}" if step.name else step.text)
            if step.stage == "draining":
                left.remove(step.name)
            print(_TOLD[step.stage].format(step=step), flush=True)
    finally:
        writer.close()
    if left:
        raise fail(f"The stack stopped. {_unchanged(left)}")


def _unchanged(names: Sequence[str]) -> str:
    return f"Not replaced: {', '.join(names)}."


_TOLD = {
    "starting": "{step.name}: starting a new process beside the old one",
    "draining": "{step.name}: ready after {step.seconds:.1f} s, took over; the old process finishes its answers",
    "done": "{step.name}: replaced in {step.seconds:.1f} s",
}
