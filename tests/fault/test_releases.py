"""Releases at full size: 200 streams while a version is rolled out and back by command, twice, over real processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from services.worker.model_source import ECHO_VOCABULARY
from tests.helpers.nemesis import Attempt, attempt, open_client, redis_socket
from tests.helpers.stack import Stack, millrace, running_stack
from tests.helpers.waiting import until
from tests.helpers.worker_processes import WorkerProcesses

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

# Few tokens a second, for what is asked here is not speed: all the streams together leave the machine room.
STREAMS, TOKENS, STEP_MS = 200, 8, 1_000
# Of those that began after a change; all of them are looked at.
ENOUGH = STREAMS // 2
ENGINE = "max_num_seqs=256,max_model_len=512,num_blocks=16384"
# Within which a change of routes takes effect everywhere.
IN_FORCE_S = 2.0


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A stack of one worker of version 1, and a worker of version 2 beside it."""
    env = {"MILLRACE_ECHO_STEP_MS": str(STEP_MS), "MILLRACE_ENGINE": ENGINE}
    with running_stack(tmp_path / "home", "--workers", "1", "--model", "echo", env=env) as stack:
        workers = WorkerProcesses(f"unix://{redis_socket(stack)}", tmp_path, step_ms=STEP_MS)
        workers.start("v2", engine=ENGINE, env={"MILLRACE_MODEL_VERSION": "2"})
        try:
            yield stack
        finally:
            workers.stop()


@dataclasses.dataclass
class Load:
    """Clients that stream without a pause."""

    seen: list[Attempt] = dataclasses.field(default_factory=list)
    _stop: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def running(self, stack: Stack) -> AsyncIterator[None]:
        async with open_client(stack) as client, asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(self._one(client))
            try:
                yield
            finally:
                self._stop.set()

    async def versions_since(self, began: float) -> set[str]:
        """Which versions answered those that began since then, once enough of them have ended."""

        def those() -> list[Attempt]:
            return [a for a in self.seen if a.began >= began]

        await until(lambda: len(those()) >= ENOUGH, every_s=0.2, within_s=120)
        return {a.seen.version for a in those()}

    async def _one(self, client: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            self.seen.append(await attempt(client, TOKENS))


async def rollout(stack: Stack, *arguments: str) -> float:
    """One `millrace rollout`; when it is in force (monotonic seconds)."""
    done = await asyncio.to_thread(millrace, stack.home, "rollout", *arguments, timeout=180)
    assert done.returncode == 0, done.stderr
    return time.monotonic() + IN_FORCE_S


async def forward_and_back(stack: Stack, load: Load) -> None:
    # Whether the version is any good is not asked here: the canary controller has no say.
    plan = ("--to", "2", "--from", "1", "--step", "25", "--step", "100", "--hold", "min_to_fail=1000000")
    began = await rollout(stack, "start", "echo", *plan, "--force", "--why", "try it")
    assert await load.versions_since(began) == {"1", "2"}

    began = await rollout(stack, "promote", "echo", "--force", "--why", "it is good")
    assert await load.versions_since(began) == {"2"}

    began = await rollout(stack, "rollback", "echo", "--why", "it is bad")
    assert await load.versions_since(began) == {"1"}


async def both_serve(stack: Stack) -> None:
    async with open_client(stack) as client:

        async def served() -> bool:
            body = {"model": "echo@2", "prompt": "hello", "max_tokens": 1}
            return (await client.post("/v1/completions", json=body)).is_success

        await until(served, within_s=60)


def test_under_200_streams_no_roll_forward_or_back_fails_or_mixes_one(stack: Stack) -> None:
    load = Load()

    async def scenario() -> None:
        await both_serve(stack)
        async with load.running(stack):
            await forward_and_back(stack, load)
            await forward_and_back(stack, load)

    asyncio.run(scenario())
    seen = [a.seen for a in load.seen]
    rows = stack.wait_requests({t.request_id for t in seen}, timeout_s=120)
    told = {row["request_id"]: (row["version"], row["billed_completion_tokens"]) for row in rows}
    print(f"streams: {len(seen)}")
    misnamed = [(t, told.get(t.request_id)) for t in seen if told.get(t.request_id) != (t.version, TOKENS)]

    assert [a for a in load.seen if a.ending != "completed"] == []
    assert [t for t in seen if not t.is_echo_prefix(ECHO_VOCABULARY) or len(t.token_ids) != TOKENS] == []
    assert misnamed == []
