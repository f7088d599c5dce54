"""Releases at full size: 200 streams while a version is rolled out and back, twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.asyncio as aioredis

from tests.helpers.redis import RedisProcess
from tests.helpers.two_versions import roll_forward_and_back, versions

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


async def test_under_200_streams_no_roll_forward_or_back_fails_or_mixes_one(
    redis_server: RedisProcess, redis_client: aioredis.Redis, tmp_path: Path
) -> None:
    async with versions(redis_server.url, redis_client, tmp_path) as rig:
        seen = await roll_forward_and_back(rig, clients=200, tokens=60)

    print(f"streams: {len(seen)}")
