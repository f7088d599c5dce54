"""Contract R4 and M3 on a live stack: whatever is asked, stream, whole answer and gRPC say and count the same."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc

from tests.helpers.door_answers import Outcome, ask_grpc, ask_stream, ask_whole
from tests.helpers.four_services import KEY, FourServices, running_services
from tests.helpers.redis import RedisProcess
from tests.helpers.seeded_model import seeded_config, seeded_model, tokenizer
from tests.helpers.three_doors import Case, make_case

AT_ONCE = 8
METADATA = (("authorization", f"Bearer {KEY}"),)


async def outcomes(redis: RedisProcess, folder: Path, seeds: Sequence[int]) -> Counter[str]:
    """Ask each case at each door and compare; returns how many cases ended in which way."""
    config = seeded_config(redis.url)
    async with (
        running_services(redis.url, folder, worker_config=config, model=seeded_model(config)) as services,
        grpc.aio.insecure_channel(services.gateway.grpc_address) as channel,
    ):
        stub: pb_grpc.GatewayServiceAsyncStub = pb_grpc.GatewayServiceStub(channel)  # type: ignore[assignment]
        room = asyncio.Semaphore(AT_ONCE)

        async def one(seed: int) -> str:
            async with room:
                return await compare(make_case(seed), services, stub)

        return Counter(await asyncio.gather(*map(one, seeds)))


async def compare(case: Case, services: FourServices, stub: pb_grpc.GatewayServiceAsyncStub) -> str:
    doors = {
        "whole": lambda: ask_whole(services.client, case),
        "stream": lambda: ask_stream(services.client, case),
        "grpc": lambda: ask_grpc(stub, case, METADATA),
    }
    order = random.Random(case.seed).sample(sorted(doors), 3)
    got = {door: await doors[door]() for door in order}
    about = f"make_case({case.seed}): {case.body}\n" + "\n".join(f"{door}: {made}" for door, made in got.items())
    assert got["whole"] == got["stream"] == got["grpc"], about
    # The first of them filled the prefix cache for the others. Logprobs of a prompt are never taken from it.
    if not (case.body.get("echo") and "logprobs" in case.body):
        first, second, third = (got[door].cached_tokens for door in order)
        assert first <= second == third <= got["grpc"].prompt_tokens, about
    if got["grpc"].error is None:
        check_answer(case, got["whole"], got["stream"], got["grpc"], about)
    return got["grpc"].error[0] if got["grpc"].error else got["grpc"].choices[0].finish


def check_answer(case: Case, whole: Outcome, stream: Outcome, called: Outcome, about: str) -> None:
    assert len(called.choices) == case.body.get("n", 1), about
    assert called.completion_tokens == sum(len(said.token_ids) for said in called.choices), about
    for over_http, streamed, said in zip(whole.choices, stream.choices, called.choices, strict=True):
        assert over_http.offsets == streamed.offsets, about
        assert not said.logprobs or len(said.logprobs) == len(said.token_ids), about
        assert not case.body.get("stop_token_ids") or said.finish != "length" or said.token_ids, about
        if not case.chat:
            assert tokenizer().decode(said.token_ids).startswith(said.text.rstrip("\ufffd")), about
        if case.body.get("min_tokens", 0) <= 1:
            assert not any(stop in said.text for stop in case.body.get("stop", ())), about


async def test_sixty_requests_are_answered_alike_at_every_door(redis_server: RedisProcess, tmp_path: Path) -> None:
    ways = await outcomes(redis_server, tmp_path, range(60))

    assert {"stop", "length", "tool_calls", "INVALID_REQUEST"} <= set(ways), ways


@pytest.mark.fault
@pytest.mark.timeout(600)
async def test_five_hundred_requests_are_answered_alike_at_every_door(
    redis_server: RedisProcess, tmp_path: Path
) -> None:
    ways = await outcomes(redis_server, tmp_path, range(500))

    answered = {"stop", "length", "tool_calls"}
    refused = {"INVALID_REQUEST", "CONTEXT_LENGTH_EXCEEDED", "MODEL_NOT_FOUND", "ENGINE_ERROR"}
    assert answered | refused <= set(ways), ways
    assert sum(ways[way] for way in answered) > 350, ways
