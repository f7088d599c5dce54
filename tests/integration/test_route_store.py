"""The route table in a real Redis: compare-and-set, history, and a table that Redis lost."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import redis.asyncio as aioredis

from services.common.errors import RevisionConflict
from services.common.route_store import RouteStore
from services.common.routes import Route, RouteTable, Target, WeightedTarget


def served_by(version: str, table: RouteTable) -> RouteTable:
    route = Route("m", (WeightedTarget(Target("m", version), 1),))
    return dataclasses.replace(table, routes={"m": route})


async def test_of_two_changes_to_one_revision_one_stands_and_the_other_is_refused(redis_client: aioredis.Redis) -> None:
    store = RouteStore(redis_client)
    assert await store.read() is None
    changes = [store.replace(served_by(v, RouteTable()), who=v, why="race") for v in ("1", "2")]

    results = await asyncio.gather(*changes, return_exceptions=True)

    [refused] = [r for r in results if isinstance(r, BaseException)]
    [stands] = [r for r in results if isinstance(r, RouteTable)]
    assert isinstance(refused, RevisionConflict)
    assert (stands.revision, await store.read()) == (1, stands)
    assert [r.table for r in await store.history()] == [stands]


async def test_every_revision_is_kept_with_who_and_why(redis_client: aioredis.Redis) -> None:
    store, table = RouteStore(redis_client), RouteTable()
    for version in ("1", "2", "3"):
        table = await store.replace(served_by(version, table), who="ann", why=f"to {version}")

    history = await store.history()

    assert [(r.table.revision, r.who, r.why) for r in history] == [(i, "ann", f"to {i}") for i in (1, 2, 3)]
    assert [r.table.revision for r in await store.history(after=1, count=1)] == [2]
    assert [r.table.revision for r in await store.history(before=3)] == [2, 1]
    assert await store.at(2) == history[1]
    assert await store.at(9) is None
    assert 0 <= await redis_time(redis_client) - history[-1].time_s < 60


async def test_a_lost_table_is_put_back_and_never_over_a_later_one(redis_client: aioredis.Redis) -> None:
    store = RouteStore(redis_client)
    first = await store.replace(served_by("1", RouteTable()), who="ann", why="one")
    await store.replace(served_by("2", first), who="ann", why="two")
    old, last = await store.history()

    assert not await store.put_back(old)
    await redis_client.flushall()
    assert await store.put_back(last)

    assert await store.read() == last.table
    assert (await store.replace(served_by("1", last.table), who="ann", why="three")).revision == 3
    with pytest.raises(RevisionConflict):
        await store.replace(served_by("1", last.table), who="ann", why="stale")


async def redis_time(client: aioredis.Redis) -> float:
    seconds, micros = await client.time()
    return float(seconds) + float(micros) / 1e6
