"""The breaker: who is ejected for what, how much of a pool at most, and how it is tried again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_types import Claimed
from services.common.metrics import Metrics
from services.router.dispatcher import Dispatcher, HeldClaim, Outcome
from services.router.endpoint import Endpoint
from services.router.filters import ejected
from services.router.policy import RoutingPolicy
from services.router.roster import Roster
from services.router.submit_link import Answer
from tests.helpers.admission import POOL, make_entry
from tests.helpers.fake_clock import FakeClock
from tests.unit.test_router_policy import make_endpoint, make_view, needs


class Answering:
    """Registry and link in one: answers every submit alike."""

    def __init__(self, answer: worker_service_pb2.SubmitRefusal.ValueType | grpc.StatusCode) -> None:
        self._answer = answer

    def submits(self, instance: str) -> Answering:
        return self

    def send(self, request_id: str, head: Any, entry: bytes, answered: Callable[[Answer], None]) -> None:
        if isinstance(self._answer, grpc.StatusCode):
            answered(self._answer)
        else:
            answered(worker_service_pb2.SubmitResponse(refusal=self._answer))


def submit_many(answer: Any, count: int) -> tuple[Endpoint, set[Outcome]]:
    registry: Any = Answering(answer)
    store: Any = None
    dispatcher = Dispatcher(store, registry, Metrics(), FakeClock(monotonic=0.0), router_instance="router-1")
    endpoint, outcomes = make_endpoint(), set()
    for number in range(count):
        entry = make_entry(f"r{number}")
        held = HeldClaim(POOL, Claimed("c", 1, 60_000, entry, entry.SerializeToString()), needs(entry.request_id), 0.0)
        endpoint.debit(held.needs)
        dispatcher.send(held, endpoint, lambda _, outcome: outcomes.add(outcome))
    return endpoint, outcomes


def test_a_thousand_prompts_that_are_too_long_eject_nobody() -> None:
    endpoint, outcomes = submit_many(worker_service_pb2.SUBMIT_REFUSAL_NEVER_FITS, 1_000)

    assert outcomes == {Outcome.UNFIT}
    assert endpoint.open(0.0)
    assert endpoint.free(0.0) == (4, 100)


@pytest.mark.parametrize(
    ("code", "guilty"),
    [
        (grpc.StatusCode.UNAVAILABLE, True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, True),
        (grpc.StatusCode.INTERNAL, True),
        (grpc.StatusCode.UNKNOWN, True),
        (grpc.StatusCode.DATA_LOSS, True),
        (grpc.StatusCode.INVALID_ARGUMENT, False),
        (grpc.StatusCode.OUT_OF_RANGE, False),
        (grpc.StatusCode.CANCELLED, False),
        (grpc.StatusCode.ABORTED, False),
        (grpc.StatusCode.PERMISSION_DENIED, False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False),
    ],
)
def test_only_the_workers_own_faults_eject_it(code: grpc.StatusCode, guilty: bool) -> None:
    endpoint, _ = submit_many(code, 3)

    assert endpoint.open(0.0) is not guilty


def failing(count: int, of: int) -> list[Endpoint]:
    endpoints = [make_endpoint(f"worker-{i}") for i in range(of)]
    for endpoint in endpoints[:count]:
        endpoint.debit(needs("lost"))
        endpoint.failed("lost", 0.0, guilty=True)
        endpoint.observe(make_view(), 0.1)
    return endpoints


def test_at_most_half_of_a_pool_is_ejected_and_beyond_that_all_are_tried() -> None:
    policy = RoutingPolicy(random.Random(1))
    half, most = failing(2, of=4), failing(3, of=4)

    assert {policy.choose(needs(), Roster(half), 0.2) for _ in range(60)} == set(half[2:])
    assert {policy.choose(needs(), Roster(most), 0.2) for _ in range(200)} == set(most)


def test_workers_that_are_silent_do_not_count_as_the_half_that_is_left() -> None:
    endpoints = failing(1, of=2)
    endpoints[1].view = None

    assert ejected(endpoints, 0.2) == frozenset()


def test_an_ejected_worker_gets_one_probe_and_all_again_after_its_success() -> None:
    policy = RoutingPolicy(random.Random(1))
    endpoints = failing(1, of=2)
    for endpoint in endpoints:
        endpoint.free(0.6)

    assert ejected(endpoints, 0.4) == {"worker-0"}
    assert ejected(endpoints, 0.6) == frozenset()
    endpoints[0].debit(needs("probe"))
    assert {policy.choose(needs(), Roster(endpoints), 0.6) for _ in range(20)} == {endpoints[1]}
    endpoints[0].accepted("probe", 0.6)
    assert ejected(endpoints, 0.6) == frozenset()


def test_a_failure_that_is_not_the_workers_ejects_nobody_but_its_room_stays_taken() -> None:
    endpoint = make_endpoint(view=make_view(slots=2))
    endpoint.debit(needs("r1"))

    endpoint.failed("r1", 0.0, guilty=False)

    assert endpoint.open(0.0)
    assert endpoint.free(0.0)[0] == 1


def test_a_worker_whose_load_is_not_known_is_not_taken_for_idle() -> None:
    policy = RoutingPolicy(random.Random(1))
    silent, busy = (
        make_endpoint("silent", now=0.0),
        make_endpoint("busy", view=make_view(slots=1, in_flight=9), now=3.5),
    )

    assert policy.choose(needs(), Roster([silent, busy]), 3.5) is busy
    assert policy.choose(needs(), Roster([silent]), 3.5) is None
