"""Two gateways behind one door: one comes, one leaves, and no request on any connection is refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from services.common.http_server import listen
from services.gateway.config import GatewayConfig
from services.gateway.wiring import GatewayApp, build
from tests.helpers.four_services import KEY, running_services
from tests.helpers.redis import RedisProcess, free_port

pytestmark = pytest.mark.fault

BODY = {"model": "echo", "prompt": "hello", "max_tokens": 4}


async def test_a_gateway_that_leaves_its_door_to_another_refuses_nobody_and_the_last_one_does(
    redis_server: RedisProcess, tmp_path: Path
) -> None:
    door, grpc = listen("127.0.0.1:0"), f"shared:127.0.0.1:{free_port()}"

    def gateway(name: str) -> GatewayApp:
        return build(
            GatewayConfig(
                redis_url=redis_server.url,
                http_listen=f"fd:{os.dup(door.fileno())}",
                grpc_listen=grpc,
                advertise=f"unix:{tmp_path}/{name}.sock",
                data_dir=str(tmp_path / name),
                cache_secret="test",
            )
        )

    url, headers = f"http://127.0.0.1:{door.getsockname()[1]}", {"Authorization": f"Bearer {KEY}"}
    async with running_services(redis_server.url, tmp_path) as services:
        old, new = gateway("old"), gateway("new")
        await old.start()
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
            first = await client.post("/v1/completions", json=BODY)
            await new.start()
            leaving = asyncio.create_task(old.drain(30))
            kept = await client.post("/v1/completions", json=BODY)
        await leaving
        await old.stop()
        # The one of the rig has a door of its own: it goes, as far as others know.
        await services.gateway.back.watchdogs.close()
        await services.gateway.back.parts.store.deregister_gateway(services.gateway.back.parts.instance)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
            elsewhere = await client.post("/v1/completions", json=BODY)
            await new.drain(30)
            refused = await client.post("/v1/completions", json=BODY)
        await new.stop()
    door.close()

    assert [answer.status_code for answer in (first, kept, elsewhere)] == [200] * 3
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "DRAINING")
