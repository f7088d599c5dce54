"""Entry point of the usage process: `python -m services.usage [--print-config]`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys

from services.common import lifecycle
from services.common.config import ConfigError, describe, env_name, load
from services.common.telemetry import setup_telemetry
from services.usage.config import UsageConfig
from services.usage.wiring import build

DRAIN_GRACE_S = 5.0


async def serve(config: UsageConfig, stop: asyncio.Event) -> None:
    """Run the usage service until `stop` is set, then drain it. Raises StartupError."""
    instance = lifecycle.new_instance_id("usage")
    telemetry = setup_telemetry(
        "usage", instance=instance, log_level=config.log_level, otlp_endpoint=config.otlp_endpoint or None
    )
    try:
        app = build(config)
        await app.start()
        try:
            await stop.wait()
            await app.drain(DRAIN_GRACE_S)
        finally:
            await app.stop()
    finally:
        telemetry.shutdown()


def main() -> int:
    """Exit code of the process: 0 after a drain, 2 for a mistake of the operator."""
    settings = "\n".join(f"  {env_name(f.name):26} {f.metadata['help']}" for f in dataclasses.fields(UsageConfig))
    parser = argparse.ArgumentParser(
        prog="python -m services.usage",
        description="The Millrace usage service: the exactly-once token ledger, tenants and keys.",
        epilog=f"settings, from the environment:\n{settings}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--print-config", action="store_true", help="show the effective settings and exit")
    arguments = parser.parse_args()
    try:
        config = load(UsageConfig)
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
