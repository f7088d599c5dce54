"""Exports over the wire: nothing lost between cursors, every format whole, and every changed byte found and named."""

from __future__ import annotations

import asyncio
import functools
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import Result
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc
from typer.testing import CliRunner

from cli.main import app as millrace
from cli.usage_files import FORMAT_NAMES
from cli.usage_verify import Tampered, verify_file
from services.common.errors import InvalidRequest
from services.common.grpc_client import open_channel
from services.usage.config import UsageConfig
from services.usage.exports import decode_cursor, encode_cursor
from services.usage.ledger import insert_entries
from services.usage.seals import KEY_FILE, open_signer
from services.usage.selection import Selection
from services.usage.store import Store, open_store
from services.usage.wiring import UsageApp, build
from tests.helpers.redis import RedisProcess
from tests.helpers.usage import START, insert, make_entry, make_event, parse

ROWS = 40
TOKEN = "root-token-for-tests"
ROOT = (("authorization", f"Bearer {TOKEN}"),)


@pytest.fixture
async def app(store: Store, database_url: str, redis_server: RedisProcess, tmp_path: Path) -> AsyncIterator[UsageApp]:
    config = UsageConfig(
        redis_url=redis_server.url, database_url=database_url, data_dir=str(tmp_path / "data"), admin_token=TOKEN
    )
    running = build(config)
    await running.start()
    yield running
    await running.drain(1.0)
    await running.stop()


async def run(app: UsageApp, *arguments: str) -> Result:
    """One command, in a thread of its own: it runs its own loop."""
    argv = ["usage", *arguments, "--usage-address", app.address]
    return await asyncio.to_thread(CliRunner().invoke, millrace, argv, env={"MILLRACE_ADMIN_TOKEN": TOKEN})


def fill(store: Store, count: int = ROWS) -> None:
    made = []
    for number in range(count):
        event = make_event(f"r{number:03}", "ab"[number % 2], prompt=100 + number)
        event.user = ("plain", "=formula", 'quo"te, and\nline', "'apostrophe")[number % 4]
        event.metadata["team"] = f"team-{number % 3}"
        made.append(parse(event))
    insert(store, made)


async def test_exports_by_cursor_while_others_insert_give_each_row_once(
    app: UsageApp, store: Store, database_url: str
) -> None:
    writers = [open_store(database_url) for _ in range(3)]
    seen: list[int] = []

    async def write(writer: Store, name: str) -> None:
        for number in range(15):
            entries = [make_entry(f"{name}-{number}-{n}") for n in range(3)]
            await writer.write(functools.partial(insert_entries, entries=entries, now=START))

    async def read(cursor: str) -> str:
        async with open_channel(app.address) as channel:
            request = pb.ExportUsageRequest(cursor=cursor)
            async for page in pb_grpc.UsageServiceStub(channel).ExportUsage(request, metadata=ROOT):
                seen.extend(row.row_id for row in page.rows)
                cursor = page.cursor
        return cursor

    tasks = [asyncio.create_task(write(writer, f"w{n}")) for n, writer in enumerate(writers)]
    cursor = ""
    while not all(task.done() for task in tasks):
        cursor = await read(cursor)
    await asyncio.gather(*tasks)
    await read(cursor)
    for writer in writers:
        writer.close()

    assert seen == list(range(1, 3 * 15 * 3 + 1))


def test_a_cursor_is_refused_where_it_does_not_belong() -> None:
    cursor = encode_cursor(7, Selection("acme"))

    assert decode_cursor(cursor, Selection("acme")) == 7
    assert decode_cursor(cursor, Selection("acme", start=START)) == 7
    for text, chosen in ((cursor, Selection("zeta")), ("", Selection()), ("nonsense", Selection()), ("é", Selection())):
        with pytest.raises(InvalidRequest) as caught:
            decode_cursor(text, chosen)
        assert caught.value.param == "cursor"


async def test_an_export_goes_on_where_its_state_file_says(app: UsageApp, store: Store, tmp_path: Path) -> None:
    fill(store, 5)
    state = str(tmp_path / "cursor")
    counts = []
    for number, late in enumerate((False, False, True)):
        if late:
            insert(store, [make_entry("late")])
        path = tmp_path / f"{number}.jsonl"
        done = await run(app, "export", "--format", "jsonl", "--output", str(path), "--state", state)
        assert done.exit_code == 0, done.output
        counts.append(verify_file(path, None, None).row_count)
    other = await run(app, "export", "--tenant", "a", "--state", state)

    assert counts == [5, 0, 1]
    assert other.exit_code == 2
    assert "another selection" in other.stderr


