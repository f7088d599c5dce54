"""A replica that lags is promoted under load: writes are lost, but no request, no token, no bill and no reservation.

The services are processes of their own, so that clients and services do not share one interpreter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from services.usage.schema import ledger
from tests.helpers.nemesis import VOCAB, Streams, free_blocks, held_keys
from tests.helpers.sentinel import WatchedRedis
from tests.helpers.service_processes import ServiceProcesses, service_processes
from tests.helpers.stack import new_key
from tests.helpers.waiting import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

STREAMS = int(os.environ.get("NEMESIS_STREAMS", "200"))
# All streams together get so many tokens a second, however many they are.
STEP_MS = max(1_000, 4 * STREAMS)
LAG_S = 2.0
SEED = int(os.environ.get("NEMESIS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


@dataclasses.dataclass(frozen=True)
class KeyedDoor:
    """The gateway, with a key."""

    url: str
    headers: dict[str, str]


@pytest.fixture
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRedis]:
    processes = WatchedRedis(tmp_path_factory.mktemp("s"))
    try:
        yield processes.start()
    finally:
        processes.stop()


@pytest.fixture
def services(watched: WatchedRedis) -> Iterator[ServiceProcesses]:
    """The worker can take every stream, and has room in each step for the prompts of those that begin."""
    knobs = f"max_num_seqs={STREAMS + 12},max_num_batched_tokens=2048,num_blocks=8192,tpot_target_ms={2 * STEP_MS}"
    worker = {"MILLRACE_ECHO_STEP_MS": str(STEP_MS), "MILLRACE_ENGINE": knobs}
    with (
        tempfile.TemporaryDirectory(prefix="mr-") as folder,
        service_processes(watched.url, Path(folder), worker=worker) as running,
    ):
        yield running


def rows_of(database: Path) -> list[Any]:
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.connect() as connection:
        return list(connection.execute(sa.select(ledger)))


def door_of(services: ServiceProcesses, home: Path) -> KeyedDoor:
    """A new tenant whose budget, far from spent, has to be right in the end."""
    key = new_key(home, "acme", "--limit", "daily_budget_tokens=100000000", env=services.operator)
    return KeyedDoor(services.url, {"Authorization": f"Bearer {key}"})


def spent(watched: WatchedRedis) -> int:
    with redis.Redis.from_url(watched.replica.url) as client:
        return int(client.hget("mr:{acme}:budget", "spent") or 0)


def held(watched: WatchedRedis) -> dict[str, int]:
    with redis.Redis.from_url(watched.replica.url) as client:
        return held_keys(client)


async def test_a_lagging_replica_that_is_promoted_loses_no_request(
    watched: WatchedRedis, services: ServiceProcesses, tmp_path: Path
) -> None:
    print(f"NEMESIS_SEED={SEED}, {STREAMS} streams")
    chance = random.Random(SEED)
    door = await asyncio.to_thread(door_of, services, tmp_path / "home")
    idle = await free_blocks(services.router_address)
    streams = Streams(door, lambda: chance.randint(8, 25), refused_pause_s=3.0)
    async with streams.running(STREAMS):
        # Streams begin and end all the time by then.
        await streams.wait_ended(STREAMS // 4)
        await streams.wait_in_flight(int(0.8 * STREAMS))
        print(f"a replica {LAG_S:g} s behind is promoted with {streams.in_flight()} streams in flight")
        await asyncio.to_thread(watched.promote_lagging, LAG_S)
        await streams.wait_ended(STREAMS // 2)
    accepted = streams.accepted()
    # Spending that the new master missed is raised by the ledger's sums within two rebuilds.
    await until(lambda: len(rows_of(services.ledger)) >= len(accepted) and not held(watched), every_s=0.5, within_s=120)
    rows = rows_of(services.ledger)
    billed_sum = sum(row.billed_prompt_tokens + row.billed_completion_tokens for row in rows)
    await until(lambda: spent(watched) >= billed_sum, every_s=0.5, within_s=120)
    freed = await free_blocks(services.router_address)

    refused = Counter(str((a.seen.error or {}).get("code")) for a in streams.attempts if a.ending == "refused")
    print(f"{len(accepted)} accepted, refused {dict(refused)}, {len(rows)} rows, {billed_sum} tokens")
    assert Counter(a.ending for a in accepted) == {"completed": len(accepted)}
    assert all(a.seen.is_echo_prefix(VOCAB) and len(a.seen.token_ids) == a.max_tokens for a in accepted)
    billed = {row.request_id: row.billed_completion_tokens for row in rows}
    assert len(rows) == len(billed)
    assert billed == {a.seen.request_id: a.max_tokens for a in accepted}
    assert spent(watched) == billed_sum
    assert freed == idle != []
