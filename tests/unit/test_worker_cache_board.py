"""What a worker tells routers of its cache: everything, then changes; never a queue, never a gap unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from millrace.worker.v1 import worker_service_pb2 as pb

from services.common.block_hash import pack_truncated, unpack_truncated
from services.worker import cache_board
from services.worker.cache_board import CacheBoard
from services.worker.engine.outputs import KVEvents


def full(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(8, "little") + bytes(24) for number in numbers)


class Reader:
    """Keeps the copy that a router would have."""

    def __init__(self, board: CacheBoard) -> None:
        self._stream: AsyncIterator[pb.WatchCacheResponse] = board.watch()
        self.held: set[int] = set()
        self.messages: list[pb.WatchCacheResponse] = []

    async def read(self, count: int = 1) -> None:
        for _ in range(count):
            message = await anext(self._stream)
            if message.snapshot:
                self.held.clear()
            self.held -= set(unpack_truncated(message.removed))
            self.held |= set(unpack_truncated(message.stored))
            self.messages.append(message)


async def test_a_watcher_gets_all_that_is_cached_and_then_what_changes() -> None:
    board = CacheBoard("worker-1")
    board.update(KVEvents(stored=full(1, 2, 3), snapshot=True))
    reader = Reader(board)
    await reader.read()
    assert reader.held == {1, 2, 3}

    waiting = asyncio.create_task(reader.read(2))
    await asyncio.sleep(0)
    board.update(KVEvents(stored=full(4), removed=full(2)))
    await waiting

    assert reader.held == {1, 3, 4}
    assert [m.sequence for m in reader.messages] == [1, 2, 3]
    assert [m.snapshot for m in reader.messages] == [True, False, False]
    assert {m.worker_instance for m in reader.messages} == {"worker-1"}


async def test_an_empty_cache_is_said_too() -> None:
    reader = Reader(CacheBoard("worker-1"))

    await reader.read()

    assert reader.messages[0].snapshot
    assert reader.held == set()


async def test_a_watcher_that_fell_behind_gets_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_board, "KEPT_BATCHES", 2)
    board = CacheBoard("worker-1")
    slow, fast = Reader(board), Reader(board)
    await slow.read()
    await fast.read()

    for number in range(2):
        board.update(KVEvents(stored=full(number)))
    await fast.read(2)
    board.update(KVEvents(stored=full(2)))
    await fast.read()
    await slow.read()

    assert slow.held == fast.held == {0, 1, 2}
    assert [m.snapshot for m in slow.messages] == [True, True]
    assert [m.snapshot for m in fast.messages] == [True, False, False, False]


async def test_when_the_engine_lost_count_every_watcher_gets_all_again() -> None:
    board = CacheBoard("worker-1")
    reader = Reader(board)
    board.update(KVEvents(stored=full(1, 2)))
    await reader.read()

    board.update(KVEvents(stored=full(7), snapshot=True))
    await reader.read()

    assert reader.held == {7}


async def test_a_large_cache_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_board, "MAX_MESSAGE_HASHES", 2)
    board = CacheBoard("worker-1")
    board.update(KVEvents(stored=full(1, 2, 3, 4, 5)))
    reader = Reader(board)

    await reader.read(3)

    assert reader.held == {1, 2, 3, 4, 5}
    assert [m.snapshot for m in reader.messages] == [True, False, False]


def test_truncated_hashes_come_back_as_numbers_and_a_torn_one_is_left_out() -> None:
    assert unpack_truncated(pack_truncated(full(5, 2**64 - 1))) == (5, 2**64 - 1)
    assert unpack_truncated(pack_truncated(full(5, 6))[:-1]) == (5,)
