"""The outbox over crashes, torn tails, full disks and its own bounds."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.usage.v1 import usage_event_pb2

from services.common.clock import SystemClock
from services.gateway import outbox as outbox_module
from services.gateway.outbox import Outbox, OutboxError, OutboxRecord
from services.gateway.outbox_file import MAX_PAYLOAD_BYTES, pack_record, read_records


def make_record(number: int, *, padding: int = 0) -> OutboxRecord:
    event = usage_event_pb2.UsageEvent(request_id=f"request-{number:04d}", tenant="acme", user="u" * padding)
    return OutboxRecord(number, event)


def make_outbox(folder: Path, instance: str = "gateway-1", *, max_bytes: int = 1 << 20) -> Outbox:
    outbox = Outbox(folder, instance, max_bytes=max_bytes, clock=SystemClock())
    outbox.open()
    return outbox


def crash(outbox: Outbox) -> None:
    """What kill -9 leaves: the files as they are, the lock gone."""
    os.close(outbox._lock_file)
    os.close(outbox._file)
    outbox._lock_file = outbox._file = -1
    outbox._executor.shutdown()


@pytest.fixture
async def outbox(tmp_path: Path) -> AsyncIterator[Outbox]:
    outbox = make_outbox(tmp_path)
    yield outbox
    await outbox.close()


async def test_a_record_survives_a_crash_and_is_replayed_by_the_next_incarnation(tmp_path: Path) -> None:
    first = make_outbox(tmp_path)
    await asyncio.gather(*(first.append(make_record(n)) for n in range(5)))
    await first.resolve(["request-0001"])
    crash(first)

    second = make_outbox(tmp_path, "gateway-2")

    assert [r.request_id for r in second.records] == [f"request-{n:04d}" for n in (0, 2, 3, 4)]
    assert [r.computed_tokens for r in second.records] == [0, 2, 3, 4]
    assert not (tmp_path / "outbox" / "gateway-1").exists()
    crash(second)
    third = make_outbox(tmp_path, "gateway-3")
    assert len(third.records) == 4, "what was taken over is on disk again"
    await third.close()


async def test_a_torn_or_damaged_tail_loses_only_itself(tmp_path: Path) -> None:
    first = make_outbox(tmp_path)
    for number in range(3):
        await first.append(make_record(number))
    crash(first)
    (log,) = (tmp_path / "outbox" / "gateway-1").glob("*.log")
    whole = log.read_bytes()
    log.write_bytes(whole[:-3])

    second = make_outbox(tmp_path, "gateway-2")

    assert [r.request_id for r in second.records] == ["request-0000", "request-0001"]
    await second.close()


async def test_the_outbox_of_a_living_gateway_is_left_alone(tmp_path: Path) -> None:
    living = make_outbox(tmp_path)
    await living.append(make_record(1))

    other = make_outbox(tmp_path, "gateway-2")

    assert other.records == []
    assert (tmp_path / "outbox" / "gateway-1").exists()
    await other.close()
    await living.close()


async def test_one_instance_opens_its_outbox_once(outbox: Outbox, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="another process"):
        Outbox(tmp_path, "gateway-1", max_bytes=1, clock=SystemClock()).open()


async def test_it_is_full_at_its_bound_and_empty_again_when_records_are_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "SEGMENT_BYTES", 500)
    outbox = make_outbox(tmp_path, max_bytes=2_000)
    for number in range(8):
        await outbox.append(make_record(number, padding=300))
    assert outbox.full

    await outbox.resolve([r.request_id for r in outbox.records])

    assert not outbox.full
    assert outbox.records == []
    await outbox.close()


async def test_appends_at_the_same_time_share_one_sync(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = []
    fdatasync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (syncs.append(file), fdatasync(file)))

    await asyncio.gather(*(outbox.append(make_record(n)) for n in range(50)))

    assert 1 <= len(syncs) <= 2


async def test_a_full_disk_is_reported_and_the_file_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = make_outbox(tmp_path)
    await outbox.append(make_record(0))

    def no_space(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", no_space)
        with pytest.raises(OutboxError):
            await outbox.append(make_record(1))
    assert outbox.broken
    assert len(outbox.records) == 2, "it lives in memory"

    await outbox.append(make_record(2))

    assert not outbox.broken
    crash(outbox)
    second = make_outbox(tmp_path, "gateway-2")
    assert [r.request_id for r in second.records] == ["request-0000", "request-0002"]
    await second.close()


async def test_what_a_full_disk_kept_in_memory_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = make_outbox(tmp_path)

    def no_space(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", no_space)
        for number in (0, 1):
            with pytest.raises(OutboxError):
                await outbox.append(make_record(number))
        await outbox.resolve(["request-0001"])
        await outbox.mend()
        assert outbox.broken

    await outbox.mend()
    assert not outbox.broken
    crash(outbox)

    second = make_outbox(tmp_path, "gateway-2")
    assert [r.request_id for r in second.records] == ["request-0000"]
    await second.close()


async def test_with_nothing_to_write_a_mended_disk_is_noticed_too(tmp_path: Path) -> None:
    outbox = make_outbox(tmp_path)
    outbox.broken = True

    await outbox.mend()

    assert not outbox.broken
    await outbox.close()


async def test_an_empty_outbox_leaves_no_folder(tmp_path: Path) -> None:
    outbox = make_outbox(tmp_path)
    await outbox.append(make_record(1))
    await outbox.resolve(["request-0001"])

    await outbox.close()

    assert list((tmp_path / "outbox").iterdir()) == []


async def test_a_closed_outbox_with_records_keeps_them_and_frees_the_lock(tmp_path: Path) -> None:
    outbox = make_outbox(tmp_path)
    await outbox.append(make_record(1))
    await outbox.close()

    with (tmp_path / "outbox" / "gateway-1" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@given(payloads=st.lists(st.binary(min_size=1, max_size=64), max_size=8), cut=st.integers(0, 600), flip=st.integers(0))
def test_whatever_is_cut_or_flipped_a_prefix_of_whole_records_is_read(
    payloads: list[bytes], cut: int, flip: int
) -> None:
    data = bytearray(b"".join(map(pack_record, payloads)))
    if data and flip % 3 == 0:
        data[flip % len(data)] ^= 0xFF

    found = list(read_records(io.BytesIO(bytes(data[:cut]))))

    assert found == payloads[: len(found)]


def test_an_absurd_length_is_not_believed() -> None:
    huge = (MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little") + b"\0" * 4

    assert list(read_records(io.BytesIO(huge + b"x" * 100))) == []
    with pytest.raises(ValueError, match="size"):
        pack_record(b"")
