"""Route tables to and from their message and its JSON; every table that comes in is checked here, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

from google.protobuf import json_format
from millrace.common.v1 import routes_pb2 as pb

from services.common.errors import InvalidRequest
from services.common.routes import (
    PoolRule,
    Rollout,
    RolloutState,
    Route,
    RouteTable,
    Shadow,
    Target,
    WeightedTarget,
)

MAX_ROUTES = 256
MAX_TARGETS = 16
MAX_PINS = 1_024
MAX_POOL_RULES = 64
MAX_WITHDRAWN = 256
MAX_WEIGHT = 1_000_000
MAX_STEPS = 16
MAX_REASON_CHARS = 500
# What may stand in keys and in `model@version`.
_NAME = re.compile(r"[^\s{}@:,|\x00-\x1f\x7f]{1,128}")


def to_json(table: RouteTable) -> str:
    """The document as it is stored and shown."""
    return json_format.MessageToJson(to_message(table), preserving_proto_field_name=True, indent=None)


def from_json(text: str | bytes) -> RouteTable:
    """Raises InvalidRequest. Fields that only a newer release knows are dropped."""
    try:
        message = json_format.Parse(text, pb.RouteTable(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The route table cannot be read: {str(error).splitlines()[0]}") from None
    return from_message(message)


def to_message(table: RouteTable) -> pb.RouteTable:
    """Routes and withdrawn versions in the order of their names."""
    return pb.RouteTable(
        revision=table.revision,
        routes=[_route_message(table.routes[alias]) for alias in sorted(table.routes)],
        pool_rules=[
            pb.PoolRule(
                pool=rule.pool,
                model=rule.model,
                tenant=rule.tenant,
                priority_class=rule.priority_class,
                length_class=rule.length_class,
            )
            for rule in table.pool_rules
        ],
        withdrawn=[target_message(target) for target in sorted(table.withdrawn)],
    )


def from_message(message: pb.RouteTable) -> RouteTable:
    """The checked table. Raises InvalidRequest with the field named."""
    _check_count("routes", message.routes, MAX_ROUTES)
    _check_count("pool_rules", message.pool_rules, MAX_POOL_RULES)
    _check_count("withdrawn", message.withdrawn, MAX_WITHDRAWN)
    routes = {route.alias: _route(route) for route in message.routes}
    if len(routes) != len(message.routes):
        raise InvalidRequest("Two routes have the same alias.", param="routes")
    if message.revision < 0:
        raise InvalidRequest("revision must not be negative.", param="revision")
    return RouteTable(
        revision=message.revision,
        routes=routes,
        pool_rules=tuple(_pool_rule(rule) for rule in message.pool_rules),
        withdrawn=frozenset(_target("withdrawn", target) for target in message.withdrawn),
    )


def target_of(text: str, alias: str) -> Target:
    """`version` of the alias' own model, or `model@version`. Raises InvalidRequest."""
    model, at, version = text.rpartition("@")
    return _target("version", pb.RouteTarget(model=model if at else alias, version=version))


def target_message(target: Target) -> pb.RouteTarget:
    """The wire's form."""
    return pb.RouteTarget(model=target.model, version=target.version)


