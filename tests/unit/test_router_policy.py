"""The router's pure parts: what a view means, which workers may take a request, and which is best."""

from __future__ import annotations

import random

import pytest
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_types import WorkerRecord
from services.router.endpoint import VIEW_LAG_S, Endpoint, Needs, View
from services.router.filters import eligible
from services.router.policy import RoutingPolicy
from services.router.prefix_index import PrefixIndex
from services.router.roster import Roster
from services.router.scorers import LOAD_SCORERS, PoolLoad, PrefixAffinity
from tests.helpers.admission import POOL, make_entry


def make_view(
    *,
    slots: int = 4,
    blocks: int = 100,
    in_flight: int = 0,
    backlog: int = 0,
    version: str = "1",
    role: common_pb2.WorkerRole.ValueType = common_pb2.WORKER_ROLE_AGGREGATED,
    draining: bool = False,
    ready: bool = True,
    gateways: tuple[str, ...] = ("gateway-1",),
    suspects: int = 0,
    **fields: int,
) -> View:
    return View.of(
        worker_service_pb2.WatchResponse(
            model=common_pb2.ModelRef(model="echo", version=version),
            role=role,
            free_slot_count=slots,
            free_block_count=blocks,
            block_size=16,
            in_flight_count=in_flight,
            backlog_token_count=backlog,
            attached_gateways=gateways,
            draining=draining,
            ready=ready,
            suspect_count=suspects,
            **fields,
        )
    )


def make_endpoint(instance: str = "worker-1", *, view: View | None = None, now: float = 0.0) -> Endpoint:
    endpoint = Endpoint(WorkerRecord(instance, "unix:/w", "echo", "1", POOL, "aggregated"))
    endpoint.observe(view if view is not None else make_view(), now)
    return endpoint


def needs(
    request_id: str = "r1",
    *,
    choices: int = 1,
    prompt: int = 10,
    gateway: str = "gateway-1",
    lost: tuple[str, ...] = (),
    version: str = "1",
) -> Needs:
    entry = make_entry(request_id, prompt=prompt, gateway=gateway, version=version)
    entry.lost_workers.extend(lost)
    entry.sampling.choice_count = choices
    return Needs.of(entry)


def test_a_stale_view_has_no_room_and_takes_nothing() -> None:
    endpoint = make_endpoint(now=0.0)

    assert endpoint.free(3.0) == (4, 100)
    assert endpoint.free(3.001) == (0, 0)
    assert eligible(needs(), endpoint, 3.0)
    assert not eligible(needs(), endpoint, 3.001)


def test_submits_since_the_view_take_their_room_at_once() -> None:
    endpoint = make_endpoint(view=make_view(slots=2, blocks=10, in_flight=1))

    endpoint.debit(needs("r1", prompt=31))

    assert endpoint.free(0.0) == (1, 8)
    assert endpoint.fits(needs("r2"), 0.0)
    endpoint.debit(needs("r2"))
    assert not endpoint.fits(needs("r3"), 0.0)


def test_an_accepted_submit_counts_until_a_later_view_shows_it() -> None:
    endpoint = make_endpoint(view=make_view(slots=2))
    endpoint.debit(needs("r1"))
    endpoint.accepted("r1", 1.0)
    assert endpoint.free(1.5)[0] == 1
    assert not endpoint.settling()

    endpoint.observe(make_view(slots=1), 1.0 + VIEW_LAG_S / 2)
    assert endpoint.settling()
    assert endpoint.free(1.0 + VIEW_LAG_S / 2)[0] == 0

    assert endpoint.free(1.0 + VIEW_LAG_S)[0] == 1


def test_a_view_from_before_the_request_was_taken_does_not_show_it_however_late_it_comes() -> None:
    endpoint = make_endpoint(view=make_view(slots=1, sequence=6))
    endpoint.debit(needs("r1"))
    endpoint.accepted("r1", 1.0, watch_sequence=7)

    endpoint.observe(make_view(slots=1, sequence=7), 1.0 + 10 * VIEW_LAG_S)
    assert endpoint.free(1.0 + 20 * VIEW_LAG_S)[0] == 0
    assert not endpoint.settling()

    endpoint.observe(make_view(slots=1, sequence=8), 1.0 + 20 * VIEW_LAG_S)
    assert endpoint.free(1.0 + 20 * VIEW_LAG_S)[0] == 1


