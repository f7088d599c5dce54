"""The pick: shares, sessions, pins, versions that are down or withdrawn, pools; and the wire form of a table."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from millrace.common.v1 import common_pb2
from millrace.common.v1 import routes_pb2 as pb

from services.common.errors import InvalidRequest
from services.common.route_wire import from_json, from_message, target_of, to_json, to_message
from services.common.routes import PoolRule, Rollout, RolloutState, Route, RouteTable, Shadow, Target, WeightedTarget

V1, V2 = Target("m", "1"), Target("m", "2")
KEYS = [f"request-{i}" for i in range(4_000)]


def table(*weights: int, **others: object) -> RouteTable:
    targets = tuple(WeightedTarget(t, w) for t, w in zip((V1, V2), weights, strict=True))
    return RouteTable(routes={"chat": Route("chat", targets)}, **others)  # type: ignore[arg-type]


def pick(routes: RouteTable, key: str, usable: Callable[[Target], bool] = lambda _: True) -> Target | None:
    return routes.pick("chat", tenant="acme", key=key, usable=usable)


def test_shares_are_what_the_weights_say() -> None:
    found = Counter(pick(table(95, 5), key) for key in KEYS)

    # 4,000 draws at 5 %: five standard deviations are 69.
    assert abs(found[V2] - 200) < 69
    assert found[V1] + found[V2] == len(KEYS)


def test_a_session_on_the_candidate_stays_there_as_its_share_grows() -> None:
    steps = [{key for key in KEYS if pick(table(100 - p, p), key) == V2} for p in (1, 5, 25, 100)]

    assert all(low < high for low, high in itertools.pairwise(steps))
    assert steps[-1] == set(KEYS)


def test_a_version_without_a_worker_gets_nothing_and_moves_nobody_else() -> None:
    routes = table(50, 50)
    before = {key: pick(routes, key) for key in KEYS}

    after = {key: pick(routes, key, lambda t: t == V1) for key in KEYS}

    assert set(after.values()) == {V1}
    assert before["request-0"] in (V1, V2)
    assert pick(routes, "request-0", lambda _: False) is None


def test_a_withdrawn_version_gets_nothing_even_by_a_pin() -> None:
    routes = table(50, 50, withdrawn=frozenset({V2}))
    pinned = dataclasses.replace(routes.routes["chat"], pins={"acme": V2})

    assert {pick(routes, key) for key in KEYS} == {V1}
    assert {pick(dataclasses.replace(routes, routes={"chat": pinned}), key) for key in KEYS} == {V1}


def test_a_pin_holds_against_the_weights_and_is_never_replaced_by_them() -> None:
    route = dataclasses.replace(table(100, 0).routes["chat"], pins={"acme": V2})
    routes = RouteTable(routes={"chat": route})

    assert {pick(routes, key) for key in KEYS[:50]} == {V2}
    assert pick(routes, "k", lambda t: t == V1) is None
    assert routes.pick("chat", tenant="other", key="k", usable=lambda _: True) == V1


def test_pool_rules_match_by_every_field_that_is_set_in_their_order() -> None:
    batch, short = common_pb2.PRIORITY_CLASS_BATCH, common_pb2.LENGTH_CLASS_SHORT
    interactive, long = common_pb2.PRIORITY_CLASS_INTERACTIVE, common_pb2.LENGTH_CLASS_LONG
    rules = (
        PoolRule("vip", tenant="acme"),
        PoolRule("slow", model="m", priority_class=batch),
        PoolRule("big", length_class=long),
    )
    routes = RouteTable(pool_rules=rules)

    assert list(routes.pools("m", "acme", batch, long)) == ["vip", "slow", "big"]
    assert list(routes.pools("m", "other", batch, short)) == ["slow"]
    assert list(routes.pools("other", "other", interactive, long)) == ["big"]
    assert list(routes.pools("m", "other", interactive, short)) == []


def full_table() -> RouteTable:
    rollout = Rollout(V1, V2, (1, 5, 100), 1, RolloutState.PAUSED, 12.5, 1_700_000_000.25, "to look at")
    targets = (WeightedTarget(V1, 95), WeightedTarget(V2, 5))
    route = Route("chat", targets, {"acme": V1}, Shadow(V2, 0.25), rollout)
    rules = (PoolRule("gpu", "m", "acme", common_pb2.PRIORITY_CLASS_BATCH, common_pb2.LENGTH_CLASS_LONG),)
    return RouteTable(7, {"chat": route}, rules, frozenset({Target("m", "0")}))


def test_a_table_is_the_same_after_the_wire() -> None:
    assert from_json(to_json(full_table())) == full_table()
    assert from_message(to_message(full_table())) == full_table()


def test_fields_of_a_newer_release_are_dropped() -> None:
    document = to_json(RouteTable(3)).replace("{", '{"unheard_of": 1, ', 1)

    assert from_json(document) == RouteTable(3)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.routes.add(),
        lambda m: m.routes.add().CopyFrom(m.routes[0]),
        lambda m: m.routes[0].targets.add().CopyFrom(m.routes[0].targets[0]),
        lambda m: setattr(m.routes[0].targets[0], "weight", -1),
        lambda m: [setattr(t, "weight", 0) for t in m.routes[0].targets],
        lambda m: setattr(m.routes[0].targets[0].target, "version", "a b"),
        lambda m: setattr(m.routes[0].shadow, "share", float("nan")),
        lambda m: m.routes[0].rollout.step_percents.append(100),
        lambda m: setattr(m.routes[0].rollout, "step", 3),
        lambda m: setattr(m.routes[0].rollout, "state", 0),
        lambda m: m.routes[0].pins["x{y"].CopyFrom(m.routes[0].targets[0].target),
        lambda m: setattr(m.pool_rules[0], "pool", ""),
        lambda m: m.withdrawn.add(model="m"),
        lambda m: setattr(m, "revision", -1),
    ],
)
def test_a_table_that_cannot_be_routed_by_is_refused(change: Callable[[pb.RouteTable], object]) -> None:
    message = to_message(full_table())
    change(message)

    with pytest.raises(InvalidRequest):
        from_message(message)


def test_versions_are_named_with_or_without_their_model() -> None:
    assert target_of("2", "m") == V2
    assert target_of("other@2", "m") == Target("other", "2")
    with pytest.raises(InvalidRequest):
        target_of("", "m")


def test_what_is_no_document_is_an_invalid_request() -> None:
    for text in (b"\xff\xfe", b"{"):
        with pytest.raises(InvalidRequest):
            from_json(text)
