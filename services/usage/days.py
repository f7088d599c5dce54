"""Seals each UTC day of the ledger, chained to the day before, and finds the first row that is not as it was sealed.

A seal covers a run of row ids without gaps: all that was inserted until the day was over and not sealed before. Beside
the seal lies a digest of every row, itself under the signature, so that verification can name rows.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import IntegrityError

from services.common.clock import Clock
from services.common.errors import NotFound, StoreUnavailable
from services.usage import schema
from services.usage.bulk import insert_rows
from services.usage.seals import RowDigests, Seal, Signer
from services.usage.store import Store

PAGE_ROWS = 2_000
DIGEST_BYTES = 16
# Those that every row had from the first seal on.
FIRST_COLUMNS = schema.ledger.columns.keys().index("insert_time") + 1
CHECK_EVERY_S = 60.0
# Rows that another service dates a little earlier than this one still belong to the day.
GRACE = timedelta(minutes=10)


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a sealed day; `row_id` is the first row that is altered or missing, where one can be named."""

    text: str
    row_id: int | None = None


class Days:
    """Seals days as they end, and verifies them."""

    def __init__(self, store: Store, signer: Signer, clock: Clock) -> None:
        self._store = store
        self._signer = signer
        self._clock = clock

    @property
    def public_key(self) -> bytes:
        """The key that seals are signed with."""
        return self._signer.public_key

    async def run(self) -> None:
        """For ever: seal what is over."""
        while True:
            try:
                while await self.seal_next() is not None:
                    pass
            except StoreUnavailable as error:
                structlog.get_logger().warning("sealing_waits", error=error.message)
            await self._clock.sleep(CHECK_EVERY_S)

    async def seal_next(self) -> Seal | None:
        """Seal the oldest day with unsealed rows, if it is over; None if there is none."""
        last = await self._store.read(_last_seal)
        after = 0 if last is None else last[1].last_row_id
        first_time = await self._store.read(functools.partial(_insert_time, row_id=after + 1))
        if first_time is None:
            return None
        # A clock that went back must not give one day two seals.
        day = first_time.date() if last is None else max(first_time.date(), last[0] + timedelta(days=1))
        end = datetime.combine(day + timedelta(days=1), time(), UTC)
        if datetime.fromtimestamp(self._clock.wall(), UTC) < end + GRACE:
            return None
        until = await self._store.read(functools.partial(_last_row_before, after=after, end=end))
        rows, chunks = RowDigests(), []
        async for page in self._pages(after, until):
            for row_id, digest in page:
                rows.add(row_id, digest)
            chunks.append((page[0][0], b"".join(digest for _, digest in page)))
        previous = b"" if last is None else last[1].own_digest
        subject = f"day {day.isoformat()}"
        seal = self._signer.sign(Seal(subject, after, until, rows.row_count, rows.digest, previous))
        try:
            await self._store.write(functools.partial(_write_seal, day=day, seal=seal, chunks=chunks))
        except IntegrityError:
            # Another usage service was faster; go on after its seal.
            return seal
        structlog.get_logger().info("day_sealed", day=day.isoformat(), rows=rows.row_count)
        return seal

    async def verify(self, day: date) -> tuple[Seal, Finding | None]:
        """Compare the day's rows with its seal. Raises NotFound for a day that is not sealed."""
        seal = await self._store.read(functools.partial(_find_seal, day=day))
        if seal is None:
            raise NotFound(f"{day.isoformat()} is not sealed: it is not over yet, or it has no rows.", param="day")
        if seal.public_key != self._signer.public_key or not seal.is_genuine():
            return seal, Finding("The seal of this day is not signed by this service's key.")
        before = await self._store.read(functools.partial(_seal_before, day=day))
        if seal.previous != (b"" if before is None else before.own_digest):
            return seal, Finding("The day sealed before this one is altered or missing.")
        sealed = await self._store.read(functools.partial(_sealed_digests, seal=seal))
        rows = RowDigests()
        for index, digest in enumerate(sealed):
            rows.add(seal.after_row_id + 1 + index, digest)
        if rows.digest != seal.digest or rows.row_count != seal.row_count:
            return seal, Finding("The digests beside the seal are altered; which row is, cannot be told.")
        return seal, await self._first_difference(seal, sealed)

    async def _first_difference(self, seal: Seal, sealed: Sequence[bytes]) -> Finding | None:
        expected = seal.after_row_id + 1
        async for page in self._pages(seal.after_row_id, seal.last_row_id):
            for row_id, digest in page:
                if row_id != expected:
                    return Finding(f"Row {expected} is missing.", expected)
                if digest != sealed[row_id - seal.after_row_id - 1]:
                    return Finding(f"Row {row_id} is altered.", row_id)
                expected += 1
        return None if expected > seal.last_row_id else Finding(f"Row {expected} is missing.", expected)

    async def _pages(self, after: int, until: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        while page := await self._store.read(functools.partial(_page, after=after, until=until)):
            yield page
            after = page[-1][0]


def _page(connection: sa.Connection, after: int, until: int) -> list[tuple[int, bytes]]:
    table = schema.ledger
    query = sa.select(table).where(table.c.row_id > after, table.c.row_id <= until)
    rows = connection.execute(query.order_by(table.c.row_id).limit(PAGE_ROWS))
    return [(row[0], _digest(row)) for row in rows]


def _digest(row: Sequence[Any]) -> bytes:
    """Of every column, whichever database it comes from; of later columns up to the last that has a value."""
    values = list(row)
    while len(values) > FIRST_COLUMNS and values[-1] is None:
        values.pop()
    text = json.dumps(values, default=_plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()[:DIGEST_BYTES]


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else bytes(value).hex()  # type: ignore[call-overload]


def _insert_time(connection: sa.Connection, row_id: int) -> datetime | None:
    table = schema.ledger
    return connection.execute(sa.select(table.c.insert_time).where(table.c.row_id == row_id)).scalar_one_or_none()


def _last_row_before(connection: sa.Connection, after: int, end: datetime) -> int:
    table = schema.ledger
    query = sa.select(table.c.row_id).where(table.c.row_id > after, table.c.insert_time < end)
    found = connection.execute(query.order_by(table.c.row_id.desc()).limit(1)).scalar_one_or_none()
    # The first unsealed row may be dated later than its day when a clock went back: it is sealed with this day.
    return after + 1 if found is None else int(found)


_SEAL = ("after_row_id", "last_row_id", "row_count", "digest", "previous", "public_key", "signature")


def _seals() -> sa.Select[Any]:
    table = schema.day_seals
    return sa.select(table.c.day, *(table.c[name] for name in _SEAL))


def _seal(row: Sequence[Any]) -> Seal:
    return Seal(f"day {row[0].isoformat()}", row[1], row[2], row[3], *map(bytes, row[4:]))


def _last_seal(connection: sa.Connection) -> tuple[date, Seal] | None:
    row = connection.execute(_seals().order_by(schema.day_seals.c.day.desc()).limit(1)).one_or_none()
    return None if row is None else (row[0], _seal(row))


def _find_seal(connection: sa.Connection, day: date) -> Seal | None:
    row = connection.execute(_seals().where(schema.day_seals.c.day == day)).one_or_none()
    return None if row is None else _seal(row)


def _seal_before(connection: sa.Connection, day: date) -> Seal | None:
    table = schema.day_seals
    row = connection.execute(_seals().where(table.c.day < day).order_by(table.c.day.desc()).limit(1)).one_or_none()
    return None if row is None else _seal(row)


def _sealed_digests(connection: sa.Connection, seal: Seal) -> list[bytes]:
    table = schema.seal_digests
    query = sa.select(table.c.digests).where(table.c.first_row_id.between(seal.after_row_id + 1, seal.last_row_id))
    packed = b"".join(map(bytes, connection.execute(query.order_by(table.c.first_row_id)).scalars()))
    return list(_split(packed))


def _split(packed: bytes) -> Iterator[bytes]:
    for start in range(0, len(packed), DIGEST_BYTES):
        yield packed[start : start + DIGEST_BYTES]


def _write_seal(connection: sa.Connection, day: date, seal: Seal, chunks: Sequence[tuple[int, bytes]]) -> None:
    values = {name: getattr(seal, name) for name in _SEAL}
    connection.execute(sa.insert(schema.day_seals).values(day=day, **values))
    insert_rows(connection, schema.seal_digests, ("first_row_id", "digests"), chunks)
