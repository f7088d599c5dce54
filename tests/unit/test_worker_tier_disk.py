"""The folder of the disk tier: what it takes over, what it refuses to touch, and what turns it off."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.clock import SystemClock
from services.worker.engine.kv_blocks import KVBlock, KVLayout, sealed
from services.worker.engine.request import RequestKey
from services.worker.runtime import tier_file
from services.worker.runtime.tier_disk import DiskTier
from services.worker.runtime.tier_file import FileFormat, SpoiltFileError
from tests.helpers.engine import EngineRig, make_request, make_spec, prompt
from tests.helpers.tiers import make_tiers, settle

LAYOUT = KVLayout("float32", (2, 4), 4)
FORM = FileFormat(LAYOUT, "m@1")
KEY = RequestKey("r", 0, 1)


def block(number: int) -> KVBlock:
    return sealed(bytes([number]) * 32, bytes([number]) * LAYOUT.block_bytes, LAYOUT)


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Opens tiers on the test's folder; those still open are closed with the test."""
    opened: list[DiskTier] = []

    def make(*, blocks: int = 8, form: FileFormat = FORM, path: Path = tmp_path) -> DiskTier:
        opened.append(DiskTier(path, form, capacity_bytes=blocks * form.file_bytes, clock=SystemClock()))
        return opened[-1]

    yield make
    for disk in opened:
        disk.close()


def keep(disk: DiskTier, *numbers: int) -> None:
    """Have blocks written, all of them."""
    for number in numbers:
        disk.put(block(number))
    disk.close()


def read(disk: DiskTier, *numbers: int) -> list[int]:
    """Which of the blocks come back."""
    hashes = [block(number).full_hash for number in numbers]
    disk.read(KEY, hashes)
    settle(lambda: None, lambda: not disk.is_reading(KEY))
    found = disk.take_read(KEY)
    assert all(found[full_hash] == block(full_hash[0]) for full_hash in found)
    return [full_hash[0] for full_hash in hashes if full_hash in found]


def test_what_was_written_is_found_by_the_next_worker(open_disk: Callable[..., DiskTier]) -> None:
    keep(open_disk(), 1, 2, 3)

    disk = open_disk()

    assert read(disk, 1, 2, 3, 4) == [1, 2, 3]
    assert disk.stats().size == 3 * FORM.file_bytes
    assert disk.stats().dropped_total == 0


def test_files_never_take_more_than_their_bytes(open_disk: Callable[..., DiskTier], tmp_path: Path) -> None:
    keep(open_disk(blocks=3), 1, 2, 3, 4, 5)
    assert len(list(tmp_path.glob("*.kv"))) == 3

    smaller = open_disk(blocks=2)

    assert smaller.stats().size == 2 * FORM.file_bytes
    assert len(list(tmp_path.glob("*.kv"))) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: b"",
        lambda raw: bytes(len(raw)),
        lambda raw: raw[:20] + bytes([raw[20] ^ 1]) + raw[21:],
    ],
    ids=["short", "long", "empty", "zeros", "header"],
)
def test_a_torn_file_is_dropped_at_the_start(
    open_disk: Callable[..., DiskTier], tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    keep(open_disk(), 1, 2)
    path = tmp_path / tier_file.name_of(block(1).full_hash)
    path.write_bytes(damage(path.read_bytes()))

    disk = open_disk()

    assert read(disk, 1, 2) == [2]
    assert disk.stats().dropped_total == 1
    assert not path.exists()


@pytest.mark.parametrize(
    "other", [FileFormat(LAYOUT, "m@2"), FileFormat(KVLayout("float32", (4, 2), 4), "m@1")], ids=["version", "layout"]
)
def test_blocks_of_another_model_or_layout_are_dropped(open_disk: Callable[..., DiskTier], other: FileFormat) -> None:
    keep(open_disk(), 1)

    disk = open_disk(form=other)

    assert read(disk, 1) == []
    assert disk.stats().dropped_total == 1


def test_a_file_under_another_blocks_name_is_dropped(open_disk: Callable[..., DiskTier], tmp_path: Path) -> None:
    keep(open_disk(), 1)
    (tmp_path / tier_file.name_of(block(1).full_hash)).rename(tmp_path / tier_file.name_of(block(2).full_hash))

    disk = open_disk()

    assert read(disk, 1, 2) == []
    assert disk.stats().dropped_total == 1


def test_a_link_or_a_pipe_in_the_place_of_a_file_is_not_followed(
    open_disk: Callable[..., DiskTier], tmp_path: Path
) -> None:
    keep(open_disk(), 1)
    path = tmp_path / tier_file.name_of(block(1).full_hash)
    secret = tmp_path / "elsewhere"
    path.rename(secret)
    path.symlink_to(secret)
    os.mkfifo(tmp_path / tier_file.name_of(block(2).full_hash))

    disk = open_disk()

    assert read(disk, 1, 2) == []
    assert disk.stats().dropped_total == 2
    assert secret.exists()


def test_files_that_are_not_ours_stay_and_unfinished_ones_go(
    open_disk: Callable[..., DiskTier], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{'0' * 63}.kv").write_text("mine too")
    (tmp_path / f"{'0' * 64}.tmp").write_text("left by a crash")

    open_disk()

    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{'0' * 63}.kv", "millrace-kv.lock", "notes.txt"]


def test_a_file_that_changes_after_the_start_is_dropped_when_read(
    open_disk: Callable[..., DiskTier], tmp_path: Path
) -> None:
    keep(open_disk(), 1, 2)
    disk = open_disk()
    (tmp_path / tier_file.name_of(block(1).full_hash)).write_bytes(b"torn")
    (tmp_path / tier_file.name_of(block(2).full_hash)).unlink()

    assert read(disk, 1, 2) == []
    assert disk.stats().dropped_total == 2
    assert not disk.has(block(1).full_hash)


def test_a_second_worker_on_the_folder_goes_without(open_disk: Callable[..., DiskTier]) -> None:
    first, second = open_disk(), open_disk()

    second.put(block(1))

    assert (first.stats().is_on, second.stats().is_on) == (True, False)
    assert not second.has(block(1).full_hash)


def test_a_full_disk_turns_the_tier_off_and_serving_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tier_file, "write_block", full)
    spec = make_spec(num_blocks=8)
    layout = KVLayout("uint64", (4,), 8)
    tiers = make_tiers(layout, disk_blocks=64, path=tmp_path)
    rig = EngineRig(spec=spec, tiers=tiers)
    for number in range(3):
        rig.add(make_request(f"r{number}", prompt(28, seed=number), max_tokens=2))
        rig.run()
    settle(lambda: None, lambda: not tiers.stats().disk_on)

    rig.add(make_request("after", prompt(28), max_tokens=2))
    rig.run()
    tiers.close()

    assert len(rig.token_ids("after")) == 2
    assert tiers.stats().disk_bytes == 0
    assert list(tmp_path.glob("*.kv")) == []


def test_a_path_that_cannot_be_a_folder_turns_the_tier_off(open_disk: Callable[..., DiskTier], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert not open_disk(path=tmp_path / "file").stats().is_on


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "rename", refuse)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="input/output"):
            tier_file.write_block(folder, block(1), FORM)
        with pytest.raises((OSError, SpoiltFileError)):
            tier_file.read_block(folder, block(1).full_hash, FORM)
    finally:
        os.close(folder)
    assert list(tmp_path.iterdir()) == []
