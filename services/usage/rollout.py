"""The steps of a rollout as pure changes of the route table: start, promote, pause, resume, roll back.

Each takes a table and returns the next one; who calls writes it by compare-and-set. Raises InvalidRequest, NotFound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from services.common.errors import InvalidRequest, NotFound
from services.common.routes import Rollout, RolloutState, Route, RouteTable, Shadow, Target, WeightedTarget
from services.usage.canary.criteria import check_criteria

DEFAULT_STEPS = (1, 5, 25, 100)
DEFAULT_BAKE_S = 300.0
_OPEN = (RolloutState.RUNNING, RolloutState.PAUSED)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a rollout shall do. Without a `baseline` the one version that the route serves now is it.

    `criteria` are what the candidate must hold; a share `mirrored` (0 … 1) of the requests runs again on it.
    """

    candidate: Target
    baseline: Target | None = None
    step_percents: Sequence[int] = DEFAULT_STEPS
    bake_s: float = DEFAULT_BAKE_S
    criteria: Mapping[str, float] = dataclasses.field(default_factory=dict)
    mirrored: float = 0.0


def start(table: RouteTable, alias: str, plan: Plan, *, now: float) -> RouteTable:
    """The candidate gets the first step's share. A version that was withdrawn may be tried again."""
    route = table.routes.get(alias)
    if route is not None and route.rollout is not None and route.rollout.state in _OPEN:
        raise InvalidRequest(f"A rollout of `{alias}` to {route.rollout.candidate} is under way.", param="alias")
    baseline = plan.baseline if plan.baseline is not None else _only_version(alias, route)
    if baseline == plan.candidate:
        raise InvalidRequest(f"`{alias}` is served by {baseline} already.", param="candidate")
    if baseline in table.withdrawn:
        raise InvalidRequest(f"{baseline} is withdrawn: it cannot be what a rollout falls back to.", param="baseline")
    check_criteria(plan.criteria)
    rollout = Rollout(
        baseline,
        plan.candidate,
        tuple(plan.step_percents),
        0,
        RolloutState.RUNNING,
        plan.bake_s,
        step_time=now,
        criteria=plan.criteria,
    )
    if rollout.step_percents and rollout.percent == 100:
        rollout = dataclasses.replace(rollout, state=RolloutState.PROMOTED)
    old = route if route is not None else Route(alias, ())
    if plan.mirrored > 0 and rollout.state is RolloutState.RUNNING:
        old = dataclasses.replace(old, shadow=Shadow(plan.candidate, plan.mirrored))
    return _with(table, old, rollout, withdrawn=table.withdrawn - {plan.candidate})


def promote(table: RouteTable, alias: str, *, now: float, percent: int | None = None, reason: str = "") -> RouteTable:
    """The next step, or the first one of at least `percent`; the last one ends the rollout."""
    route, rollout = _rollout(table, alias, _OPEN)
    step = rollout.step + 1
    if percent is not None:
        later = [i for i, p in enumerate(rollout.step_percents) if i >= step and p >= percent]
        if not later:
            raise InvalidRequest(f"`{alias}` has no later step of {percent} %.", param="percent")
        step = later[0]
    last = step == len(rollout.step_percents) - 1
    state = RolloutState.PROMOTED if last else RolloutState.RUNNING
    route = _without_shadow(route, rollout) if last else route
    return _with(table, route, dataclasses.replace(rollout, step=step, state=state, step_time=now, reason=reason))


def pause(table: RouteTable, alias: str, *, reason: str) -> RouteTable:
    """The shares stay as they are until it is resumed, promoted or rolled back."""
    route, rollout = _rollout(table, alias, (RolloutState.RUNNING,))
    return _with(table, route, dataclasses.replace(rollout, state=RolloutState.PAUSED, reason=reason))


def resume(table: RouteTable, alias: str, *, now: float) -> RouteTable:
    """The step begins again."""
    route, rollout = _rollout(table, alias, (RolloutState.PAUSED,))
    return _with(table, route, dataclasses.replace(rollout, state=RolloutState.RUNNING, step_time=now, reason=""))


def roll_back(table: RouteTable, alias: str, *, now: float, reason: str) -> RouteTable:
    """The baseline gets everything, and the candidate is withdrawn; also once it was promoted."""
    route, rollout = _rollout(table, alias, (*_OPEN, RolloutState.PROMOTED))
    ended = dataclasses.replace(rollout, state=RolloutState.ROLLED_BACK, step_time=now, reason=reason)
    return _with(table, _without_shadow(route, rollout), ended, withdrawn=table.withdrawn | {rollout.candidate})


def _with(
    table: RouteTable, route: Route, rollout: Rollout, *, withdrawn: frozenset[Target] | None = None
) -> RouteTable:
    """The table with this rollout's shares. The candidate stands last, so that sessions on it stay as it grows."""
    percent = rollout.percent if rollout.step_percents else 0
    targets = (WeightedTarget(rollout.baseline, 100 - percent), WeightedTarget(rollout.candidate, percent))
    changed = dataclasses.replace(route, targets=targets, rollout=rollout)
    return dataclasses.replace(
        table,
        routes={**table.routes, route.alias: changed},
        withdrawn=table.withdrawn if withdrawn is None else withdrawn,
    )


def _rollout(table: RouteTable, alias: str, states: Sequence[RolloutState]) -> tuple[Route, Rollout]:
    route = table.routes.get(alias)
    if route is None or route.rollout is None:
        raise NotFound(f"There is no rollout of `{alias}`.", param="alias")
    if route.rollout.state not in states:
        state = route.rollout.state.name.lower().replace("_", " ")
        raise InvalidRequest(f"The rollout of `{alias}` is {state}.", param="alias")
    return route, route.rollout


def _without_shadow(route: Route, rollout: Rollout) -> Route:
    """The rollout is over: the candidate is mirrored to no more."""
    mirrors = route.shadow is not None and route.shadow.target == rollout.candidate
    return dataclasses.replace(route, shadow=None) if mirrors else route


def _only_version(alias: str, route: Route | None) -> Target:
    served = [] if route is None else [t.target for t in route.targets if t.weight > 0]
    if len(served) != 1:
        what = "has no route" if route is None else f"is served by {len(served)} versions"
        raise InvalidRequest(f"`{alias}` {what}: name the baseline.", param="baseline")
    return served[0]
