"""All four services in one event loop over a real Redis: for tests that look inside (traces, metrics)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx

from services.gateway import wiring as gateway_wiring
from services.gateway.config import GatewayConfig
from services.router import wiring as router_wiring
from services.router.config import RouterConfig
from services.usage import wiring as usage_wiring
from services.usage.config import UsageConfig
from services.worker import wiring as worker_wiring
from services.worker.config import WorkerConfig
from services.worker.model_source import LoadedModel
from tests.helpers.waiting import WAIT_S, until

KEY = "mr_test_0123456789abcdef0123456789abcdef"
ADMIN_TOKEN = "mra_test_0123456789abcdef0123456789abcdef"


@dataclasses.dataclass(frozen=True)
class FourServices:
    """The running apps that tests look into, and an HTTP client of the gateway."""

    client: httpx.AsyncClient
    gateway: gateway_wiring.GatewayApp
    worker: worker_wiring.WorkerApp
    usage: usage_wiring.UsageApp
    router: router_wiring.RouterApp
    others: Sequence[worker_wiring.WorkerApp] = ()


@contextlib.asynccontextmanager
async def four_services(redis_url: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a gateway in front of an echo worker; everything is stopped at the end."""
    async with running_services(redis_url, folder) as services:
        yield services.client


@contextlib.asynccontextmanager
async def running_services(
    redis_url: str,
    folder: Path,
    *,
    worker_config: WorkerConfig | None = None,
    model: LoadedModel | None = None,
    others: Sequence[tuple[WorkerConfig, LoadedModel | None]] = (),
) -> AsyncIterator[FourServices]:
    """As `four_services`, with the apps; `model` is served instead of the worker's own, `others` are more workers."""
    worker_config = worker_config if worker_config is not None else WorkerConfig(redis_url=redis_url, model="echo")
    usage = usage_wiring.build(
        UsageConfig(
            redis_url=redis_url,
            database_url=f"sqlite:///{folder / 'ledger.sqlite3'}",
            data_dir=str(folder / "usage"),
            bootstrap_key=KEY,
            admin_token=ADMIN_TOKEN,
        )
    )
    worker = await asyncio.to_thread(worker_wiring.build, worker_config, model=model)
    more = [await asyncio.to_thread(worker_wiring.build, config, model=loaded) for config, loaded in others]
    router = router_wiring.build(RouterConfig(redis_url=redis_url))
    gateway = gateway_wiring.build(
        GatewayConfig(
            redis_url=redis_url,
            http_listen="127.0.0.1:0",
            grpc_listen="127.0.0.1:0",
            data_dir=str(folder / "gateway"),
            cache_secret="test",
        )
    )
    async with contextlib.AsyncExitStack() as stack:
        for app in (usage, worker, *more, router, gateway):
            await app.start()
            stack.push_async_callback(app.stop)
        url = f"http://127.0.0.1:{gateway.http_port}"
        headers = {"Authorization": f"Bearer {KEY}"}
        # As many connections at once as a test has streams; by itself the library takes a hundred.
        client = httpx.AsyncClient(base_url=url, headers=headers, timeout=WAIT_S, limits=httpx.Limits())
        await stack.enter_async_context(client)

        async def serves() -> bool:
            return (await client.get("/v1/models")).is_success and (await client.get("/readyz")).is_success

        await until(serves, every_s=0.02)
        yield FourServices(client, gateway, worker, usage, router, more)


async def ledger_row(client_id: str, database: Path) -> None:
    """Wait until the ledger has the row of this request."""
    import sqlite3

    def found() -> bool:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            row = connection.execute("SELECT 1 FROM ledger WHERE request_id = ?", (client_id,)).fetchone()
        return row is not None

    await until(found, every_s=0.05)
