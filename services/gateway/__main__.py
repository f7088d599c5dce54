"""Entry point of the gateway process: `python -m services.gateway [--print-config]`."""

from __future__ import annotations

import sys

from services.common import entry_point
from services.gateway.config import GatewayConfig
from services.gateway.wiring import GatewayApp, build


async def _build(config: GatewayConfig, instance: str) -> GatewayApp:
    return build(config, instance=instance)


if __name__ == "__main__":
    sys.exit(
        entry_point.main("gateway", "A Millrace gateway: the OpenAI HTTP API and the gRPC API.", GatewayConfig, _build)
    )
