"""Prefix affinity: who is known to hold a prefix, when that decides, and when load decides instead."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque

from services.router.endpoint import Needs
from services.router.policy import SAMPLE, RoutingPolicy
from services.router.prefix_index import UNREPORTED_S, PrefixIndex
from services.router.roster import Roster
from services.router.scorers import PoolLoad, PrefixAffinity
from tests.unit.test_router_policy import make_endpoint, make_view, needs

PREFIX = tuple(range(100, 110))


def asking(request_id: str, *block_hashes: int) -> Needs:
    return dataclasses.replace(needs(request_id), block_hashes=block_hashes)


def test_what_a_worker_was_sent_is_known_from_the_front() -> None:
    index = PrefixIndex()

    index.sent("worker-1", PREFIX[:4], 0.0)

    assert index.leading("worker-1", PREFIX, 0.0) == 4
    assert index.leading("worker-1", (1, 2, 3), 0.0) == 0
    assert index.leading("worker-2", PREFIX, 0.0) == 0
    assert index.leading("worker-1", (), 0.0) == 0


def test_guesses_are_bounded_and_the_longest_unused_is_forgotten() -> None:
    index = PrefixIndex(max_sent_hashes=4)
    index.sent("worker-1", (1, 2), 0.0)
    index.sent("worker-1", (3, 4), 0.0)
    index.sent("worker-2", (1, 2), 0.0)

    index.sent("worker-1", (5, 6), 0.0)

    assert len(index) == 4
    assert index.leading("worker-1", (3, 4), 0.0) == 0
    assert [index.leading(name, (1, 2), 0.0) for name in ("worker-1", "worker-2")] == [2, 2]


def test_a_report_is_believed_over_a_guess_once_the_guess_is_old() -> None:
    index = PrefixIndex()
    index.replace("worker-1", PREFIX[:2])
    index.sent("worker-1", PREFIX, 0.0)

    assert index.leading("worker-1", PREFIX, UNREPORTED_S) == len(PREFIX)
    assert index.leading("worker-1", PREFIX, UNREPORTED_S + 0.1) == 2


def test_reported_evictions_end_a_guess_too_and_a_snapshot_replaces_all() -> None:
    index = PrefixIndex()
    index.sent("worker-1", PREFIX, 0.0)
    index.change("worker-1", stored=PREFIX[:6], removed=PREFIX[4:6] + PREFIX[6:])
    assert index.leading("worker-1", PREFIX, 0.0) == 6

    index.change("worker-1", stored=(), removed=PREFIX[3:])
    assert index.leading("worker-1", PREFIX, 0.0) == 3

    index.replace("worker-1", PREFIX[:1])
    assert index.leading("worker-1", PREFIX, UNREPORTED_S + 0.1) == 1


def test_a_worker_that_left_is_forgotten() -> None:
    index = PrefixIndex()
    index.replace("worker-1", PREFIX)
    index.sent("worker-1", PREFIX, 0.0)

    index.forget("worker-1")

    assert index.leading("worker-1", PREFIX, 0.0) == 0
    assert len(index) == 0


def test_the_score_is_the_share_of_leading_blocks() -> None:
    index = PrefixIndex()
    endpoint = make_endpoint()
    index.sent("worker-1", PREFIX[:5], 0.0)

    affinity = PrefixAffinity(index, PoolLoad.of([endpoint]))

    assert affinity(asking("r1", *PREFIX), endpoint, 0.0) == 0.5
    assert affinity(asking("r2", *PREFIX[:5]), endpoint, 0.0) == 1.0
    assert affinity(needs("r3"), endpoint, 0.0) == 0.0


def test_a_prefix_goes_where_it_was_sent_before_though_another_is_idle() -> None:
    policy = RoutingPolicy(random.Random(1))
    endpoints = [make_endpoint(f"worker-{i}", view=make_view(slots=8)) for i in range(4)]
    first = policy.choose(asking("r1", *PREFIX), Roster(endpoints), 0.0)
    assert first is not None
    policy.placed(asking("r1", *PREFIX), first, 0.0)

    assert policy.choose(asking("r2", *PREFIX), Roster(endpoints), 0.0) is first


def test_a_miss_goes_to_the_least_loaded_and_not_to_the_emptiest_cache() -> None:
    index = PrefixIndex()
    policy = RoutingPolicy(random.Random(1), index)
    busy_and_empty = make_endpoint("busy", view=make_view(slots=4, in_flight=4))
    idle_and_full = make_endpoint("idle", view=make_view(slots=8))
    index.replace("idle", range(1_000))

    assert policy.choose(asking("r1", 5_000), Roster([busy_and_empty, idle_and_full]), 0.0) is idle_and_full


def test_affinity_yields_to_the_backlog_of_tokens_as_well() -> None:
    index = PrefixIndex()
    policy = RoutingPolicy(random.Random(1), index)
    holder = make_endpoint("holder", view=make_view(slots=8, backlog=20_000))
    other = make_endpoint("other", view=make_view(slots=8, backlog=100))
    index.replace("holder", PREFIX)

    assert policy.choose(asking("r1", *PREFIX), Roster([holder, other]), 0.0) is other


def test_affinity_stands_while_the_batch_is_nearly_empty_though_all_others_are_idle() -> None:
    index = PrefixIndex()
    policy = RoutingPolicy(random.Random(1), index)
    other = make_endpoint("other", view=make_view(slots=64))
    index.replace("holder", PREFIX)

    def choose(in_flight: int) -> str:
        holder = make_endpoint("holder", view=make_view(slots=64 - in_flight, in_flight=in_flight))
        chosen = policy.choose(asking("r1", *PREFIX), Roster([holder, other]), 0.0)
        assert chosen is not None
        return chosen.instance

    assert [choose(in_flight) for in_flight in (3, 15, 16)] == ["holder", "holder", "other"]


def test_no_worker_gets_more_than_half_above_the_mean_however_skewed_the_prefixes_are() -> None:
    policy = RoutingPolicy(random.Random(7))
    rng = random.Random(11)
    endpoints = [make_endpoint(f"worker-{i}", view=make_view(slots=64)) for i in range(8)]
    running: Counter[str] = Counter()
    ends: deque[tuple[int, str]] = deque()
    worst = 0.0

    for tick in range(800):
        now = tick * 0.01
        while ends and ends[0][0] <= tick:
            running[ends.popleft()[1]] -= 1
        for endpoint in endpoints:
            count = running[endpoint.instance]
            endpoint.observe(make_view(slots=64 - count, in_flight=count, backlog=100 * count), now)
            endpoint.free(now)
        request = asking(f"r{tick}", *(PREFIX if rng.random() < 0.9 else (tick,)))
        chosen = policy.choose(request, Roster(endpoints), now)
        assert chosen is not None
        policy.placed(request, chosen, now)
        chosen.accepted(request.request_id, now - 0.03)
        running[chosen.instance] += 1
        ends.append((tick + 120, chosen.instance))
        if tick > 200:
            worst = max(worst, max(running.values()) * len(endpoints) / running.total())

    assert 1.0 < worst <= 1.5


def test_in_a_large_pool_a_holder_outside_the_sample_is_found_and_room_anywhere_is_used() -> None:
    index = PrefixIndex()
    policy = RoutingPolicy(random.Random(3), index)
    endpoints = [make_endpoint(f"worker-{i}", view=make_view(slots=8)) for i in range(4 * SAMPLE)]
    index.replace("worker-77", PREFIX)

    chosen = {policy.choose(asking("r1", *PREFIX), Roster(endpoints), 0.0) for _ in range(20)}
    assert chosen == {endpoints[77]}

    for endpoint in endpoints[:-1]:
        endpoint.observe(make_view(slots=0, in_flight=8), 0.0)
    assert {policy.choose(needs(), Roster(endpoints), 0.0) for _ in range(20)} == {endpoints[-1]}
