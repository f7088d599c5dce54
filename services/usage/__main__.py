"""Entry point of the usage process: `python -m services.usage [--print-config]`."""

from __future__ import annotations

import sys

from services.common import entry_point
from services.usage.config import UsageConfig
from services.usage.wiring import UsageApp, build


async def _build(config: UsageConfig, instance: str) -> UsageApp:
    return build(config)


if __name__ == "__main__":
    sys.exit(
        entry_point.main(
            "usage", "The Millrace usage service: the exactly-once token ledger, tenants and keys.", UsageConfig, _build
        )
    )
