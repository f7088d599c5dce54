"""Pages of the ledger in the order of insertion, and the opaque cursor with which an export goes on.

Row ids are handed out under the head's lock, so they become visible in their order and without gaps: a cursor never
skips a row that commits late. Pages are short transactions by key, not one long server-side cursor: memory stays as
flat, and a slow reader holds back neither vacuum nor a write-ahead log.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import struct
from collections.abc import AsyncIterator

import sqlalchemy as sa
from millrace.usage.v1 import usage_service_pb2 as pb

from services.common.errors import InvalidRequest
from services.usage.events import EPOCH
from services.usage.ledger import RowFilter, StoredRow, read_rows
from services.usage.records import digest_of_record, record_of
from services.usage.selection import Selection
from services.usage.store import Store

PAGE_ROWS = 500
CURSOR = struct.Struct(">BQ8s")
CURSOR_VERSION = 1


async def export_pages(
    store: Store, chosen: Selection, after: int, until: int
) -> AsyncIterator[pb.ExportUsageResponse]:
    """Rows of `chosen` with ids in (after, until], each with the digest of its record; nothing else is set."""
    while after < until:
        wanted = RowFilter(chosen, after_row_id=after, last_row_id=until)
        page = await store.read(functools.partial(_read_page, wanted=wanted))
        if not page.rows:
            return
        after = page.rows[-1].row_id
        yield page


def ledger_row(row: StoredRow) -> pb.LedgerRow:
    """One row as the wire has it."""
    made = pb.LedgerRow()
    _fill(made, row)
    return made


def _fill(made: pb.LedgerRow, row: StoredRow) -> None:
    since = row.insert_time - EPOCH
    made.row_id = row.row_id
    made.insert_time.seconds, made.insert_time.nanos = since.days * 86_400 + since.seconds, since.microseconds * 1_000
    # Read where it belongs: a message that is handed over is copied.
    made.event.MergeFromString(row.event)


def subject_of(chosen: Selection) -> str:
    """What a seal of an export says was selected, in one line."""
    return "export " + json.dumps(_values(chosen), sort_keys=True)


def encode_cursor(row_id: int, chosen: Selection) -> str:
    """The place after `row_id` in the export of this selection."""
    return base64.urlsafe_b64encode(CURSOR.pack(CURSOR_VERSION, row_id, _mark(chosen))).decode().rstrip("=")


def decode_cursor(text: str, chosen: Selection) -> int:
    """The row id of a cursor. Raises InvalidRequest for what `encode_cursor` did not make for this selection."""
    try:
        version, row_id, mark = CURSOR.unpack(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (binascii.Error, struct.error, ValueError):
        raise InvalidRequest("The cursor is not one of this service's.", param="cursor") from None
    if version != CURSOR_VERSION or row_id >= 2**63:
        raise InvalidRequest("The cursor is not one of this service's.", param="cursor")
    if mark != _mark(chosen):
        raise InvalidRequest("The cursor belongs to an export with another selection.", param="cursor")
    return int(row_id)


def _read_page(connection: sa.Connection, wanted: RowFilter) -> pb.ExportUsageResponse:
    page = pb.ExportUsageResponse()
    for stored in read_rows(connection, wanted, PAGE_ROWS):
        row = page.rows.add()
        _fill(row, stored)
        page.digests.append(digest_of_record(record_of(row)))
    return page


def _mark(chosen: Selection) -> bytes:
    # The time range may move between two exports; whose rows they are may not.
    values = {name: value for name, value in _values(chosen).items() if name not in ("start", "end")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()[:8]


def _values(chosen: Selection) -> dict[str, object]:
    return {
        "tenant": chosen.tenant,
        "project": chosen.project,
        "key": chosen.key_id,
        "model": chosen.model,
        "version": chosen.version,
        "metadata": dict(chosen.tags),
        "start": None if chosen.start is None else chosen.start.isoformat(),
        "end": None if chosen.end is None else chosen.end.isoformat(),
    }