def test_a_view_that_comes_late_by_another_way_changes_nothing() -> None:
    endpoint = make_endpoint(view=make_view(slots=5, sequence=7), now=1.0)

    endpoint.observe(make_view(slots=9, sequence=6), 2.0)

    assert (endpoint.free(2.0)[0], endpoint.seen_at) == (5, 1.0)
    endpoint.unseen()
    endpoint.observe(make_view(slots=9, sequence=6), 3.0)
    assert endpoint.free(3.0)[0] == 9


def test_a_refusal_gives_the_room_back_and_a_full_worker_is_asked_again_after_its_next_view() -> None:
    endpoint = make_endpoint(view=make_view(slots=2))
    endpoint.debit(needs("r1"))
    endpoint.refused("r1", 0.1, full=False)
    assert endpoint.free(0.1)[0] == 2

    endpoint.debit(needs("r1"))
    endpoint.refused("r1", 0.1, full=True)
    assert endpoint.free(0.1)[0] == 0

    endpoint.observe(make_view(slots=1), 0.2)
    assert endpoint.free(0.2)[0] == 1


def test_a_silent_worker_is_ejected_with_growing_backoff_and_probed_one_at_a_time() -> None:
    endpoint = make_endpoint()
    for at, backoff in ((0.0, 0.5), (1.0, 1.0), (3.0, 2.0)):
        endpoint.observe(make_view(), at)
        endpoint.debit(needs())
        endpoint.failed("r1", at, guilty=True)
        endpoint.observe(make_view(), at + VIEW_LAG_S)
        endpoint.free(at + VIEW_LAG_S)
        assert not endpoint.open(at + backoff - 0.01)
        assert endpoint.open(at + backoff)

    endpoint.debit(needs("probe"))
    assert not endpoint.open(10.0)
    endpoint.accepted("probe", 10.0)
    assert endpoint.open(10.0)


def test_typed_refusals_never_eject() -> None:
    endpoint = make_endpoint()

    for number in range(1_000):
        endpoint.debit(needs(f"r{number}"))
        endpoint.refused(f"r{number}", 0.0, full=False)

    assert endpoint.open(0.0)


def test_room_is_counted_in_slots_and_blocks_but_an_idle_worker_takes_any() -> None:
    busy = make_endpoint(view=make_view(slots=2, blocks=2, in_flight=1))
    idle = make_endpoint(view=make_view(slots=2, blocks=2))

    assert busy.fits(needs(choices=2, prompt=31), 0.0)
    assert not busy.fits(needs(choices=3), 0.0)
    assert not busy.fits(needs(prompt=32), 0.0)
    assert idle.fits(needs(choices=8, prompt=500), 0.0)


def test_a_received_prefix_takes_blocks_too() -> None:
    entry = make_entry("r1", prompt=16)
    entry.prefix.add(choice=0, token_ids=range(20))

    assert Needs.of(entry).block_count(16) == 3


@pytest.mark.parametrize(
    "view",
    [
        make_view(version="2"),
        make_view(role=common_pb2.WORKER_ROLE_PREFILL),
        make_view(draining=True),
        make_view(ready=False),
        make_view(gateways=("gateway-2",)),
    ],
)
def test_each_filter_keeps_a_request_away(view: View) -> None:
    assert eligible(needs(), make_endpoint(), 0.0)
    assert not eligible(needs(), make_endpoint(view=view), 0.0)


def test_an_adapter_needs_a_worker_that_has_it() -> None:
    entry = make_entry("r1")
    entry.adapter = "legal"

    assert not eligible(Needs.of(entry), make_endpoint(), 0.0)


