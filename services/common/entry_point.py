"""The command line and the frame of every service process: settings, telemetry, start, drain, stop.

A service gives its config class, a description and how to build its app; nothing here knows any service.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from services.common import lifecycle
from services.common.config import ConfigError, describe, env_name, load
from services.common.telemetry import setup_telemetry


class ServiceConfig(Protocol):
    """Settings that every service has."""

    @property
    def log_level(self) -> str: ...

    @property
    def otlp_endpoint(self) -> str: ...

    @property
    def drain_grace_s(self) -> float: ...


class App(Protocol):
    """A built service."""

    async def start(self) -> None: ...

    async def drain(self, grace_s: float) -> None: ...

    async def stop(self) -> None: ...


ConfigT = TypeVar("ConfigT", bound=ServiceConfig)
Build = Callable[[ConfigT, str], Awaitable[App]]


async def serve(room: str, config: ConfigT, build: Build[ConfigT], stop: asyncio.Event) -> None:
    """Run the app that `build(config, instance)` makes until `stop` is set, then drain it. Raises StartupError."""
    instance = lifecycle.new_instance_id(room)
    telemetry = setup_telemetry(
        room, instance=instance, log_level=config.log_level, otlp_endpoint=config.otlp_endpoint or None
    )
    try:
        app = await build(config, instance)
        if stop.is_set():
            return
        await app.start()
        # What the start made stays for good: a full collection in the middle of a step need not walk over it.
        gc.collect()
        gc.freeze()
        # A request's objects go with it by their counts; a search for cycles each 700 was a tenth of a busy loop.
        gc.set_threshold(20_000, 20, 20)
        try:
            await stop.wait()
            await app.drain(config.drain_grace_s)
        finally:
            await app.stop()
    finally:
        telemetry.shutdown()


def main(room: str, description: str, config_class: type[ConfigT], build: Build[ConfigT]) -> int:
    """Exit code of `python -m services.<room>`: 0 after a drain, 2 for a mistake of the operator."""
    fields = dataclasses.fields(config_class)  # type: ignore[arg-type]
    settings = "\n".join(f"  {env_name(f.name):28} {f.metadata['help']}" for f in fields)
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{room}",
        description=description,
        epilog=f"settings, from the environment:\n{settings}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--print-config", action="store_true", help="show the effective settings and exit")
    arguments = parser.parse_args()
    try:
        config = load(config_class)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if arguments.print_config:
        for name, value in describe(config).items():
            sys.stdout.write(f"{name}={value}\n")
        return 0
    return lifecycle.run(lambda stop: serve(room, config, build, stop))
