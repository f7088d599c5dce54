"""When a router hears of a worker's room: not twice, at once where it waits for it, late where it said it may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from millrace.worker.v1 import worker_service_pb2 as pb

from services.worker.view_feed import WATCH_COALESCE_S, WATCH_PERIOD_S, ViewFeed
from tests.helpers.fake_clock import FakeClock, settle

PATIENCE_S = 0.4


class Rig:
    """A feed, and what its routers heard by Watch: the numbers of the views."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.feed = ViewFeed(lambda sequence: pb.WatchResponse(sequence=sequence), self.clock)
        self.heard: dict[str, list[int]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def watch(self, router: str) -> None:
        self.tasks.append(asyncio.create_task(self._listen(router)))
        await settle()

    async def _listen(self, router: str) -> None:
        async for view in self.feed.watch(router):
            self.heard.setdefault(router, []).append(view.sequence)

    def answer(self, router: str = "router-1") -> int | None:
        view = self.feed.answer(router, PATIENCE_S)
        return view.sequence if view is not None else None


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.watch("router-1")
    yield rig
    for task in rig.tasks:
        task.cancel()


async def test_what_came_with_an_answer_is_not_told_again_but_to_others(rig: Rig) -> None:
    await rig.watch("router-2")

    rig.feed.note()
    assert rig.answer() == 3
    await rig.clock.advance(WATCH_COALESCE_S)
    assert rig.heard == {"router-1": [1], "router-2": [2, 4]}

    await rig.clock.advance(WATCH_PERIOD_S - 2 * WATCH_COALESCE_S)
    assert rig.heard["router-1"] == [1]
    await rig.clock.advance(WATCH_COALESCE_S)
    assert rig.heard["router-1"] == [1, 5]


async def test_plenty_of_room_waits_for_as_long_as_the_router_does(rig: Rig) -> None:
    rig.answer()

    rig.feed.note()
    await rig.clock.advance(PATIENCE_S - 0.001)
    rig.feed.note()
    assert rig.heard == {"router-1": [1]}
    await rig.clock.advance(0.001)
    assert rig.heard == {"router-1": [1, 3]}


async def test_what_routers_wait_for_is_told_at_once_and_takes_the_rest_along(rig: Rig) -> None:
    rig.answer()

    rig.feed.note()
    await rig.clock.advance(PATIENCE_S / 2)
    rig.feed.press()
    await rig.clock.advance(WATCH_COALESCE_S)
    assert rig.heard == {"router-1": [1, 3]}

    await rig.clock.advance(PATIENCE_S)
    assert rig.heard == {"router-1": [1, 3]}


async def test_an_answer_within_the_patience_leaves_nothing_to_tell(rig: Rig) -> None:
    rig.answer()

    rig.feed.note()
    await rig.clock.advance(PATIENCE_S / 2)
    assert rig.answer() == 3
    await rig.clock.advance(PATIENCE_S)

    assert rig.heard == {"router-1": [1]}


async def test_a_router_that_does_not_watch_gets_no_view_with_its_answers(rig: Rig) -> None:
    assert rig.answer("router-9") is None
    rig.tasks[0].cancel()
    await settle()
    assert rig.answer() is None
