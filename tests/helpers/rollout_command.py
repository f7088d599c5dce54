"""`millrace rollout` against a usage service in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from click.testing import Result
from typer.testing import CliRunner

from cli.main import app as millrace
from services.usage.config import UsageConfig
from services.usage.wiring import UsageApp, build


@contextlib.asynccontextmanager
async def running_usage(config: UsageConfig) -> AsyncIterator[UsageApp]:
    """The service, stopped at the end."""
    app = build(config)
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


async def rollout(app: UsageApp, token: str, *arguments: object) -> Result:
    """One command, in a thread of its own: it runs its own loop."""
    argv = ["rollout", *map(str, arguments), "--usage-address", app.address]
    env = {"MILLRACE_ADMIN_TOKEN": token, "COLUMNS": "160"}
    return await asyncio.to_thread(CliRunner().invoke, millrace, argv, env=env)
