"""Real keys and values that leave the pool and come back: what the model says stays the same to the token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.engine.kv_blocks import KVLayout
from services.worker.engine.request import RequestKey
from services.worker.runtime.tier_store import TierStore
from tests.helpers.model import ModelRig
from tests.helpers.tiers import make_tiers, settle
from tests.integration.test_model_metamorphic import LONG, SAMPLINGS, alone, each_sampling

pytestmark = [pytest.mark.model, pytest.mark.slow]
LENGTH = 6
# As long as the prompt under test, and so all that the pool can hold.
OTHER = LONG[::-1]


class Worker:
    """A rig whose pool holds one long request at a time, over tiers that outlive it on disk."""

    def __init__(self, name: str, *, host_blocks: int, path: Path | None = None) -> None:
        self._sampling = SAMPLINGS[name]
        self.stores: list[TierStore] = []
        self._host_blocks, self._path = host_blocks, path
        self.rig = ModelRig(num_blocks=7, tiers=self._tiers, max_prefill_chunk=48)

    def _tiers(self, layout: KVLayout) -> TierStore:
        store = make_tiers(layout, host_blocks=self._host_blocks, disk_blocks=64, path=self._path)
        self.stores.append(store)
        return store

    def say(self, request_id: str, prompt: tuple[int, ...], count: int = LENGTH) -> tuple[tuple[int, ...], int]:
        """What a request says, and how much of its prompt was cached."""
        rig = self.rig
        rig.add(request_id, prompt, sampling=dataclasses.replace(self._sampling, max_tokens=count), salt=b"tenant")
        settle(rig.step, lambda: not rig.engine.has_work())
        rig.run()
        assert rig.engine.stats(rig.now).held_block_count == 0
        return tuple(rig.tokens(request_id)), rig.outputs[RequestKey(request_id, 0, 1)][0].cached_token_count

    def restored(self) -> tuple[int, int, int]:
        """Tokens from host memory, tokens from disk, blocks dropped."""
        stats = self.rig.engine.stats(self.rig.now).tiers
        return stats.host_hit_token_total, stats.disk_hit_token_total, stats.dropped_block_total

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """Workers started by the test; their disks' threads end with it."""
    started: list[Worker] = []
    yield started
    for worker in started:
        worker.close()


@each_sampling
def test_a_prompt_restored_from_memory_is_answered_as_if_it_were_new(name: str) -> None:
    worker = Worker(name, host_blocks=32)
    worker.say("cold", LONG, 1)
    worker.say("other", OTHER, 1)

    warm, cached = worker.say("warm", LONG)

    assert warm == alone(name, LONG)[:LENGTH]
    assert (cached, worker.restored()) == (96, (96, 0, 0))


@each_sampling
def test_a_prompt_restored_from_disk_after_a_restart_is_answered_as_if_it_were_new_and_spoilt_files_are_not_used(
    name: str, workers: list[Worker], tmp_path: Path
) -> None:
    first = Worker(name, host_blocks=1, path=tmp_path)
    workers.append(first)
    first.say("cold", LONG, 1)
    first.say("other", OTHER, 1)
    first.say("again", LONG, 1)
    first.say("other again", OTHER, 1)
    first.close()
    second = Worker(name, host_blocks=0, path=tmp_path)
    workers.append(second)
    warm, cached = second.say("warm", LONG)
    second.close()
    for file in tmp_path.glob("*.kv"):
        raw = bytearray(file.read_bytes())
        raw[-1000] ^= 0x40
        file.write_bytes(raw)

    third = Worker(name, host_blocks=0, path=tmp_path)
    workers.append(third)
    after, cached_after = third.say("after", LONG)

    assert warm == after == alone(name, LONG)[:LENGTH]
    assert (cached, second.restored()) == (96, (0, 96, 0))
    assert (cached_after, third.restored()) == (0, (0, 0, 1))
