"""A worker that leaves hands its running requests over: blocks move, tokens go on, and the drain ends in its grace."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from millrace.common.v1 import admission_pb2

from services.worker import wiring
from services.worker.config import WorkerConfig, WorkerRole
from services.worker.engine.outputs import SchedulerOutput
from tests.helpers.four_services import FourServices, running_services
from tests.helpers.peers import Pair, fallbacks, pair_of_workers, peer_config, stats_of
from tests.helpers.redis import RedisProcess
from tests.helpers.transcripts import ECHO_TOKEN
from tests.helpers.waiting import WAIT_S, until
from tests.helpers.worker import GatewayClient, RememberingStore, WorkerRig, echo_tokens, entry

pytestmark = pytest.mark.fault

# A lease that no stall of a busy machine outlasts, but where a peer's silence is what is tested.
PATIENT = peer_config(WorkerRole.AGGREGATED, kv_lease_ms=round(WAIT_S * 1000))
HASTY = peer_config(WorkerRole.AGGREGATED, kv_lease_ms=300)
TOKENS, BLOCK = 300, 16


def slowly(_: SchedulerOutput) -> None:
    time.sleep(0.005)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the grace is for the hand-over: nobody waits for running answers."""
    monkeypatch.setattr(wiring, "HAND_OVER_SHARE", 1.0)
    monkeypatch.setattr(wiring, "HAND_OVER_S", WAIT_S)


@pytest.fixture
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """`pair.prefill` is the worker that leaves, `pair.decode` takes over."""
    config = getattr(request, "param", PATIENT)
    async with pair_of_workers(prefill=config, decode=config, prefill_steps=slowly) as made:
        yield made


async def running(pair: Pair, works: list[admission_pb2.AdmissionEntry]) -> GatewayClient:
    """The gateway at the leaving worker, once each request has some tokens."""
    gateway = await pair.prefill.gateway()
    await until(lambda: pair.prefill.app.parts.table.is_attached("gateway-1"))
    for work in works:
        assert (await gateway.submit(work)).accepted
    await gateway.until(lambda: all(len(gateway.of(work.request_id).tokens.get(0, ())) >= 20 for work in works))
    return gateway


async def given_up(gateway: GatewayClient, works: list[admission_pb2.AdmissionEntry]) -> None:
    await gateway.until(lambda: all(gateway.of(work.request_id).failed for work in works))
    failures = [gateway.of(work.request_id).failed for work in works]
    assert {(each.reason, each.retryable) for each in failures if each is not None} == {("DRAINING", True)}


async def take_over(pair: Pair, gateway: GatewayClient, works: list[admission_pb2.AdmissionEntry]) -> list[int]:
    """Go on with what was received, as gateway and router do, to the end; how many tokens each request had by then."""
    known = []
    for work in works:
        received = gateway.of(work.request_id).tokens[0]
        again = admission_pb2.AdmissionEntry()
        again.CopyFrom(work)
        again.attempt = 2
        again.prefix.add(choice=0, token_ids=received)
        pair.gateway.of(work.request_id).tokens[0] = list(received)
        await pair.submit(again, epoch=512)
        known.append(len(work.token_ids) + len(received))
    await pair.gateway.finished(*(work.request_id for work in works))
    for work in works:
        held = pair.gateway.of(work.request_id)
        assert (held.failed, held.problems) == (None, [])
        assert held.tokens[0] == echo_tokens(work.request_id, 0, TOKENS)
    return known


def requests(*lengths: int) -> list[admission_pb2.AdmissionEntry]:
    return [
        entry(f"r{number}", prompt=range(1_000 * number, 1_000 * number + length), max_tokens=TOKENS)
        for number, length in enumerate(lengths, start=1)
    ]


