"""Entry point of the router process: `python -m services.router [--print-config]`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys

from services.common import lifecycle
from services.common.config import ConfigError, describe, env_name, load
from services.common.telemetry import setup_telemetry
from services.router.config import RouterConfig
from services.router.wiring import build


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Run a router until `stop` is set, then drain it. Raises StartupError."""
    instance = lifecycle.new_instance_id("router")
    telemetry = setup_telemetry(
        "router", instance=instance, log_level=config.log_level, otlp_endpoint=config.otlp_endpoint or None
    )
    try:
        app = build(config, instance=instance)
        await app.start()
        try:
            await stop.wait()
            await app.drain(config.drain_grace_s)
        finally:
            await app.stop()
    finally:
        telemetry.shutdown()


def main() -> int:
    """Exit code of the process: 0 after a drain, 2 for a mistake of the operator."""
    settings = "\n".join(f"  {env_name(f.name):26} {f.metadata['help']}" for f in dataclasses.fields(RouterConfig))
    parser = argparse.ArgumentParser(
        prog="python -m services.router",
        description="A Millrace router: claims admitted requests for workers that have room.",
        epilog=f"settings, from the environment:\n{settings}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--print-config", action="store_true", help="show the effective settings and exit")
    arguments = parser.parse_args()
    try:
        config = load(RouterConfig)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if arguments.print_config:
        for name, value in describe(config).items():
            sys.stdout.write(f"{name}={value}\n")
        return 0
    return lifecycle.run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    sys.exit(main())
