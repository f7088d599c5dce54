"""How Redis is found and opened: forms of its address, TLS, Sentinel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cli.dev_ca import DevAuthority
from services.common.admission_scripts import store_errors
from services.common.errors import StoreUnavailable
from services.common.redis_client import connect
from services.common.redis_url import parse_redis_url
from services.common.tls import GATEWAY, load_tls
from tests.helpers.redis import RedisProcess, tls_redis_binary
from tests.helpers.sentinel import WatchedRedis


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:1/0",
        "rediss://h",
        "unix:///run/redis.sock",
        "redis+sentinel://a:1,b/name",
        "rediss+sentinel://user:p%40ss@a/name/2",
    ],
)
def test_every_form_of_an_address_is_taken(url: str) -> None:
    assert parse_redis_url(url) == url
    connect(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "h:6379",
        "redis+sentinel://a:1",
        "redis+sentinel:///n",
        "redis+sentinel://a:x/n",
        "redis+sentinel://a/n/x",
    ],
)
def test_an_address_of_another_form_is_refused_in_a_sentence(url: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_redis_url(url)


def test_what_the_sentinel_address_says_reaches_the_master() -> None:
    client = connect("redis+sentinel://user:p%40ss@a:1,b/name/2")

    options = client.connection_pool.connection_kwargs
    assert (options["username"], options["password"], options["db"]) == ("user", "p@ss", 2)


async def test_after_a_failover_the_same_client_writes_to_the_new_master(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    watched = WatchedRedis(tmp_path_factory.mktemp("s"))
    try:
        client = connect(watched.start().url)
        await client.set("before", 1)
        watched.promote_lagging(0)

        await client.set("after", 1)
        await client.aclose()

        with redis.Redis.from_url(watched.replica.url) as promoted:
            assert promoted.mget("before", "after") == [b"1", b"1"]
    finally:
        watched.stop()


@pytest.fixture
def tls_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisProcess, Path]]:
    binary = tls_redis_binary()
    if binary is None and not os.environ.get("REQUIRE_REDIS_TLS"):
        pytest.skip("no redis-server with TLS: apt-get install redis-tools")
    folder = tmp_path_factory.mktemp("r")
    authority = DevAuthority()
    certificates = authority.issue(folder / "redis", GATEWAY, address="127.0.0.1")
    process = RedisProcess(folder / "data", binary=binary, tls=certificates)
    process.folder.mkdir()
    yield process.start(), authority.issue(folder / "gateway", GATEWAY)
    process.stop()


async def test_a_rediss_server_is_shown_a_certificate_and_must_have_one_of_the_same_authority(
    tls_redis: tuple[RedisProcess, Path], tmp_path: Path
) -> None:
    process, folder = tls_redis
    stranger = DevAuthority().issue(tmp_path / "stranger", GATEWAY)

    client = connect(process.tls_url, load_tls(str(folder)))
    assert await client.ping()
    await client.aclose()
    for tls in (None, load_tls(str(stranger))):
        refused = connect(process.tls_url, tls)
        with pytest.raises(StoreUnavailable), store_errors():
            await refused.ping()
        await refused.aclose()
