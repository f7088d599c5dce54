"""Usage by HTTP: a tenant's key sees its own rows only, in every text format, and goes on by cursor."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.usage.accounts import KeySpec, TenantSpec
from services.usage.config import UsageConfig
from services.usage.store import Store
from services.usage.wiring import UsageApp, build
from tests.helpers.redis import RedisProcess
from tests.helpers.usage import insert, make_entry

ROOT = "root-token-for-tests"


@pytest.fixture
async def app(store: Store, database_url: str, redis_server: RedisProcess, tmp_path: Path) -> AsyncIterator[UsageApp]:
    config = UsageConfig(
        redis_url=redis_server.url, database_url=database_url, data_dir=str(tmp_path / "data"), admin_token=ROOT
    )
    running = build(config)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def client(app: UsageApp, store: Store) -> AsyncIterator[httpx.AsyncClient]:
    """Of a key of acme that may read usage; the ledger has rows of acme and of zeta."""
    insert(store, [make_entry(f"r{number}", ("acme", "zeta")[number % 2]) for number in range(1_010)])
    await app.accounts.create_tenant(TenantSpec("acme"))
    _, secret = await app.accounts.create_key(KeySpec("acme", scopes=("usage:read",)))
    headers = {"authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.admin_port}", headers=headers) as opened:
        yield opened


async def test_a_tenants_key_reads_its_own_usage_and_no_one_elses(client: httpx.AsyncClient, store: Store) -> None:
    mine = (await client.get("/v1/usage")).json()["groups"]
    # Whatever it asks for.
    asked = (await client.get("/v1/usage", params={"tenant": "zeta", "group_by": ["tenant", "day"]})).json()["groups"]
    root = {"authorization": f"Bearer {ROOT}"}
    all_of_them = (await client.get("/v1/usage", headers=root)).json()["groups"]
    exported = await client.get("/v1/usage/export", params={"tenant": "zeta"})
    insert(store, [make_entry("late", "acme"), make_entry("other", "zeta")])
    rest = await client.get("/v1/usage/export", params={"cursor": exported.headers["x-millrace-next-cursor"]})

    assert [group["request_count"] for group in mine] == ["505"]
    assert [(group["keys"], group["request_count"]) for group in asked] == [(["acme", "2026-03-01"], "505")]
    assert [group["request_count"] for group in all_of_them] == ["1010"]
    rows = [json.loads(line) for line in exported.text.splitlines()]
    assert [row["request_id"] for row in rows] == [f"r{number}" for number in range(0, 1_010, 2)]
    assert {row["tenant"] for row in rows} == {"acme"}
    assert [json.loads(line)["request_id"] for line in rest.text.splitlines()] == ["late"]


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/usage?group_by=colour", 400, "group_by"),
        ("/v1/usage?colour=blue", 400, None),
        ("/v1/usage?start_time=yesterday", 400, None),
        ("/v1/usage/export?format=xml", 400, "format"),
        ("/v1/usage/export?cursor=nonsense", 400, "cursor"),
    ],
)
async def test_what_cannot_be_read_is_refused_before_the_first_row(
    client: httpx.AsyncClient, path: str, status: int, param: str | None
) -> None:
    refused = await client.get(path)

    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


async def test_without_a_key_or_with_one_of_another_scope_nothing_is_read(
    app: UsageApp, client: httpx.AsyncClient
) -> None:
    _, secret = await app.accounts.create_key(KeySpec("acme"))

    for path in ("/v1/usage", "/v1/usage/export"):
        for sent, status in (("", 401), ("Bearer wrong", 401), (f"Bearer {secret}", 403)):
            assert (await client.get(path, headers={"authorization": sent})).status_code == status


async def test_csv_by_http_has_its_header_line(client: httpx.AsyncClient) -> None:
    got = await client.get("/v1/usage/export", params={"format": "csv", "end_time": "2020-01-01T00:00:00Z"})

    assert got.headers["content-type"].startswith("text/csv")
    assert got.text.startswith("row_id,request_id,tenant,")
    assert len(got.text.splitlines()) == 1
