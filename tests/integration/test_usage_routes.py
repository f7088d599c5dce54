"""Routes by the administrators' API: rollouts from start to rollback, conflicts, restored revisions, records."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import redis.asyncio as aioredis

from services.common.route_store import RouteStore
from services.common.routes import RouteTable
from services.usage.config import UsageConfig
from services.usage.wiring import UsageApp, build
from tests.helpers.fake_worker import until
from tests.helpers.redis import RedisProcess

ROOT = "root-token-for-tests"


@pytest.fixture
async def app(redis_server: RedisProcess, database_url: str) -> AsyncIterator[UsageApp]:
    running = build(UsageConfig(redis_url=redis_server.url, database_url=database_url, admin_token=ROOT))
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def client(app: UsageApp) -> AsyncIterator[httpx.AsyncClient]:
    base = f"http://127.0.0.1:{app.admin_port}/admin/v1"
    async with httpx.AsyncClient(base_url=base, headers={"authorization": f"Bearer {ROOT}"}) as opened:
        yield opened


def weights(answer: httpx.Response) -> dict[str, int]:
    assert answer.status_code == 200, answer.text
    [route] = answer.json()["table"]["routes"]
    return {target["target"]["version"]: target.get("weight", 0) for target in route["targets"]}


async def test_a_rollout_from_start_to_rollback_leaves_a_record_of_every_change(client: httpx.AsyncClient) -> None:
    started = await client.post("/rollouts/m/start", json={"candidate": "2", "baseline": "1", "why": "faster"})
    jumped = await client.post("/rollouts/m/promote", json={"percent": 100})
    back = await client.post("/rollouts/m/rollback", json={"why": "3 % errors"})
    again = await client.post("/rollouts/m/rollback")

    assert [weights(answer) for answer in (started, jumped, back)] == [
        {"1": 99, "2": 1},
        {"1": 0, "2": 100},
        {"1": 100, "2": 0},
    ]
    assert back.json()["table"]["withdrawn"] == [{"model": "m", "version": "2"}]
    assert again.status_code == 400
    acts = (await client.get("/audit")).json()["records"]
    assert [(act["actor"], act["action"], act["subject"], act["after"]["why"]) for act in acts] == [
        ("root", "routes.change", "1", "faster"),
        ("root", "routes.change", "2", "promoted"),
        ("root", "routes.change", "3", "3 % errors"),
    ]
    assert acts[1]["before"] == acts[0]["after"]
    history = (await client.get("/routes/history")).json()["revisions"]
    assert [(entry["actor"], entry["table"]["revision"]) for entry in history] == [
        ("root", "3"), ("root", "2"), ("root", "1"),
    ]  # fmt: skip


async def test_a_table_made_from_an_old_revision_is_refused_and_an_old_revision_can_be_restored(
    client: httpx.AsyncClient,
) -> None:
    table = (await client.get("/routes")).json()["table"]
    table["routes"] = [{"alias": "m", "targets": [{"target": {"model": "m", "version": "1"}, "weight": 1}]}]
    first = await client.put("/routes", json={"table": table})
    conflict = await client.put("/routes", json={"table": table})
    emptied = await client.put("/routes", json={"table": {"revision": "1"}})
    restored = await client.post("/routes/restore", json={"revision": "1"})
    missing = await client.post("/routes/restore", json={"revision": "9"})

    assert weights(first) == weights(restored) == {"1": 1}
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "REVISION_CONFLICT")
    assert emptied.json()["table"] == {"revision": "2"} | {
        name: [] for name in emptied.json()["table"] if name != "revision"
    }
    assert restored.json()["table"]["revision"] == "3"
    assert missing.status_code == 404


async def test_what_was_changed_without_this_service_is_recorded_and_a_lost_table_comes_back(
    app: UsageApp, client: httpx.AsyncClient, redis_client: aioredis.Redis
) -> None:
    store = RouteStore(redis_client)
    await client.post("/rollouts/m/start", json={"candidate": "2", "baseline": "1"})
    stands = await store.read() or RouteTable()
    changed = await store.replace(stands, who="canary", why="looks good")

    async def recorded() -> bool:
        acts = (await client.get("/audit")).json()["records"]
        return [act["actor"] for act in acts] == ["root", "canary"]

    async def back() -> bool:
        return await store.read() == changed

    await until(recorded)
    await redis_client.flushall()
    await until(back)
    assert weights(await client.post("/rollouts/m/promote")) == {"1": 95, "2": 5}