def check_name(field: str, name: str) -> str:
    """The name. Raises InvalidRequest for what may not stand in keys."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(f"{field}: a name has 1 to 128 printable characters, none of {{}}@:,| nor spaces.")
    return name


def _route(message: pb.Route) -> Route:
    check_name("alias", message.alias)
    field = f"routes[{message.alias}]"
    _check_count(f"{field}.targets", message.targets, MAX_TARGETS)
    _check_count(f"{field}.pins", message.pins, MAX_PINS)
    targets = tuple(WeightedTarget(_target(f"{field}.targets", t.target), t.weight) for t in message.targets)
    if any(not 0 <= t.weight <= MAX_WEIGHT for t in targets):
        raise InvalidRequest(f"{field}: a weight lies between 0 and {MAX_WEIGHT}.", param="weight")
    if len({t.target for t in targets}) != len(targets):
        raise InvalidRequest(f"{field}: a version stands there twice.", param="targets")
    if not any(t.weight > 0 for t in targets):
        raise InvalidRequest(f"{field}: no version has a weight.", param="targets")
    shadow = None
    if message.HasField("shadow"):
        shadow = Shadow(_target(f"{field}.shadow", message.shadow.target), message.shadow.share)
        if not 0 <= shadow.share <= 1:
            raise InvalidRequest(f"{field}: the share of a shadow lies between 0 and 1.", param="share")
    return Route(
        alias=message.alias,
        targets=targets,
        pins={check_name("tenant", t): _target(f"{field}.pins", message.pins[t]) for t in sorted(message.pins)},
        shadow=shadow,
        rollout=_rollout(field, message.rollout) if message.HasField("rollout") else None,
    )


def _rollout(field: str, message: pb.Rollout) -> Rollout:
    percents = tuple(message.step_percents)
    rising = all(low < high for low, high in zip((0, *percents), percents, strict=False))
    if not rising or not percents or len(percents) > MAX_STEPS or percents[-1] != 100:
        raise InvalidRequest(f"{field}: the steps rise from 1 to 100 percent, and end there.", param="step_percents")
    if not 0 <= message.step < len(percents):
        raise InvalidRequest(f"{field}: there is no step {message.step}.", param="step")
    if message.state == pb.ROLLOUT_STATE_UNSPECIFIED or message.state not in pb.RolloutState.values():
        raise InvalidRequest(f"{field}: a rollout has a state.", param="state")
    _check_count(f"{field}.criteria", message.criteria, MAX_TARGETS)
    if len(message.release_digest) not in (0, 32):
        raise InvalidRequest(f"{field}: a release digest has 32 bytes.", param="release_digest")
    bake_s = message.bake.ToTimedelta().total_seconds()
    if bake_s < 0:
        raise InvalidRequest(f"{field}: the bake time is negative.", param="bake")
    return Rollout(
        baseline=_target(f"{field}.rollout", message.baseline),
        candidate=_target(f"{field}.rollout", message.candidate),
        step_percents=percents,
        step=message.step,
        state=RolloutState(message.state),
        bake_s=bake_s,
        step_time=message.step_time.ToMilliseconds() / 1000,
        reason=message.reason[:MAX_REASON_CHARS],
        criteria=dict(message.criteria),
        release_digest=message.release_digest,
    )


def _pool_rule(message: pb.PoolRule) -> PoolRule:
    check_name("pool", message.pool)
    for field, name in (("model", message.model), ("tenant", message.tenant)):
        if name:
            check_name(field, name)
    return PoolRule(message.pool, message.model, message.tenant, message.priority_class, message.length_class)


def _target(field: str, message: pb.RouteTarget) -> Target:
    return Target(check_name(f"{field}.model", message.model), check_name(f"{field}.version", message.version))


def _check_count(field: str, items: Iterable[object], most: int) -> None:
    if sum(1 for _ in items) > most:
        raise InvalidRequest(f"{field} takes at most {most} entries.", param=field)


def _route_message(route: Route) -> pb.Route:
    message = pb.Route(
        alias=route.alias,
        targets=[pb.WeightedTarget(target=target_message(t.target), weight=t.weight) for t in route.targets],
        pins={tenant: target_message(target) for tenant, target in route.pins.items()},
    )
    if route.shadow is not None:
        shadow = pb.RouteShadow(target=target_message(route.shadow.target), share=route.shadow.share)
        message.shadow.CopyFrom(shadow)
    if route.rollout is not None:
        message.rollout.CopyFrom(_rollout_message(route.rollout))
    return message


def _rollout_message(rollout: Rollout) -> pb.Rollout:
    message = pb.Rollout(
        baseline=target_message(rollout.baseline),
        candidate=target_message(rollout.candidate),
        step_percents=rollout.step_percents,
        step=rollout.step,
        state=cast("pb.RolloutState.ValueType", rollout.state.value),
        reason=rollout.reason,
        criteria=rollout.criteria,
        release_digest=rollout.release_digest,
    )
    message.bake.FromMilliseconds(round(rollout.bake_s * 1000))
    message.step_time.FromMilliseconds(round(rollout.step_time * 1000))
    return message
