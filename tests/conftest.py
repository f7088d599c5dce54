"""Fixtures that every suite shares."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio as aioredis
import structlog

from services.common.redis_client import connect
from tests.helpers import containers
from tests.helpers.redis import RedisProcess

# Read by triton when a kernel's module is loaded: without a device its kernels run in the interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Log lines of a service in this process are not the output of a command that runs beside it.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))


def pytest_report_header() -> str:
    """Where Redis and PostgreSQL come from in this run."""
    return containers.describe()


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisProcess]:
    process = RedisProcess(append_only=False).start()
    yield process
    process.stop()


@pytest.fixture
def redis_server(redis_process: RedisProcess) -> RedisProcess:
    """An empty Redis: one process for the whole run, flushed before each test."""
    redis_process.flush()
    return redis_process


@pytest.fixture
async def redis_client(redis_server: RedisProcess) -> AsyncIterator[aioredis.Redis]:
    client = connect(redis_server.url)
    yield client
    await client.aclose()
