"""The administrators' HTTP API: deny by default, the same acts as by gRPC, plain refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from services.usage.admin_http import MAX_BODY_BYTES, create_admin_app
from services.usage.config import UsageConfig
from services.usage.wiring import UsageApp, build
from tests.helpers.redis import RedisProcess

ROOT = "root-token-for-tests"


@pytest.fixture
async def app(tmp_path: Path, redis_server: RedisProcess) -> AsyncIterator[UsageApp]:
    url = f"sqlite:///{tmp_path}/usage.sqlite3"
    running = build(UsageConfig(redis_url=redis_server.url, database_url=url, admin_token=ROOT))
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def client(app: UsageApp) -> AsyncIterator[httpx.AsyncClient]:
    base = f"http://127.0.0.1:{app.admin_port}/admin/v1"
    async with httpx.AsyncClient(base_url=base, headers={"authorization": f"Bearer {ROOT}"}) as opened:
        yield opened


async def test_every_route_and_every_other_path_asks_for_the_key_of_an_administrator(
    app: UsageApp, client: httpx.AsyncClient
) -> None:
    await client.post("/tenants", json={"tenant": "acme"})
    api_key = (await client.post("/keys", json={"tenant": "acme", "scopes": ["inference", "usage:read"]})).json()
    routes = create_admin_app(app.account_service, app.route_service, app.admins).routes
    paths = [(method, route.path) for route in routes if isinstance(route, Route) for method in route.methods or ()]
    assert len(paths) >= 23

    for method, path in [*paths, ("GET", "/"), ("GET", "/admin/v1/nothing"), ("DELETE", "/admin/v1/tenants")]:
        url = str(client.base_url.copy_with(path=path.format(tenant="acme", key_id="k", alias="m")))
        for sent, status in (("", 401), ("Bearer wrong", 401), (f"Bearer {api_key['secret']}", 403)):
            got = await client.request(method, url, content=b"{" * 100, headers={"authorization": sent})
            assert got.status_code == status, (method, path)


async def test_a_tenant_its_keys_and_their_records_by_http(client: httpx.AsyncClient) -> None:
    limits = {"requests_per_minute": 5, "length_caps": {"*": {"output_token_count": 9}}}
    made = await client.post("/tenants", json={"tenant": "acme", "limits": limits})
    project = await client.post("/tenants/acme/projects", json={"project": "search"})
    key = await client.post("/keys", json={"tenant": "acme", "project": "search"})
    key_id = key.json()["key"]["key_id"]
    changed = await client.patch(f"/keys/{key_id}", json={"limits": {"daily_budget_token_count": "70"}})
    rotated = await client.post(f"/keys/{key_id}/rotate", json={"overlap": "60s"})
    revoked = await client.post(f"/keys/{rotated.json()['key']['key_id']}/revoke")
    admin = await client.post("/admin-keys", json={"name": "ada"})
    updated = await client.patch(
        "/tenants/acme", json={"weight": 2}, headers={"authorization": f"Bearer {admin.json()['secret']}"}
    )

    for answer in (made, project, key, changed, rotated, revoked, admin, updated):
        assert answer.status_code == 200, answer.text
    assert made.json()["tenant"]["limits"] == limits
    assert changed.json()["key"]["limits"] == {"daily_budget_token_count": "70"}
    assert updated.json()["tenant"] | {"create_time": ""} == {
        "tenant": "acme", "limits": limits, "weight": 2.0, "create_time": "",
    }  # fmt: skip
    records = (await client.get("/audit", params={"tenant": "acme"})).json()["records"]
    assert [(record["actor"], record["action"]) for record in records] == [
        ("root", "tenant.create"), ("root", "project.create"), ("root", "key.create"), ("root", "key.update"),
        ("root", "key.create"), ("root", "key.update"), ("root", "key.revoke"), ("ada", "tenant.update"),
    ]  # fmt: skip
    listed = (await client.get("/keys", params={"tenant": "acme"})).json()["keys"]
    assert {key["key_id"] for key in listed} == {key_id, rotated.json()["key"]["key_id"]}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b"\xff", 400, None),
        (b'{"tenant": "x", "colour": 1}', 400, None),
        (b'{"tenant": 5}', 400, None),
        (b'{"tenant": "a b"}', 400, "tenant"),
        (b'{"tenant": "x", "limits": {"tokens_per_minute": "0"}}', 400, "tokens_per_minute"),
        (b'{"tenant": "x", "weight": "NaN"}', 400, "weight"),
        (b"[" * 30_000, 400, None),
        (b" " * MAX_BODY_BYTES + b"{}", 413, None),
        (b'{"tenant": "edge"}'.ljust(MAX_BODY_BYTES), 200, None),
    ],
)
async def test_a_bad_body_is_refused_in_one_sentence(
    client: httpx.AsyncClient, body: bytes, status: int, param: str | None
) -> None:
    got = await client.post("/tenants", content=body)

    assert got.status_code == status
    if status != 200:
        error = got.json()["error"]
        assert error["param"] == param
        assert got.headers["x-millrace-reason"] == error["code"]
        assert "Traceback" not in error["message"]


async def test_what_is_not_there_is_404(client: httpx.AsyncClient) -> None:
    assert (await client.get("/nothing")).status_code == 404
    assert (await client.post("/keys/nothing/revoke")).json()["error"]["param"] == "key_id"
    assert (await client.patch("/tenants/nobody", json={})).status_code == 404