@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_every_flipped_byte_of_every_format_is_found_and_a_row_is_named(
    app: UsageApp, store: Store, tmp_path: Path, format: str
) -> None:
    fill(store)
    path = tmp_path / f"usage.{format}"
    done = await run(app, "export", "--format", format, "--output", str(path))
    assert done.exit_code == 0, done.output
    whole = path.read_bytes()
    assert verify_file(path, None, app.days.public_key).row_count == ROWS
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []

    named = 0
    places = range(3, len(whole), max(1, len(whole) // 60))
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x01]) + whole[place + 1 :])
        with pytest.raises(Tampered) as caught:
            verify_file(path, None, None)
        named += "Row " in str(caught.value)

    if format != "parquet":
        # All but the bytes of a header line belong to a row.
        assert named >= len(places) - 8
    path.write_bytes(whole)
    verify_file(path, None, None)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_missing_swapped_and_added_rows_and_foreign_seals_are_named(
    app: UsageApp, store: Store, tmp_path: Path
) -> None:
    fill(store)
    path = tmp_path / "usage.jsonl"
    await run(app, "export", "--format", "jsonl", "--output", str(path))
    lines = path.read_text().splitlines(keepends=True)
    beside = tmp_path / "usage.jsonl.seal"
    seals = beside.read_text().splitlines(keepends=True)

    def finding(rows: list[str], digests: list[str] = seals, key: bytes | None = None) -> str:
        path.write_text("".join(rows))
        beside.write_text("".join(digests))
        with pytest.raises(Tampered) as caught:
            verify_file(path, None, key)
        return str(caught.value)

    assert finding(lines[:6] + lines[7:]) == "Row 7 is missing."
    assert finding([lines[1], lines[0], *lines[2:]]) == "Row 1 is missing."
    assert finding(lines[:-1]) == f"Row {ROWS} is missing or cannot be read."
    assert "after the last one" in finding([*lines, lines[0]])
    assert "its signature" in finding(lines[:-1], [*seals[:-2], seals[-1]])
    assert "not a seal" in finding(lines, seals[:-1])
    assert "another key" in finding(lines, key=b"\x00" * 32)


async def seal_a_day(app: UsageApp, store: Store, count: int = ROWS) -> None:
    fill(store, count)
    # The service's own loop may have been faster.
    await app.days.seal_next()
    seal, finding = await app.days.verify(START.date())
    assert (seal.row_count, finding) == (count, None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("UPDATE ledger SET billed_completion_tokens = 0 WHERE row_id = 7", "Row 7 is altered."),
        ("UPDATE ledger SET tenant = 'b' WHERE row_id = 9", "Row 9 is altered."),
        ("DELETE FROM ledger WHERE row_id IN (5, 7)", "Row 5 is missing."),
        (f"DELETE FROM ledger WHERE row_id = {ROWS}", f"Row {ROWS} is missing."),
        ("UPDATE day_seals SET row_count = 1", "not signed by this service's key"),
        ("UPDATE seal_digests SET digests = substr(digests, 17)", "The digests beside the seal are altered"),
    ],
)
async def test_what_changes_in_a_sealed_day_is_named(app: UsageApp, store: Store, change: str, text: str) -> None:
    await seal_a_day(app, store)
    intact = await run(app, "verify", "--day", "2026-03-01")

    store.write_sync(lambda c: c.execute(sa.text(change)))
    found = await run(app, "verify", "--day", "2026-03-01")

    assert intact.exit_code == 0, intact.output
    assert found.exit_code == 1
    assert text in found.stderr


async def test_days_are_chained_and_only_sealed_once_they_are_over(app: UsageApp, store: Store) -> None:
    await seal_a_day(app, store, 3)
    insert(store, [make_entry("next")], now=START.replace(day=2))
    second = await app.days.seal_next()
    assert second is not None
    assert (second.after_row_id, second.last_row_id) == (3, 4)
    assert await app.days.seal_next() is None

    store.write_sync(lambda c: c.execute(sa.text("DELETE FROM day_seals WHERE after_row_id = 0")))
    found = await run(app, "verify", "--day", "2026-03-02")
    unsealed = await run(app, "verify", "--day", "2026-03-03")

    assert "The day sealed before this one is altered or missing." in found.stderr
    assert unsealed.exit_code == 2
    assert "not sealed" in unsealed.stderr


def test_the_signing_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    first = open_signer(tmp_path / "data")
    again = open_signer(tmp_path / "data")

    assert first.public_key == again.public_key
    assert stat.S_IMODE((tmp_path / "data" / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "data").iterdir()] == [KEY_FILE]
