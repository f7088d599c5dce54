"""Entry point of the router process: `python -m services.router [--print-config]`."""

from __future__ import annotations

import sys

from services.common import entry_point
from services.router.config import RouterConfig
from services.router.wiring import RouterApp, build


async def _build(config: RouterConfig, instance: str) -> RouterApp:
    return build(config, instance=instance)


if __name__ == "__main__":
    sys.exit(
        entry_point.main(
            "router", "A Millrace router: claims admitted requests for workers that have room.", RouterConfig, _build
        )
    )
