"""Who computes a prompt: what a PREFILL worker is named for, and when the decoding worker is left to itself."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.common.v1 import common_pb2

from services.router.disaggregation import MIN_UNCACHED_TOKENS, SPARING_FACTOR, Disaggregation, Placing, Reason
from services.router.endpoint import Endpoint, Needs
from services.router.filters import ejected
from services.router.policy import RoutingPolicy
from services.router.prefix_index import PrefixIndex
from services.router.roster import Roster
from tests.helpers.admission import make_entry
from tests.unit.test_router_policy import make_endpoint, make_view

PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE
KV_BYTES = 46_080


def decoder(**fields: Any) -> Endpoint:
    return make_endpoint("decode-1", view=make_view(role=DECODE, kv_token_byte_count=KV_BYTES, **fields))


def peer(instance: str = "prefill-1", **fields: Any) -> Endpoint:
    given = {"role": PREFILL, "kv_token_byte_count": KV_BYTES, "gateways": ()} | fields
    return make_endpoint(instance, view=make_view(**given))


def long_prompt(tokens: int = 1_200) -> Needs:
    entry = make_entry("r1", prompt=tokens)
    entry.block_hashes.extend(range(1, tokens // 16 + 1))
    return Needs.of(entry)


def decide(
    needs: Needs, at: Endpoint, *others: Endpoint, index: PrefixIndex | None = None, now: float = 0.0
) -> Placing:
    return Disaggregation(index if index is not None else PrefixIndex()).decide(needs, at, Roster((at, *others)), now)


def test_a_long_prompt_spares_the_answers_that_run() -> None:
    idle_peer = peer()

    placing = decide(long_prompt(), decoder(running_count=3, in_flight=3), idle_peer)

    assert placing == Placing(Reason.SPARES_RUNNING, idle_peer, 1_200)


def test_idle_pools_compute_where_they_decode() -> None:
    assert decide(long_prompt(), decoder(), peer()).reason is Reason.SOONER_HERE
    assert decide(long_prompt(), decoder(transfer_rate_byte_count=10**9), peer()).reason is Reason.SOONER_HERE


def test_a_prompt_that_a_peer_has_cached_is_taken_from_it_if_the_transfer_is_quick() -> None:
    needs, index, holder = long_prompt(), PrefixIndex(), peer("holder")
    index.replace("holder", needs.block_hashes)

    quick = decide(needs, decoder(transfer_rate_byte_count=10**9), holder, peer("other"), index=index)
    slow = decide(needs, decoder(transfer_rate_byte_count=10**7), holder, index=index)

    assert quick == Placing(Reason.PEER_IS_SOONER, holder, 0)
    assert slow.reason is Reason.SOONER_HERE


def test_what_is_cached_where_it_decodes_is_not_transferred() -> None:
    needs, index = long_prompt(), PrefixIndex()
    index.replace("decode-1", needs.block_hashes[:-10])

    assert decide(needs, decoder(running_count=3), peer(), index=index).reason is Reason.FEW_TOKENS


@pytest.mark.parametrize(("tokens", "remote"), [(MIN_UNCACHED_TOKENS - 1, False), (MIN_UNCACHED_TOKENS, True)])
def test_few_tokens_are_not_worth_a_transfer(tokens: int, remote: bool) -> None:
    placing = decide(long_prompt(tokens), decoder(running_count=1), peer())

    assert (placing.peer is not None) is remote


@pytest.mark.parametrize(
    "fields",
    [
        {"role": common_pb2.WORKER_ROLE_AGGREGATED},
        {"role": DECODE},
        {"version": "2"},
        {"draining": True},
        {"ready": False},
        {"kv_token_byte_count": KV_BYTES // 2},
    ],
)
def test_a_worker_that_cannot_serve_is_never_named(fields: dict[str, Any]) -> None:
    assert decide(long_prompt(), decoder(running_count=3), peer(**fields)).reason is Reason.NO_PEER


def test_a_worker_that_leaves_is_asked_for_what_it_hands_over_however_few_tokens() -> None:
    leaving = peer("leaving", role=DECODE, draining=True, ready=False)

    for needs in (long_prompt(), long_prompt(40)):
        placing = decide(dataclasses.replace(needs, kv_holder="leaving"), decoder(), peer(), leaving)
        assert placing == Placing(Reason.HANDED_OVER, leaving)


@pytest.mark.parametrize(
    "others",
    [
        [],
        [peer("leaving", role=DECODE, version="2")],
        [peer("leaving", role=DECODE, kv_token_byte_count=KV_BYTES // 2)],
    ],
)
def test_without_a_holder_that_fits_it_is_decided_as_ever(others: list[Endpoint]) -> None:
    busy = decoder(running_count=3, in_flight=3)

    placing = decide(dataclasses.replace(long_prompt(), kv_holder="leaving"), busy, peer(), *others)

    assert placing.reason is Reason.SPARES_RUNNING


def test_a_peer_that_is_silent_or_ejected_is_not_named() -> None:
    busy = decoder(running_count=3)
    silent, failing, healthy = peer("silent"), peer("failing"), peer("healthy")
    failing.failed("r0", 4.0, guilty=True)
    for endpoint in (busy, failing, healthy):
        assert endpoint.view is not None
        endpoint.observe(endpoint.view, 4.0)

    assert decide(long_prompt(), busy, silent, now=4.0).reason is Reason.NO_PEER
    assert decide(long_prompt(), busy, failing, healthy, now=4.0).peer is healthy


def test_full_peers_are_left_alone() -> None:
    full = peer(slots=0, in_flight=4)

    assert decide(long_prompt(), decoder(running_count=3), full).reason is Reason.PEERS_FULL


def test_an_embedding_or_prompt_logprobs_need_every_token_where_they_are_computed() -> None:
    embedding, logprobs = make_entry("r1", prompt=1_200), make_entry("r2", prompt=1_200)
    embedding.sampling.embed = True
    logprobs.sampling.prompt_logprob_count = 0

    for entry in (embedding, logprobs):
        assert decide(Needs.of(entry), decoder(running_count=3), peer()).reason is Reason.WHOLE_PROMPT


def test_a_request_that_two_workers_died_with_takes_no_prefill_worker_along() -> None:
    suspect = dataclasses.replace(long_prompt(), suspect=True)

    assert decide(suspect, decoder(running_count=3), peer()).reason is Reason.SUSPECT


def test_prompts_named_since_the_view_fill_a_peer_until_the_next_is_computed_here() -> None:
    policy, at, only = RoutingPolicy(random.Random(1)), decoder(running_count=3), peer(blocks=1_000)
    reasons = []
    for number in range(3):
        needs = Needs.of(make_entry(f"r{number}", prompt=1_200))
        placing = decide(needs, at, only)
        policy.placed(needs, at, 0.0, placing)
        reasons.append(placing.reason)

    assert reasons == [Reason.SPARES_RUNNING, Reason.SPARES_RUNNING, Reason.SOONER_HERE]
    assert (at.load, only.load) == (3 + 3, 2)
    assert only.token_load == 2 * 1_200
    assert at.token_load == 1_201


def test_a_submit_that_failed_gives_the_peer_its_room_back_and_leaves_its_breaker_alone() -> None:
    policy, at, only = RoutingPolicy(random.Random(1)), decoder(running_count=3), peer()
    only.failed("r0", 0.0, guilty=True)
    policy.placed(long_prompt(), at, 1.0, Placing(Reason.SPARES_RUNNING, only, 1_200))

    only.unnamed("r1")

    assert only.token_load == 0
    assert only.open(1.0)
    only.debit(long_prompt())
    assert not only.open(1.0), "one probe at a time: the failure is remembered"


def test_prefill_workers_do_not_count_as_the_half_of_the_decoders_that_must_be_left() -> None:
    decoders = [make_endpoint(f"d{i}") for i in range(2)]
    for endpoint in decoders:
        endpoint.failed("r0", 0.0, guilty=True)
        endpoint.observe(make_view(), 0.1)

    assert ejected([*decoders, *(peer(f"p{i}") for i in range(4))], 0.1) == frozenset()


loads = st.integers(0, 20_000)
rates = st.one_of(st.none(), st.integers(1, 10**10))


@given(
    prompt=st.integers(1, 4_000),
    running=st.integers(0, 4),
    transfer_rate=rates,
    peer_loads=st.lists(st.tuples(loads, rates, st.booleans(), st.integers(0, 250)), max_size=4),
)
def test_a_peer_is_healthy_and_costs_at_most_what_the_spared_answers_allow(
    prompt: int,
    running: int,
    transfer_rate: int | None,
    peer_loads: list[tuple[int, int | None, bool, int]],
) -> None:
    needs, index = long_prompt(prompt), PrefixIndex()
    at = decoder(running_count=running, **({"transfer_rate_byte_count": transfer_rate} if transfer_rate else {}))
    peers = []
    for number, (load, rate, ready, cached) in enumerate(peer_loads):
        measured = {"prefill_rate_token_count": rate} if rate else {}
        peers.append(peer(f"p{number}", backlog=load, ready=ready, **measured))
        index.replace(f"p{number}", needs.block_hashes[:cached])

    placing = decide(needs, at, *peers, index=index)

    if placing.peer is None:
        return
    number = peers.index(placing.peer)
    load, rate, ready, cached = peer_loads[number]
    left = prompt - 16 * min(cached, prompt // 16)
    there_s = (load + left) / (rate or 1_000) + (prompt * KV_BYTES / transfer_rate if transfer_rate else 0)
    assert ready
    assert prompt >= MIN_UNCACHED_TOKENS
    assert placing.peer_token_count == left
    assert there_s <= prompt / 1_000 * (SPARING_FACTOR if running else 1.0)


@given(prompt=st.integers(1, 4_000), running=st.integers(0, 4), less=loads, more=loads)
def test_a_peer_that_is_named_when_busy_is_named_when_less_busy(
    prompt: int, running: int, less: int, more: int
) -> None:
    less, more = sorted((less, more))
    needs, at = long_prompt(prompt), decoder(running_count=running)

    busy, idler = (decide(needs, at, peer(backlog=backlog)) for backlog in (more, less))

    assert busy.peer is None or idler.peer is not None


@given(prompt=st.integers(1, 4_000), transfer_rate=rates, rate=rates)
def test_idle_and_equal_workers_are_never_worse_than_aggregated_ones(
    prompt: int, transfer_rate: int | None, rate: int | None
) -> None:
    measured = {"prefill_rate_token_count": rate} if rate else {}
    quick = {"transfer_rate_byte_count": transfer_rate} if transfer_rate else {}

    assert decide(long_prompt(prompt), decoder(**quick, **measured), peer(**measured)).peer is None