async def test_only_the_last_part_of_a_block_is_computed_again(pair: Pair) -> None:
    works = requests(70, 96, 133)
    gateway = await running(pair, works)
    computed = {rig.app.instance: stats_of(rig).prefill_token_total for rig in (pair.prefill, pair.decode)}
    drain = asyncio.create_task(pair.prefill.app.drain(WAIT_S))

    await given_up(gateway, works)
    known = await take_over(pair, gateway, works)
    async with asyncio.timeout(WAIT_S):
        await drain

    # One token that is left to compute counts as decoded.
    rests = [count % BLOCK for count in known]
    assert pair.decode_stats().prefill_token_total - computed[pair.decode.app.instance] == sum(
        rest for rest in rests if rest > 1
    )
    assert stats_of(pair.prefill).prefill_token_total - computed[pair.prefill.app.instance] <= BLOCK * len(works)
    assert pair.decode_stats().transfer.imported_block_total == sum(count // BLOCK for count in known)
    assert fallbacks(pair.decode) == {}
    await pair.assert_nothing_is_held()
    await gateway.close()


async def test_what_is_taken_over_is_not_offered_twice(pair: Pair) -> None:
    works = requests(70)
    gateway = await running(pair, works)
    drain = asyncio.create_task(pair.prefill.app.drain(WAIT_S))
    await given_up(gateway, works)
    await take_over(pair, gateway, works)
    async with asyncio.timeout(WAIT_S):
        await drain
    other = requests(70, 80)[1:]

    await pair.submit(other[0], epoch=512)
    await pair.gateway.finished(other[0].request_id)

    assert fallbacks(pair.decode) == {"refused_wrong_role": 1}
    await pair.assert_nothing_is_held()
    await gateway.close()


@pytest.mark.parametrize(
    ("pair", "cause"),
    [
        pytest.param(PATIENT, "nobody_asks", id="nobody_asks"),
        pytest.param(HASTY, "nobody_is_heard", id="nobody_is_heard"),
    ],
    indirect=["pair"],
)
async def test_a_drain_ends_though_nobody_fetches_and_the_rest_is_computed_again(pair: Pair, cause: str) -> None:
    works = requests(70, 96)
    gateway = await running(pair, works)
    if cause == "nobody_is_heard":
        pair.link.strike("silence")

    async with asyncio.timeout(WAIT_S):
        await pair.prefill.app.drain(0.3)
    await given_up(gateway, works)
    await take_over(pair, gateway, works)

    expected = "silent" if cause == "nobody_is_heard" else "refused_wrong_role"
    assert fallbacks(pair.decode) == {expected: 2}
    pair.link.heal()
    await pair.assert_nothing_is_held()
    await gateway.close()


async def streamed(services: FourServices, prompt: str, seen: list[int]) -> str:
    """Ask, add tokens to `seen` as they come, and return the request's id."""
    body = {"model": "echo", "prompt": prompt, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    async with services.client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text = "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
                seen += map(int, ECHO_TOKEN.findall(text))
        return response.headers["x-request-id"]


async def test_streams_of_a_drained_worker_go_on_from_its_blocks(redis_server: RedisProcess, tmp_path: Path) -> None:
    config = WorkerConfig(redis_url=redis_server.url, model="echo", echo_step_ms=10)
    async with running_services(redis_server.url, tmp_path, worker_config=config, others=[(config, None)]) as services:
        seen: list[list[int]] = [[] for _ in range(6)]
        tasks = [asyncio.create_task(streamed(services, f"{n} " * 90, each)) for n, each in enumerate(seen)]
        await until(lambda: all(len(each) >= 20 for each in seen))
        handed_over = len(services.worker.parts.table.unfinished())
        async with asyncio.timeout(WAIT_S):
            await services.worker.drain(WAIT_S)
        names = await asyncio.gather(*tasks)

        taken = WorkerRig(services.others[0], RememberingStore())
        assert handed_over > 0
        assert stats_of(taken).transfer.imported_block_total >= handed_over
        assert fallbacks(taken) == {}
        assert seen == [echo_tokens(name, 0, TOKENS) for name in names]
