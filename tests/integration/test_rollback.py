"""Two versions of a model: rolled forward and back, withdrawn with work in the queue, with a Redis that lost all."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import redis.asyncio as aioredis

from services.common.admission_scripts import slot_key
from services.worker.model_source import ECHO_VOCABULARY
from tests.helpers.redis import RedisProcess
from tests.helpers.transcripts import Transcript
from tests.helpers.two_versions import (
    TOKENS,
    V2,
    Versions,
    complete,
    pair_tokenizer,
    roll_forward_and_back,
    second_version,
    versions,
)
from tests.helpers.waiting import until
from tests.helpers.worker import Gate


async def test_under_load_a_version_is_rolled_out_and_back_twice_and_every_token_is_accounted_to_its_version(
    redis_server: RedisProcess, redis_client: aioredis.Redis, tmp_path: Path
) -> None:
    async with versions(redis_server.url, redis_client, tmp_path) as rig:
        await roll_forward_and_back(rig, clients=8, tokens=TOKENS)


async def gone(redis: aioredis.Redis, name: str) -> bool:
    return not await redis.exists(name)


async def withdrawn_with_a_queue(rig: Versions, gate: Gate) -> tuple[dict[str, sqlite3.Row], str]:
    """One request runs on version 2 and four wait for it when it is withdrawn; returns the ledger, the first's id."""
    client, table = rig.services.client, rig.services.gateway.back.parts.table
    await rig.route(100)
    gate.open.clear()
    first = asyncio.create_task(complete(client))
    await until(lambda: any(r.core.binding for r in table.requests()))
    [running] = [r.request_id for r in table.requests()]
    waiting = [asyncio.create_task(complete(client)) for _ in range(4)]
    await until(lambda: len(table) == 5 and all(r.admitted for r in table.requests()))
    reservations = slot_key(table.requests()[0].facts.key.tenant, "res")
    assert await rig.redis.hlen(reservations) == 5
    try:
        await rig.route(0, V2)
        moved = await asyncio.gather(*waiting)
    finally:
        gate.open.set()
    seen = [*moved, await first]
    rows = await rig.ledger(5)
    await until(lambda: gone(rig.redis, reservations))

    assert [t.ending for t in seen] == ["completed"] * 5
    assert [t.version for t in seen] == ["1"] * 4 + ["2"]
    assert all(t.is_echo_prefix(ECHO_VOCABULARY) for t in moved)
    assert {i: row["version"] for i, row in rows.items()} == {t.request_id: t.version for t in seen}
    assert {t.request_id: t.usage["prompt_tokens"] for t in seen if t.usage} == {
        i: row["billed_prompt_tokens"] for i, row in rows.items()
    }
    assert {row["billed_completion_tokens"] for row in rows.values()} == {TOKENS}
    return rows, running


async def test_queued_work_of_a_withdrawn_version_is_sent_to_one_that_reads_the_same_tokens(
    redis_server: RedisProcess, redis_client: aioredis.Redis, tmp_path: Path
) -> None:
    gate = Gate()
    async with versions(redis_server.url, redis_client, tmp_path, second_version(gate)) as rig:
        rows, _ = await withdrawn_with_a_queue(rig, gate)

    # By the router: nobody queued it again.
    assert {row["attempt"] for row in rows.values()} == {1}


async def test_queued_work_of_a_withdrawn_version_with_another_tokenizer_is_tokenised_and_billed_anew(
    redis_server: RedisProcess, redis_client: aioredis.Redis, tmp_path: Path
) -> None:
    gate = Gate()
    async with versions(redis_server.url, redis_client, tmp_path, second_version(gate, pair_tokenizer())) as rig:
        rows, running = await withdrawn_with_a_queue(rig, gate)

    assert {i: row["billed_prompt_tokens"] for i, row in rows.items()} == {i: 3 if i == running else 5 for i in rows}
    assert {i: row["attempt"] for i, row in rows.items()} == {i: 1 if i == running else 2 for i in rows}


async def test_a_redis_that_lost_everything_changes_no_route(
    redis_server: RedisProcess, redis_client: aioredis.Redis, tmp_path: Path
) -> None:
    async with versions(redis_server.url, redis_client, tmp_path) as rig:
        client, parts = rig.services.client, rig.services.gateway.back.parts
        await rig.route(100)

        redis_server.flush()
        # Keys and workers are written again by those who know them; nobody but the gateways knows the routes.
        await until(rig.services.gateway.back.ready)
        await until(lambda: parts.pool.serves("echo", "1") and parts.pool.serves("echo", "2"))
        seen: list[Transcript] = []

        async def served() -> bool:
            seen.append(await complete(client))
            return seen[-1].ending == "completed"

        await until(served)

        assert seen[-1].version == "2"
        assert parts.routes.table.revision == 1
