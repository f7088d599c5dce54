"""The roster of a pool: kept by change it says what one made anew says, and a choice looks at few workers of many."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from services.router.endpoint import Endpoint
from services.router.policy import RoutingPolicy
from services.router.roster import RESCAN_S, Roster
from tests.unit.test_router_policy import make_endpoint, make_view, needs


def shown(roster: Roster) -> Any:
    served = [needs(), needs(version="2")]
    return (
        roster.room,
        roster.open_count,
        sorted(e.instance for e in roster.prefillers()),
        [[(round(minus, 9), e.instance) for minus, _, e in roster.order(each)] for each in served],
        [roster.load(each) for each in served],
    )


def change(endpoint: Endpoint, rng: random.Random, number: int, now: float) -> None:
    """Something that happens to a worker."""
    request = needs(f"r{number}", choices=rng.choice((1, 1, 2)))
    view = make_view(
        slots=rng.randrange(4), in_flight=rng.randrange(4), version=rng.choice("112"), ready=rng.random() < 0.9
    )
    view = dataclasses.replace(view, sequence=number)
    match rng.randrange(6):
        case 0 | 1:
            endpoint.observe(view, now)
        case 2:
            endpoint.debit(request)
            endpoint.accepted(request.request_id, now, rng.choice((None, number)))
        case 3:
            endpoint.debit(request)
            endpoint.failed(request.request_id, now, guilty=rng.random() < 0.5)
        case 4:
            endpoint.reserve(rng.choice((None, "large")))
        case _:
            endpoint.unseen()


@pytest.mark.parametrize("seed", range(8))
def test_kept_by_change_it_says_what_one_made_anew_says(seed: int) -> None:
    rng = random.Random(seed)
    endpoints = [make_endpoint(f"worker-{i}") for i in range(6)]
    kept, now = Roster(endpoints), 0.0

    for number in range(300):
        now += rng.choice((0.0, 2 * RESCAN_S, 1.0))
        if rng.random() < 0.03:
            kept.remove(endpoints.pop(0))
            endpoints.append(make_endpoint(f"worker-{6 + number}", now=now))
            kept.add(endpoints[-1])
        change(rng.choice(endpoints), rng, number, now)
        # Whom breakers keep out hangs on how many are alive, which is looked at in scans.
        now += 2 * RESCAN_S if any(endpoint.failing for endpoint in endpoints) else 0.0
        kept.refresh(now)
        hooks = [endpoint.on_change for endpoint in endpoints]
        anew = Roster(endpoints)
        anew.refresh(now)
        for endpoint, hook in zip(endpoints, hooks, strict=True):
            endpoint.on_change = hook

        assert shown(kept) == shown(anew)


def test_a_worker_that_leaves_keeps_no_room_for_anybody() -> None:
    endpoint = make_endpoint()
    roster = Roster([endpoint])
    endpoint.reserve("large")

    roster.remove(endpoint)
    roster.refresh(0.0)

    assert endpoint.reserved_for is None
    assert (roster.room, roster.open_count, roster.endpoints) == (0, 0, [])


def test_a_choice_among_a_thousand_looks_at_few() -> None:
    looked: list[str] = []

    class Watched(Endpoint):
        def fits(self, asked: Any, now: float) -> bool:
            looked.append(self.instance)
            return super().fits(asked, now)

    endpoints: list[Endpoint] = [Watched(make_endpoint(f"worker-{i}").record) for i in range(1_000)]
    for endpoint in endpoints:
        endpoint.observe(make_view(), 0.0)
    roster, policy = Roster(endpoints), RoutingPolicy(random.Random(1))

    for number in range(100):
        chosen = policy.choose(needs(f"r{number}"), roster, 0.0)
        assert chosen is not None
        policy.placed(needs(f"r{number}"), chosen, 0.0)

    assert len(looked) <= 100 * 5