def test_scores_are_between_zero_and_one() -> None:
    views = [make_view(), make_view(slots=0), make_view(slots=0, in_flight=9, backlog=10**9)]

    for view in views:
        endpoint = make_endpoint(view=view)
        scores = [scorer(endpoint, 0.0) for scorer, _ in LOAD_SCORERS]
        scores.append(PrefixAffinity(PrefixIndex(), PoolLoad.of([endpoint]))(needs(), endpoint, 0.0))
        assert all(0.0 <= score <= 1.0 for score in scores)


def test_the_least_loaded_worker_is_chosen_and_ties_are_spread() -> None:
    policy = RoutingPolicy(random.Random(1))
    busy = make_endpoint("busy", view=make_view(slots=1, in_flight=3))
    free = [make_endpoint(f"free-{i}") for i in range(3)]

    chosen = {e.instance for _ in range(50) if (e := policy.choose(needs(), Roster([busy, *free]), 0.0)) is not None}

    assert chosen == {"free-0", "free-1", "free-2"}
    assert policy.choose(needs(), Roster([busy, *free]), 0.0, excluded=chosen) is busy
    assert policy.choose(needs(), Roster([]), 0.0) is None


def test_a_reserved_worker_is_kept_for_the_request_that_waits() -> None:
    policy = RoutingPolicy(random.Random(1))
    endpoint = make_endpoint(view=make_view(slots=1, in_flight=3))
    large = needs("large", choices=2)
    assert policy.choose(large, Roster([endpoint]), 0.0) is None

    reserved = policy.reserve(large, Roster([endpoint]), 0.0)
    assert reserved is endpoint
    endpoint.reserved_for = "large"

    assert policy.choose(needs("small"), Roster([endpoint]), 0.0) is None
    assert policy.reserve(needs("other"), Roster([endpoint]), 0.0) is None
    endpoint.observe(make_view(slots=2, in_flight=2), 0.1)
    assert policy.choose(large, Roster([endpoint]), 0.1) is endpoint
    endpoint.debit(large)
    assert endpoint.reserved_for is None


def test_suspects_run_one_a_worker_where_the_fewest_run_and_others_beside_them() -> None:
    policy = RoutingPolicy(random.Random(0))
    busy, idle, taken = (
        make_endpoint("busy", view=make_view(in_flight=3)),
        make_endpoint("idle"),
        make_endpoint("taken", view=make_view(suspects=1)),
    )
    endpoints = [busy, idle, taken]
    suspects = [needs(f"s{i}", lost=("a", "b")) for i in range(3)]

    first = policy.choose(suspects[0], Roster(endpoints), 0.0)
    assert first is idle
    policy.placed(suspects[0], first, 0.0)
    second = policy.choose(suspects[1], Roster(endpoints), 0.0)
    assert second is busy
    policy.placed(suspects[1], second, 0.0)

    assert policy.choose(suspects[2], Roster(endpoints), 0.0) is None
    assert policy.choose(needs("fresh"), Roster(endpoints), 0.0) is not None
    assert policy.choose(needs("once", lost=("a",)), Roster([taken]), 0.0) is taken


def test_requests_placed_together_share_workers_as_far_as_their_scores_are_alike() -> None:
    view = make_view(slots=256, blocks=10_000)
    roster = Roster(make_endpoint(f"worker-{i}", view=view) for i in range(64))
    policy = RoutingPolicy(random.Random(1))
    company: Endpoint | None = None

    for number in range(64):
        asked = needs(f"r{number}", prompt=256)
        company = policy.choose(asked, roster, 0.0, company=company)
        assert company is not None
        policy.placed(asked, company, 0.0)

    assert sorted({endpoint.load for endpoint in roster.endpoints}) == [0, 2]


def test_company_is_not_sought_where_it_is_less_free_full_or_of_another_version() -> None:
    policy = RoutingPolicy(random.Random(1))
    free = make_endpoint("free", view=make_view(slots=256, blocks=10_000))
    busy = make_endpoint("busy", view=make_view(slots=256, blocks=10_000, backlog=500))
    full = make_endpoint("full", view=make_view(slots=0))
    other = make_endpoint("other", view=make_view(slots=256, blocks=10_000, version="2"))
    roster = Roster([free, busy, full, other])

    for company in (busy, full, other):
        assert policy.choose(needs(), roster, 0.0, company=company) is free
