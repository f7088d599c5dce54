"""The canary controller on a real Redis, in simulated time: bad versions leave, good ones get all, commands win."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import redis.asyncio as aioredis

from services.common.admission_store import AdmissionStore, usage_stream
from services.common.admission_types import Pool, WorkerRecord
from services.common.route_store import RouteStore
from services.common.routes import Rollout, RolloutState, Route, RouteTable
from services.usage import rollout as steps
from services.usage.canary.controller import WHO, CanaryController, ProgressStore
from tests.helpers.canaries import GOOD, Version
from tests.helpers.fake_clock import FakeClock
from tests.helpers.rollouts import NEW, OLD, Fleet

# Before the ids that Redis gives to the events now.
THEN = 1_700_000_000.0
LOOK_S = 0.5


class Simulation:
    """One route, its fleet and a controller; a step is half a second of it."""

    def __init__(self, redis: aioredis.Redis, canary: Version, *, seed: int = 1, per_second: int = 200) -> None:
        self.redis = redis
        self.clock = FakeClock(wall=THEN)
        self.routes = RouteStore(redis)
        self.fleet = Fleet({NEW: canary}, seed)
        self.controller = CanaryController(redis, self.routes, self.clock)
        self._per_look = int(per_second * LOOK_S)

    async def start(self, *, shadow: float = 0.0, bake_s: float = 10.0, **criteria: float) -> Simulation:
        worker = WorkerRecord("w", "127.0.0.1:1", "echo", "2", Pool("echo"), "aggregated")
        await AdmissionStore(self.redis).register_worker(worker)
        plan = steps.Plan(NEW, OLD, bake_s=bake_s, criteria=criteria, mirrored=shadow)
        table = steps.start(RouteTable(), "echo", plan, now=self.clock.wall())
        await self.routes.replace(table, who="ann", why="try 2")
        return self

    async def route(self) -> Route:
        table = await self.routes.read()
        assert table is not None
        return table.routes["echo"]

    async def rollout(self) -> Rollout:
        rollout = (await self.route()).rollout
        assert rollout is not None
        return rollout

    async def step(self) -> None:
        table = await self.routes.read()
        assert table is not None
        async with self.redis.pipeline(transaction=False) as pipe:
            for event in self.fleet.serve(table, self._per_look, self.clock.wall()):
                pipe.xadd(usage_stream(Pool("echo")), {"e": event.SerializeToString()})
            await pipe.execute()
        self.clock.jump(LOOK_S)
        await self.controller.look()

    async def run(self, seconds: float, *, until: RolloutState | None = None) -> None:
        for _ in range(int(seconds / LOOK_S)):
            await self.step()
            if until is not None and (await self.rollout()).state is until:
                return


BAD = {
    "slow": (Version(tpot_s=0.041), 0.0, "time per output token"),
    "failing": (Version(error_rate=0.03), 0.05, "errors"),
    "wrong weights": (Version(differ_rate=0.95, output_tokens=100), 0.05, "greedy output"),
    "endless": (Version(output_tokens=300), 0.0, "output length"),
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_version_leaves_within_a_minute_of_its_first_request(
    redis_client: aioredis.Redis, kind: str
) -> None:
    version, shadow, figure = BAD[kind]
    simulation = await Simulation(redis_client, version).start(shadow=shadow, bake_s=300, tpot_ms=30)

    await simulation.run(60, until=RolloutState.ROLLED_BACK)

    ended, fleet = await simulation.rollout(), simulation.fleet
    assert ended.state is RolloutState.ROLLED_BACK
    assert figure in ended.reason
    assert fleet.first_touch is not None
    assert fleet.last_touch is not None
    assert fleet.last_touch - fleet.first_touch < 60
    assert fleet.touched <= 0.015 * fleet.requests
    [*_, last] = await simulation.routes.history()
    assert (last.who, last.why) == (WHO, ended.reason)
    touched = fleet.touched
    await simulation.run(1)
    assert fleet.touched == touched


async def test_a_good_version_gets_all_of_the_traffic_step_by_step(redis_client: aioredis.Redis) -> None:
    simulation = await Simulation(redis_client, GOOD).start(bake_s=5, tpot_ms=30, min_requests=10)

    await simulation.run(60, until=RolloutState.PROMOTED)

    history = await simulation.routes.history()
    percents = [r.table.routes["echo"].rollout.percent for r in history]  # type: ignore[union-attr]
    assert percents == [1, 5, 25, 100]
    times = [r.table.routes["echo"].rollout.step_time for r in history]  # type: ignore[union-attr]
    assert all(later - earlier >= 5 for earlier, later in itertools.pairwise(times))
    assert "no figure is worse" in (await simulation.rollout()).reason


@pytest.mark.fault
@pytest.mark.timeout(300)
async def test_twenty_good_versions_out_of_twenty_are_promoted(redis_client: aioredis.Redis) -> None:
    ended = []
    for seed in range(20):
        await redis_client.flushdb()
        simulation = Simulation(redis_client, GOOD, seed=seed, per_second=100)
        await simulation.start(shadow=0.05, bake_s=5, tpot_ms=30, min_requests=10)
        await simulation.run(120, until=RolloutState.PROMOTED)
        ended.append(await simulation.rollout())

    assert [rollout.reason for rollout in ended if rollout.state is not RolloutState.PROMOTED] == []


async def test_a_version_that_turns_bad_with_all_of_the_traffic_is_taken_back(redis_client: aioredis.Redis) -> None:
    simulation = await Simulation(redis_client, GOOD).start(bake_s=2, tpot_ms=30, min_requests=1)
    await simulation.run(60, until=RolloutState.PROMOTED)

    simulation.fleet.versions[NEW] = Version(tpot_s=0.041)
    await simulation.run(2, until=RolloutState.ROLLED_BACK)

    assert (await simulation.rollout()).state is RolloutState.ROLLED_BACK
    assert (await simulation.route()).targets[0].weight == 100


async def test_a_command_that_comes_between_wins(redis_client: aioredis.Redis) -> None:
    simulation = await Simulation(redis_client, Version(tpot_s=0.041)).start(tpot_ms=30)
    replace = simulation.routes.replace

    async def paused_meanwhile(changed: RouteTable, *, who: str, why: str) -> RouteTable:
        table = await simulation.routes.read()
        assert table is not None
        await replace(steps.pause(table, "echo", reason="wait"), who="ann", why="wait")
        return await replace(changed, who=who, why=why)

    simulation.routes.replace = paused_meanwhile  # type: ignore[method-assign]
    await simulation.run(10)

    assert (await simulation.rollout()).state is RolloutState.PAUSED
    assert (await simulation.routes.history())[-1].who == "ann"


async def test_a_paused_rollout_moves_neither_on_nor_back(redis_client: aioredis.Redis) -> None:
    simulation = await Simulation(redis_client, Version(tpot_s=0.041)).start(tpot_ms=30)
    table = await simulation.routes.read()
    assert table is not None
    await simulation.routes.replace(steps.pause(table, "echo", reason="wait"), who="ann", why="wait")

    await simulation.run(10)

    assert (await simulation.rollout()).state is RolloutState.PAUSED


async def test_a_promotion_by_hand_is_not_taken_back(redis_client: aioredis.Redis) -> None:
    simulation = await Simulation(redis_client, Version(tpot_s=0.041)).start(tpot_ms=30)
    table = await simulation.routes.read()
    assert table is not None
    promoted = steps.promote(table, "echo", now=simulation.clock.wall(), percent=100)
    await simulation.routes.replace(promoted, who="ann", why="now")

    await simulation.run(5)

    assert (await simulation.rollout()).state is RolloutState.PROMOTED


async def test_a_restarted_controller_goes_on_with_what_was_seen(redis_client: aioredis.Redis) -> None:
    simulation = await Simulation(redis_client, GOOD).start(bake_s=300)
    await simulation.run(10)
    before = await ProgressStore(redis_client).read("echo")
    await redis_client.delete("mr:{routes}:canary_controller")

    simulation.controller = CanaryController(redis_client, simulation.routes, simulation.clock)
    await simulation.run(1)

    after = await ProgressStore(redis_client).read("echo")
    assert before is not None
    assert after is not None
    assert 0 < before.candidate_figures.request_count <= after.candidate_figures.request_count
    served = after.candidate_figures.request_count + after.baseline_figures.request_count
    assert served == pytest.approx(simulation.fleet.requests, abs=200)
    assert len(after.points) >= len(before.points) >= 3
    assert [c.request_count for c in after.checks] >= [c.request_count for c in before.checks]


async def test_of_two_controllers_one_acts(redis_client: aioredis.Redis) -> None:
    simulation = await Simulation(redis_client, Version(tpot_s=0.041)).start(tpot_ms=30)
    await simulation.step()
    leader = simulation.controller

    simulation.controller = CanaryController(redis_client, simulation.routes, simulation.clock)
    await simulation.run(10)
    assert (await simulation.rollout()).state is RolloutState.RUNNING
    simulation.controller = leader
    await simulation.step()

    assert (await simulation.rollout()).state is RolloutState.ROLLED_BACK


async def test_tenants_that_are_pinned_say_nothing_about_a_version(redis_client: aioredis.Redis) -> None:
    simulation = await Simulation(redis_client, Version(tpot_s=0.041)).start(tpot_ms=30)
    table = await simulation.routes.read()
    assert table is not None
    pinned = dataclasses.replace(table.routes["echo"], pins={"acme": NEW})
    await simulation.routes.replace(dataclasses.replace(table, routes={"echo": pinned}), who="ann", why="pin")

    await simulation.run(5)

    assert simulation.fleet.touched == simulation.fleet.requests
    assert (await simulation.rollout()).state is RolloutState.RUNNING
