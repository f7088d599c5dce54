"""What a client that waits is told, and how errors of it and of the answer come through."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import EngineError, SlowReader
from services.gateway import answer_sink
from services.gateway.answer_sink import pinging


async def test_a_silent_block_is_pinged_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_sink, "PING_S", 0.0)
    pings: list[int] = []
    enough = asyncio.Event()

    async def ping() -> None:
        pings.append(len(pings))
        if len(pings) == 3:
            enough.set()
            await asyncio.Event().wait()

    async with pinging(ping, 0.0):
        await enough.wait()

    assert pings == [0, 1, 2]


async def test_a_block_that_was_heard_of_is_left_alone_for_longer() -> None:
    async def ping() -> None:
        raise AssertionError("a block that says something needs no ping")

    async with pinging(ping, 0.0) as heard:
        heard()
        for _ in range(10):
            await asyncio.sleep(0)


async def test_a_ping_that_fails_ends_the_block_with_its_error() -> None:
    async def ping() -> None:
        raise SlowReader("The client reads too slowly.")

    with pytest.raises(SlowReader):
        async with pinging(ping, 0.0):
            await asyncio.Event().wait()


async def test_an_error_of_the_block_comes_out_as_it_is() -> None:
    async def ping() -> None:
        await asyncio.Event().wait()

    with pytest.raises(EngineError, match="broken"):
        async with pinging(ping, 0.0):
            raise EngineError("The engine is broken.")


async def test_a_cancelled_block_stays_cancelled() -> None:
    inside = asyncio.Event()

    async def ping() -> None:
        await asyncio.Event().wait()

    async def block() -> None:
        async with pinging(ping, 0.0):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await inside.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
