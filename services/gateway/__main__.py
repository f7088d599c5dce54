"""Entry point of the gateway process: `python -m services.gateway [--print-config]`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys

from services.common import lifecycle
from services.common.config import ConfigError, describe, env_name, load
from services.common.telemetry import setup_telemetry
from services.gateway.config import GatewayConfig
from services.gateway.wiring import build


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Run a gateway until `stop` is set, then drain it. Raises StartupError."""
    instance = lifecycle.new_instance_id("gateway")
    telemetry = setup_telemetry(
        "gateway", instance=instance, log_level=config.log_level, otlp_endpoint=config.otlp_endpoint or None
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
    settings = "\n".join(f"  {env_name(f.name):28} {f.metadata['help']}" for f in dataclasses.fields(GatewayConfig))
    parser = argparse.ArgumentParser(
        prog="python -m services.gateway",
        description="A Millrace gateway: the OpenAI HTTP API and the gRPC API.",
        epilog=f"settings, from the environment:\n{settings}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--print-config", action="store_true", help="show the effective settings and exit")
    arguments = parser.parse_args()
    try:
        config = load(GatewayConfig)
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
