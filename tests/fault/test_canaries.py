"""Bad and good versions through the whole stack: gateway, router, two versions of workers, usage, real time, HTTP.

One percent of the requests go to the new version, some more are mirrored to it; the controller decides alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import redis.asyncio as aioredis

from services.common.route_store import RouteStore
from services.common.routes import Rollout, RolloutState, RouteTable, Target
from services.usage import rollout as steps
from services.usage.canary.controller import WHO, ProgressStore
from services.usage.canary.trial import is_watched
from services.worker import wiring as worker_wiring
from services.worker.config import WorkerConfig
from services.worker.engine.fake_model_runner import FakeScript
from services.worker.engine.outputs import SchedulerOutput
from services.worker.engine.request import RequestKey
from tests.helpers.four_services import FourServices, running_services
from tests.helpers.redis import RedisProcess
from tests.helpers.rollouts import NEW, OLD
from tests.helpers.transcripts import Transcript, stream_completion
from tests.helpers.waiting import until
from tests.helpers.worker import echo_config, scripted_echo

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

STREAMS = 24
TOKENS = 8
# How long clients go on after the first of them met the new version, or after their start where none met it: one that
# is known by its mirrored answers may be out before.
WINDOW_S = 60.0
STEP_S = 0.015
# Of the requests that are mirrored.
SHARE = 0.5
# As small a sample as a verdict may have here.
FEW = {"min_requests": 10.0, "min_to_fail": 5.0}
GOOD_VERSIONS = int(os.environ.get("CANARY_GOOD", "3"))


def pace(seconds: float) -> Callable[[SchedulerOutput], None]:
    return lambda _: time.sleep(seconds)


def three_percent(key: RequestKey, index: int) -> str | None:
    unlucky = random.Random(key.request_id).random() < 0.03
    return "the device is broken" if unlucky and index == 4 else None


GOOD = FakeScript(pace(STEP_S), weights=b"good")
# What a bad version does, and what it must hold; the time of a step only where it is what is judged, for a machine with
# other work keeps no target. Failures have one, which takes some 300 requests at the median; by comparison with the
# baseline alone it would be some 800, about what a busy machine serves in a minute.
BAD: dict[str, tuple[FakeScript, dict[str, float]]] = {
    "time": (FakeScript(pace(0.041), weights=b"good"), {"tpot_ms": 30}),
    "errors": (FakeScript(pace(STEP_S), weights=b"good", row_error=three_percent), {"error_rate": 0.002}),
    "greedy output": (FakeScript(pace(STEP_S), weights=b"wrong"), {}),
}


@dataclasses.dataclass
class Load:
    """Clients that ask without a pause until they are told to stop; what each got, and when (monotonic seconds)."""

    client: httpx.AsyncClient
    began: float = dataclasses.field(default_factory=time.monotonic)
    answers: list[tuple[float, str, int]] = dataclasses.field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        numbers = itertools.count()

        async def ask() -> None:
            while not stop.is_set():
                body = {"model": "echo", "prompt": f"p{next(numbers)}", "max_tokens": TOKENS, "temperature": 0}
                began = time.monotonic()
                answer = await self.client.post("/v1/completions", json=body)
                version = answer.headers.get("x-millrace-model-version", "")
                self.answers.append((began, version, answer.status_code))

        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(ask())

    def touched(self) -> list[float]:
        """When the requests began that the new version answered."""
        return sorted(began for began, version, _ in self.answers if version == "2")

    def over(self) -> bool:
        """The window is."""
        return time.monotonic() > min(self.touched(), default=self.began) + WINDOW_S


async def begin_rollout(
    redis: aioredis.Redis,
    *,
    new: Target = NEW,
    old: Target = OLD,
    percents: tuple[int, ...] = steps.DEFAULT_STEPS,
    bake_s: float,
    **criteria: float,
) -> RouteStore:
    routes = RouteStore(redis)
    plan = steps.Plan(new, old, percents, bake_s, FEW | criteria, SHARE)
    table = steps.start(await routes.read() or RouteTable(), "echo", plan, now=time.time())
    await routes.replace(table, who="ann", why=f"try {new.version}")
    return routes


async def rollout_of(routes: RouteStore) -> Rollout:
    table = await routes.read()
    assert table is not None
    rollout = table.routes["echo"].rollout
    assert rollout is not None
    return rollout


async def run_rollout(
    redis: aioredis.Redis, redis_url: str, folder: Path, script: FakeScript, *, bake_s: float, **criteria: float
) -> tuple[Rollout, Load, RouteStore]:
    """Both versions under load until the rollout has ended and the window is over."""
    config = dataclasses.replace(echo_config(max_num_seqs=64), redis_url=redis_url)
    new = dataclasses.replace(config, model_version="2")
    second = worker_wiring.build(new, model=scripted_echo(new, script))
    await second.start()
    model = scripted_echo(config, GOOD)
    try:
        async with running_services(redis_url, folder, worker_config=config, model=model) as services:
            routes = await begin_rollout(redis, bake_s=bake_s, **criteria)
            parts = services.gateway.back.parts
            await until(lambda: parts.routes.table.revision and OLD in parts.directory and NEW in parts.directory)
            load, stop = Load(services.client), asyncio.Event()
            running = asyncio.create_task(load.run(stop))
            try:
                async with asyncio.timeout(200):
                    while (rollout := await rollout_of(routes)).state is RolloutState.RUNNING or not load.over():
                        await asyncio.sleep(0.1)
            except TimeoutError:
                told = await ProgressStore(redis).read("echo")
                raise AssertionError(f"no end after {len(load.answers)} requests: {told and told.why}") from None
            finally:
                stop.set()
                await running
            return rollout, load, routes
    finally:
        await second.stop()


@pytest.mark.parametrize("figure", BAD)
async def test_a_bad_version_is_out_within_a_minute_with_one_percent_touched(
    redis_client: aioredis.Redis, redis_server: RedisProcess, tmp_path: Path, figure: str
) -> None:
    script, held = BAD[figure]
    rollout, load, routes = await run_rollout(redis_client, redis_server.url, tmp_path, script, bake_s=600, **held)

    touched = load.touched()
    lasted_s = touched[-1] - touched[0] if touched else 0.0
    print(f"{figure}: {len(touched)} of {len(load.answers)} touched in {lasted_s:.1f} s")
    assert rollout.state is RolloutState.ROLLED_BACK
    assert figure in rollout.reason
    assert lasted_s < 60
    assert len(touched) <= 0.015 * len(load.answers)
    assert (await routes.history())[-1].who == WHO
    # A refusal names no version.
    assert {status for _, version, status in load.answers if version != "2"} == {200}


async def test_a_good_version_is_promoted_and_both_versions_latency_is_kept(
    redis_client: aioredis.Redis, redis_server: RedisProcess, tmp_path: Path
) -> None:
    good = dataclasses.replace(GOOD)

    rollout, load, routes = await run_rollout(redis_client, redis_server.url, tmp_path, good, bake_s=4)

    assert rollout.state is RolloutState.PROMOTED, rollout.reason
    assert {status for _, _, status in load.answers} == {200}
    progress = await ProgressStore(redis_client).read("echo")
    assert progress is not None
    assert any(point.baseline.request_count and point.candidate.tpot_median_seconds for point in progress.points)
    assert [r.who for r in await routes.history()] == ["ann", WHO, WHO, WHO]


@contextlib.asynccontextmanager
async def streaming(client: httpx.AsyncClient) -> AsyncIterator[list[Transcript]]:
    """Clients that stream one answer after the other until the end of the block; what each got."""
    seen: list[Transcript] = []
    stop, body = asyncio.Event(), {"model": "echo", "max_tokens": TOKENS, "temperature": 0}

    async def ask() -> None:
        while not stop.is_set():
            seen.append(await stream_completion(client, body | {"prompt": f"p{len(seen)}"}))

    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(ask())
        try:
            yield seen
        finally:
            stop.set()


async def start_version(config: WorkerConfig, services: FourServices, version: str) -> worker_wiring.WorkerApp:
    """A worker of another good version, which the gateway knows."""
    config = dataclasses.replace(config, model_version=version)
    worker = worker_wiring.build(config, model=scripted_echo(config, dataclasses.replace(GOOD)))
    await worker.start()
    await until(lambda: Target("echo", version) in services.gateway.back.parts.directory)
    return worker


async def judged(routes: RouteStore) -> Rollout:
    """The rollout once it has ended; the last step has its bake time too."""
    while is_watched(rollout := await rollout_of(routes), time.time()):
        await asyncio.sleep(0.1)
    return rollout


@pytest.mark.timeout(120 + 120 * GOOD_VERSIONS)
async def test_good_versions_one_after_the_other_are_promoted_without_an_alarm_or_a_broken_stream(
    redis_client: aioredis.Redis, redis_server: RedisProcess, tmp_path: Path
) -> None:
    """The judge is no more lenient than where it catches bad versions: every figure against the baseline, the target of
    failures, the same probability of a false alarm, samples as small; one step fewer makes each bound tighter. Times
    have no target: what a busy machine makes of them is no fault of the version, and the baseline runs on the same."""
    held = BAD["errors"][1]
    config = dataclasses.replace(echo_config(max_num_seqs=64), redis_url=redis_server.url)
    began, ended = time.monotonic(), list[Rollout]()
    async with contextlib.AsyncExitStack() as stack:
        running = running_services(redis_server.url, tmp_path, worker_config=config, model=scripted_echo(config, GOOD))
        services = await stack.enter_async_context(running)
        requests, before = services.gateway.back.parts.table.requests, services.worker
        async with streaming(services.client) as seen:
            for number in range(2, GOOD_VERSIONS + 2):
                old, new = Target("echo", str(number - 1)), Target("echo", str(number))
                worker = await start_version(config, services, new.version)
                stack.push_async_callback(worker.stop)
                routes = await begin_rollout(redis_client, new=new, old=old, percents=(5, 25, 100), bake_s=3, **held)
                ended.append(rollout := await judged(routes))
                told = f"{rollout.state.name} after {len(seen)} answers and {time.monotonic() - began:.0f} s"
                print(f"{new}: {told}: {rollout.reason}")
                assert rollout.state is RolloutState.PROMOTED, rollout.reason
                await until(lambda v=old.version: all(r.facts.entry.model.version != v for r in requests()))
                await before.stop()
                before = worker

    assert len(ended) == GOOD_VERSIONS
    assert [t for t in seen if t.ending != "completed" or len(t.token_ids) != TOKENS] == []
    assert {t.version for t in seen} == {str(number) for number in range(1, GOOD_VERSIONS + 2)}
