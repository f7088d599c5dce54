"""Commands of many callers over one connection: each gets his own reply, whatever becomes of the others."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio as aioredis
from redis import exceptions

from services.common.admission_scripts import ScriptRunner
from services.common.redis_client import connect
from services.common.redis_pipeline import RedisPipeline
from tests.helpers.redis import RedisProcess


@pytest.fixture
def client(redis_client: aioredis.Redis) -> aioredis.Redis:
    return redis_client


async def test_each_caller_gets_the_reply_of_his_own_command(client: aioredis.Redis) -> None:
    pipeline = RedisPipeline(client)

    replies = await asyncio.gather(*(pipeline.execute(("ECHO", f"value {n}")) for n in range(500)))

    assert replies == [f"value {n}".encode() for n in range(500)]


async def test_callers_share_one_connection(client: aioredis.Redis) -> None:
    pipeline = RedisPipeline(client)

    ids = await asyncio.gather(*(pipeline.execute(("CLIENT", "ID")) for _ in range(100)))

    assert len(set(ids)) == 1


async def test_an_error_is_its_callers_alone(client: aioredis.Redis) -> None:
    pipeline = RedisPipeline(client)
    await pipeline.execute(("SET", "text", "a"))

    replies = await asyncio.gather(
        pipeline.execute(("INCR", "text")),
        pipeline.execute(("GET", "text")),
        pipeline.execute(("NONSENSE",)),
        pipeline.execute(("INCR", "count")),
        return_exceptions=True,
    )

    assert isinstance(replies[0], exceptions.ResponseError)
    assert replies[1] == b"a"
    assert isinstance(replies[2], exceptions.ResponseError)
    assert replies[3] == 1


async def test_a_caller_who_leaves_takes_no_reply_of_another(client: aioredis.Redis) -> None:
    pipeline = RedisPipeline(client)
    leaving = [asyncio.create_task(pipeline.execute(("ECHO", f"left {n}"))) for n in range(50)]
    staying = [asyncio.create_task(pipeline.execute(("ECHO", f"stayed {n}"))) for n in range(50)]

    for turns in range(50):
        leaving[turns].cancel()
        await asyncio.sleep(0)
    await asyncio.wait(leaving)

    assert await asyncio.gather(*staying) == [f"stayed {n}".encode() for n in range(50)]


async def test_commands_are_sent_again_when_the_connection_was_closed(client: aioredis.Redis) -> None:
    pipeline = RedisPipeline(client)
    first = await pipeline.execute(("CLIENT", "ID"))
    await client.client_kill_filter(_id=str(first))

    second = await pipeline.execute(("CLIENT", "ID"))

    assert second != first


async def test_a_redis_that_is_gone_fails_every_caller_and_is_found_again() -> None:
    server = await asyncio.to_thread(RedisProcess(append_only=False).start)
    client = connect(server.url)
    pipeline = RedisPipeline(client)
    await pipeline.execute(("PING",))

    server.kill()
    lost = await asyncio.gather(*(pipeline.execute(("PING",)) for _ in range(80)), return_exceptions=True)
    await asyncio.to_thread(server.start)

    assert {type(error) for error in lost} == {exceptions.ConnectionError}
    assert await pipeline.execute(("PING",)) == b"PONG"
    await client.aclose()
    server.stop()


async def test_scripts_that_redis_forgot_are_sent_again(client: aioredis.Redis) -> None:
    scripts = ScriptRunner(client)
    keys = [f"mr:{{registry}}:{name}" for name in ("workers", "worker_info", "pools")]
    await scripts.run("members", keys, "renew", "w", "{}", 5_000, "echo/default/0")
    await client.script_flush()

    assert await scripts.run("members", keys, "list") == [b"w", b"{}"]
