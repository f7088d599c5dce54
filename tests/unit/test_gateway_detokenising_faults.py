"""A fault while the tokens of one request become text is that request's own."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import cast

from millrace.common.v1 import common_pb2

from services.gateway.tokenizer import Tokenizer
from tests.helpers.echo_generation import LENGTH, FakeGenerator, Step, front, one_by_one, served, tokens

BROKEN = 66


class FaultyTokenizer:
    """As the tokenizer inside, but for one id whose bytes cannot be had."""

    def __init__(self, inside: Tokenizer) -> None:
        self._inside = inside

    def __getattr__(self, name: str) -> object:
        return getattr(self._inside, name)

    def visible_bytes(self, token_id: int) -> bytes:
        if token_id == BROKEN:
            raise ZeroDivisionError("injected")
        return self._inside.visible_bytes(token_id)


async def test_a_fault_in_one_requests_text_ends_that_request_alone() -> None:
    plain = served()
    model = dataclasses.replace(plain, tokenizer=cast("Tokenizer", FaultyTokenizer(plain.tokenizer)))
    go = asyncio.Event()
    neighbour_steps: list[Step] = [tokens([72]), go, tokens([73], first=1, finish=LENGTH)]
    broken_steps: list[Step] = [*one_by_one([65, BROKEN])]
    generator = FakeGenerator(
        lambda request: broken_steps if request.prompt_token_ids[0] == ord("b") else neighbour_steps
    )
    door = front(generator, model)

    neighbour = asyncio.create_task(door.complete(prompt="good", max_tokens=2))
    await generator.starting.wait()
    broken = await door.complete(prompt="bad", max_tokens=2)
    go.set()
    answer = await neighbour

    assert (broken.status, answer.status) == (500, 200)
    assert "injected" not in broken.body.decode()
    assert answer.json()["choices"][0]["text"] == "HI"
    good, bad = generator.generations
    assert [ending[0] for ending in good.endings] == [common_pb2.TERMINAL_STATE_COMPLETED]
    assert [ending[0] for ending in bad.endings] == [common_pb2.TERMINAL_STATE_FAILED]
