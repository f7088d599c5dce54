"""Routes by the administrators' API: rollouts from start to rollback, conflicts, restored revisions, records."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import redis.asyncio as aioredis
from click.testing import Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.common.release import Manifest
from services.common.route_store import RouteStore
from services.common.routes import RouteTable
from services.usage.config import UsageConfig
from services.usage.seals import Signer
from services.usage.wiring import UsageApp
from tests.helpers import rollout_command
from tests.helpers.redis import RedisProcess
from tests.helpers.releases import evaluated, signed
from tests.helpers.waiting import until

ROOT = "root-token-for-tests"
SIGNER = Signer(Ed25519PrivateKey.generate())
FORCED = {"force": True, "why": "faster"}


@pytest.fixture
async def app(redis_server: RedisProcess, database_url: str) -> AsyncIterator[UsageApp]:
    config = UsageConfig(
        redis_url=redis_server.url,
        database_url=database_url,
        admin_token=ROOT,
        release_keys=SIGNER.public_key.hex(),
    )
    async with rollout_command.running_usage(config) as running:
        yield running


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
    started = await client.post("/rollouts/m/start", json={"candidate": "2", "baseline": "1", **FORCED})
    jumped = await client.post("/rollouts/m/promote", json={"percent": 100, **FORCED})
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
        ("root", "routes.change", "1", "forced without an evaluated release: faster"),
        ("root", "routes.change", "2", "forced without an evaluated release: faster"),
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


async def test_a_rollout_is_started_with_what_the_candidate_must_hold_and_nothing_else_is_taken(
    app: UsageApp, client: httpx.AsyncClient
) -> None:
    start = ("start", "m", "--to", "2", "--from", "1", "--force", "--why", "faster")
    refused = [
        await rollout(app, *start, "--hold", "ttft_ms"),
        await rollout(app, *start, "--hold", "speed=1"),
        await rollout(app, *start, "--hold", "error_rate=0"),
    ]
    begun = await rollout(app, *start, "--hold", "ttft_ms=300", "--hold", "error_rate=0.01", "--mirror", "0.1")
    table = (await client.get("/routes")).json()["table"]
    written = table["routes"][0]
    asked, shadow = written["rollout"]["criteria"], written["shadow"]
    written["rollout"]["criteria"] = {"attainment": 1}
    put = await client.put("/routes", json={"table": table})

    assert [answer.exit_code != 0 for answer in refused] == [True] * 3
    assert "name=number" in refused[0].output
    assert "no criterion `speed`" in refused[1].output
    assert "error_rate lies between" in refused[2].output
    assert begun.exit_code == 0, begun.output
    assert asked == {"ttft_ms": 300, "error_rate": 0.01}
    assert shadow == {"target": {"model": "m", "version": "2"}, "share": 0.1}
    assert (put.status_code, put.json()["error"]["param"]) == (400, "criteria")


async def test_what_was_changed_without_this_service_is_recorded_and_a_lost_table_comes_back(
    app: UsageApp, client: httpx.AsyncClient, redis_client: aioredis.Redis
) -> None:
    store = RouteStore(redis_client)
    await client.post("/rollouts/m/start", json={"candidate": "2", "baseline": "1", **FORCED})
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
    assert weights(await client.post("/rollouts/m/promote", json=FORCED)) == {"1": 95, "2": 5}


async def test_a_revision_that_a_promoted_replica_missed_comes_back_before_anything_is_changed(
    app: UsageApp, client: httpx.AsyncClient, redis_client: aioredis.Redis
) -> None:
    store = RouteStore(redis_client)
    await client.post("/rollouts/m/start", json={"candidate": "2", "baseline": "1", **FORCED})
    await client.post("/rollouts/m/rollback", json={"why": "3 % errors"})
    missed, rolled_back = await store.history()

    await redis_client.flushall()
    await store.put_back(missed)
    refused = await client.post("/rollouts/m/promote", json=FORCED)

    assert refused.status_code == 400
    assert await store.read() == rolled_back.table


async def test_a_version_goes_out_by_its_evaluated_release_or_by_force_with_a_reason(
    app: UsageApp, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    good = _release(tmp_path / "good.json", EVALUATED)
    bare = _release(tmp_path / "bare.json", dataclasses.replace(EVALUATED, evaluation=None))
    other = _release(tmp_path / "other.json", evaluated("3"))
    stranger = _release(tmp_path / "stranger.json", EVALUATED, Signer(Ed25519PrivateKey.generate()))
    start = ("start", "m", "--to", "2", "--from", "1")

    refused = [
        await rollout(app, *start),
        await rollout(app, *start, "--force"),
        await rollout(app, *start, "--release", bare),
        await rollout(app, *start, "--release", other, "--force", "--why", "in a hurry"),
        await rollout(app, *start, "--release", stranger, "--force", "--why", "in a hurry"),
        await rollout(app, *start, "--release", tmp_path / "none.json"),
    ]
    untouched = (await client.get("/routes/history")).json()
    forced = await rollout(app, *start, "--release", bare, "--force", "--why", "in a hurry")
    alone = await rollout(app, "promote", "m")
    shown = await rollout(app, "promote", "m", "--release", good)
    after = await rollout(app, "promote", "m")

    words = ("No release of m@2 was shown", "force needs a reason", "it has no evaluation", "of m@3, not of m@2")
    for answer, word in zip(refused, (*words, "not a trusted key", "cannot be read"), strict=True):
        assert answer.exit_code != 0, answer.output
        assert word in answer.output
    assert untouched.get("revisions", []) == []
    assert [answer.exit_code == 0 for answer in (forced, alone, shown, after)] == [True, False, True, True]
    history = (await client.get("/routes/history")).json()["revisions"]
    assert [entry["why"] for entry in history] == [
        "promoted", "promoted", "forced without an evaluated release: in a hurry",
    ]  # fmt: skip
    digests = [entry["table"]["routes"][0]["rollout"].get("release_digest", "") for entry in history]
    assert digests == [base64.b64encode(EVALUATED.digest).decode()] * 2 + [""]


EVALUATED = evaluated("2")


def _release(file: Path, manifest: Manifest, signer: Signer = SIGNER) -> Path:
    file.write_text(signed(manifest, signer).to_json())
    return file


async def rollout(app: UsageApp, *arguments: object) -> Result:
    return await rollout_command.rollout(app, ROOT, *arguments)
