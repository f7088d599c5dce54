"""The steps of a rollout, and what each leaves in the table."""

from __future__ import annotations

import dataclasses

import pytest

from services.common.errors import InvalidRequest, NotFound
from services.common.route_wire import from_message, to_message
from services.common.routes import Rollout, RolloutState, Route, RouteTable, Shadow, Target, WeightedTarget
from services.usage import rollout
from services.usage.rollout import Plan

V1, V2 = Target("m", "1"), Target("m", "2")
SERVED = RouteTable(3, {"m": Route("m", (WeightedTarget(V1, 1),), pins={"acme": V1})})


def started() -> RouteTable:
    return rollout.start(SERVED, "m", Plan(V2), now=100.0)


def of(table: RouteTable) -> Rollout:
    found = table.routes["m"].rollout
    assert found is not None
    return found


def weights(table: RouteTable) -> dict[Target, int]:
    return {t.target: t.weight for t in table.routes["m"].targets}


def test_a_rollout_climbs_its_steps_and_ends_promoted() -> None:
    table, shares = started(), []
    while of(table).state is RolloutState.RUNNING:
        shares.append(weights(table)[V2])
        table = rollout.promote(table, "m", now=200.0)

    assert [*shares, weights(table)[V2]] == [1, 5, 25, 100]
    assert (of(table).state, of(table).step_time) == (RolloutState.PROMOTED, 200.0)
    assert weights(table) == {V1: 0, V2: 100}
    assert table.routes["m"].pins == {"acme": V1}
    assert from_message(to_message(table)) == table


def test_a_rollout_may_jump_to_a_later_step_but_not_back() -> None:
    table = rollout.promote(started(), "m", now=1.0, percent=25)

    assert weights(table)[V2] == 25
    assert weights(rollout.promote(table, "m", now=1.0, percent=100))[V2] == 100
    with pytest.raises(InvalidRequest):
        rollout.promote(rollout.promote(table, "m", now=1.0), "m", now=2.0)
    with pytest.raises(InvalidRequest):
        rollout.promote(table, "m", now=1.0, percent=101)


def test_a_paused_rollout_keeps_its_shares_until_it_goes_on() -> None:
    paused = rollout.pause(started(), "m", reason="to look at")

    assert (of(paused).state, of(paused).reason, weights(paused)) == (
        RolloutState.PAUSED, "to look at", weights(started()),
    )  # fmt: skip
    assert of(rollout.resume(paused, "m", now=7.0)) == dataclasses.replace(of(started()), step_time=7.0)
    assert weights(rollout.promote(paused, "m", now=7.0))[V2] == 5
    with pytest.raises(InvalidRequest):
        rollout.pause(paused, "m", reason="again")


@pytest.mark.parametrize("promotions", [0, 1, 3])
def test_rolling_back_gives_all_to_the_baseline_and_withdraws_the_candidate(promotions: int) -> None:
    table = started()
    for _ in range(promotions):
        table = rollout.promote(table, "m", now=1.0)
    shadowed = dataclasses.replace(table.routes["m"], shadow=Shadow(V2, 0.1))

    back = rollout.roll_back(dataclasses.replace(table, routes={"m": shadowed}), "m", now=9.0, reason="3 % errors")

    assert weights(back) == {V1: 100, V2: 0}
    assert back.withdrawn == {V2}
    assert back.routes["m"].shadow is None
    assert (of(back).state, of(back).reason, of(back).percent) == (RolloutState.ROLLED_BACK, "3 % errors", 0)
    with pytest.raises(InvalidRequest):
        rollout.roll_back(back, "m", now=10.0, reason="again")


def test_a_withdrawn_version_may_be_tried_again() -> None:
    back = rollout.roll_back(started(), "m", now=9.0, reason="slow")

    again = rollout.start(back, "m", Plan(V2), now=10.0)

    assert again.withdrawn == frozenset()
    assert weights(again) == {V1: 99, V2: 1}


def test_what_cannot_be_rolled_out_is_refused() -> None:
    for table, alias, plan in (
        (SERVED, "m", Plan(V1)),
        (SERVED, "new", Plan(V2)),
        (started(), "m", Plan(V2)),
        (dataclasses.replace(SERVED, withdrawn=frozenset({V1})), "m", Plan(V2)),
    ):
        with pytest.raises(InvalidRequest):
            rollout.start(table, alias, plan, now=0.0)
    with pytest.raises(NotFound):
        rollout.promote(SERVED, "m", now=0.0)


def test_a_name_without_a_route_gets_one_when_its_baseline_is_named() -> None:
    table = rollout.start(RouteTable(), "m", Plan(V2, baseline=V1, step_percents=(10, 100)), now=0.0)

    assert weights(table) == {V1: 90, V2: 10}


def test_a_candidate_is_mirrored_to_while_it_is_tried_and_no_longer() -> None:
    plan = Plan(V2, step_percents=(1, 100), criteria={"tpot_ms": 30}, mirrored=0.1)
    begun = rollout.start(SERVED, "m", plan, now=1.0)

    assert begun.routes["m"].shadow == Shadow(V2, 0.1)
    assert of(from_message(to_message(begun))).criteria == {"tpot_ms": 30}
    assert rollout.promote(begun, "m", now=2.0).routes["m"].shadow is None
    assert rollout.roll_back(begun, "m", now=2.0, reason="").routes["m"].shadow is None
    assert (
        rollout.start(SERVED, "m", dataclasses.replace(plan, step_percents=(100,)), now=1.0).routes["m"].shadow is None
    )
