"""Claims of versions that are withdrawn or have no worker: re-targeted, given to their gateways, or kept."""

from __future__ import annotations

import pytest
from millrace.common.v1 import admission_pb2, common_pb2

from services.common.admission_types import Claimed, Pool, WorkerRecord
from services.common.routes import Route, RouteTable, Target, WeightedTarget
from services.router.dispatcher import HeldClaim
from services.router.endpoint import Endpoint, Needs, View
from services.router.redirect import PATIENCE_S, Redirect
from services.router.roster import Roster
from tests.helpers.admission import make_entry
from tests.helpers.fake_worker import FakeWorker

V1, V2 = Target("echo", "1"), Target("echo", "2")
POOL = Pool("echo")
SAME, OTHER = b"same tokens", b"other tokens"


def endpoint(version: str, prompt_digest: bytes = SAME) -> Endpoint:
    worker = FakeWorker(f"w{version}", version=version)
    message = worker.view()
    message.model.manifest_digest = version.encode()
    message.prompt_digest = prompt_digest
    made = Endpoint(WorkerRecord(worker.instance, "", "echo", version, POOL, "aggregated"))
    made.observe(View.of(message), 0.0)
    return made


def held(*, route: str = "echo", prefix: bool = False) -> HeldClaim:
    entry = make_entry("r", version="2")
    entry.route, entry.prompt_digest = route, SAME
    entry.block_hashes.append(7)
    if prefix:
        entry.prefix.add(choice=0, token_ids=[1])
    return HeldClaim(POOL, Claimed("c", 1, 60_000, entry, entry.SerializeToString()), Needs.of(entry), 0.0)


def table(*, withdrawn: bool = True, routed: bool = True) -> RouteTable:
    route = Route("echo", (WeightedTarget(V1, 100), WeightedTarget(V2, 0 if withdrawn else 100)))
    return RouteTable(1, {"echo": route} if routed else {}, (), frozenset({V2} if withdrawn else ()))


def closes(claim: HeldClaim, routes: RouteTable, *endpoints: Endpoint, now: float = 0.0) -> bool:
    return Redirect(lambda: routes).closes(claim, Roster(endpoints), now)


def model_of(claim: HeldClaim) -> tuple[str, str, bytes]:
    ref: common_pb2.ModelRef = claim.claim.entry.model
    return ref.model, ref.version, ref.manifest_digest


def test_a_withdrawn_version_gives_its_work_to_one_that_makes_the_same_tokens() -> None:
    claim = held()

    assert not closes(claim, table(), endpoint("1"), endpoint("2"))

    assert model_of(claim) == ("echo", "1", b"1")
    assert claim.needs.version == "1"
    assert list(claim.claim.entry.block_hashes) == []


@pytest.mark.parametrize(
    ("claim", "routes", "endpoints"),
    [
        (held(), table(), [endpoint("1", OTHER)]),
        (held(), table(), [endpoint("1", b"")]),
        (held(), table(), [endpoint("2")]),
        (held(), table(routed=False), [endpoint("1")]),
        (held(route=""), table(), [endpoint("1")]),
        (held(prefix=True), table(), [endpoint("1")]),
    ],
    ids=["other tokens", "tokens unknown", "no worker", "no route", "named by the client", "begun, no worker"],
)
def test_work_of_a_withdrawn_version_that_cannot_be_moved_goes_to_its_gateway(
    claim: HeldClaim, routes: RouteTable, endpoints: list[Endpoint]
) -> None:
    before = admission_pb2.AdmissionEntry.FromString(claim.claim.entry.SerializeToString())

    assert closes(claim, routes, *endpoints)

    assert claim.claim.entry == before


def test_an_answer_that_has_begun_ends_on_its_version_while_that_has_a_worker() -> None:
    assert not closes(held(prefix=True), table(), endpoint("1"), endpoint("2"))


def test_a_version_that_lost_its_workers_gives_its_work_away_after_a_while() -> None:
    claim, routes = held(), table(withdrawn=False)

    assert not closes(claim, routes, endpoint("1"), now=PATIENCE_S)
    assert model_of(claim)[1] == "2"

    fresh = endpoint("1")
    fresh.seen_at = PATIENCE_S
    assert not closes(claim, routes, fresh, now=PATIENCE_S + 0.1)
    assert model_of(claim)[1] == "1"


def test_work_whose_version_has_a_worker_or_no_other_stays() -> None:
    busy, alone = held(), held(route="")

    assert not closes(busy, table(withdrawn=False), endpoint("1"), endpoint("2"), now=2.9)
    assert not closes(alone, table(withdrawn=False), endpoint("1"), now=2.9)

    assert (model_of(busy)[1], model_of(alone)[1]) == ("2", "2")
