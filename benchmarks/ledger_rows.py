"""Millions of different ledger rows with an attempt each, made inside the database: ids, counts, times, tags, events.

What all have in common is copied from one row that the service's own code inserted. An event is the common fields of a
message followed by the row's own ones, in hexadecimal: to a reader that is one message.
"""

from __future__ import annotations

import binascii
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from millrace.usage.v1 import usage_event_pb2

from services.usage import schema
from services.usage.attempts import ATTEMPT_COLUMNS, insert_worker_rows, parse_report
from services.usage.ledger import insert_entries, last_row_id
from services.usage.rows import ROW_COLUMNS
from services.usage.store import Store
from tests.helpers.usage import make_attempt, make_event, parse, report_of

START = datetime(2026, 3, 1, tzinfo=UTC)
# Requests that end in a second: 10^7 of them take 29 days.
A_SECOND = 4
TENANTS = 50
KEYS = 4
# Rows a transaction of the load, and transactions at once where the database takes several.
CHUNK = 50_000
TOLD_EVERY = 10 * CHUNK
AT_ONCE = 3
# Seconds of the load: a day that is not over is not sealed while something is measured.
_NOW = ("extract(epoch FROM now())", "strftime('%s')")
# Marks of a request but its end, by their fields.
MARKS = {1: "admit_time", 4: "start_time", 5: "first_token_time"}
END = 6


def make_events(first: int, count: int) -> list[usage_event_pb2.UsageEvent]:
    """Events of the rows that would be loaded next, as gateways make them."""
    made = []
    for number in range(first, first + count):
        seconds = int(START.timestamp()) + number // A_SECOND
        event = make_event(
            f"{seconds * 1000:012X}{number * 2654435761 % 2**32:08X}{number:06X}",
            f"tenant-{number % TENANTS:02}",
            prompt=200 + number * 7 % 4000,
            cached=128 + number % 64,
            completion=128 + number * 13 % 900,
            end_time=START + timedelta(seconds=number // A_SECOND),
        )
        for name in MARKS.values():
            getattr(event.times, name).CopyFrom(event.times.admit_time)
        event.key_id = f"key-{number % TENANTS:02}-{number // TENANTS % KEYS}"
        event.metadata["team"] = f"team-{number % 7}"
        event.user = f"user-{number % 1000:03}"
        event.traceparent = f"00-{number:032x}-{number:016x}-00"
        event.model.manifest_digest = b"\x07" * 32
        made.append(event)
    return made


def load(store: Store, rows: int) -> None:
    """Add rows and their attempts until the ledger has `rows`; balances and head then say so. Blocks, telling progress
    on standard error. A load that was interrupted cannot go on: its database must go.
    """
    if store.read_sync(last_row_id) == 0:
        _insert_first(store)
    have = store.read_sync(last_row_id)
    if have >= rows:
        return
    spans = [(first + 1, min(rows, first + CHUNK)) for first in range(have, rows, CHUNK)]
    statements = _Statements(store.dialect == "sqlite").inserts()

    def insert(span: tuple[int, int]) -> None:
        def work(connection: sa.Connection) -> None:
            if connection.dialect.name == "sqlite":
                connection.connection.driver_connection.create_function("unhex", 1, binascii.unhexlify)  # type: ignore[union-attr]
            for statement in statements:
                connection.execute(sa.text(statement), {"first": span[0], "last": span[1], "common": _common()})

        store.write_sync(work)

    began = time.perf_counter()
    indexes = [each for table in (schema.ledger, schema.attempts) for each in table.indexes]
    for index in indexes:
        # One that is made of all rows at once costs a fraction of one that grows with them.
        store.write_sync(index.drop)
    with ThreadPoolExecutor(1 if store.dialect == "sqlite" else AT_ONCE) as pool:
        for (_, last), _ in zip(spans, pool.map(insert, spans), strict=True):
            if last % TOLD_EVERY == 0:
                _say(last - have, rows - have, began)
    for index in indexes:
        store.write_sync(index.create)
    store.write_sync(lambda connection: _sum_up(connection, rows))
    _say(rows - have, rows - have, began)


def _say(done: int, rows: int, began: float) -> None:
    spent = time.perf_counter() - began
    told = f"{done:,} of {rows:,} rows loaded in {spent:.0f} s, {done / spent:,.0f} a second"
    print(told, file=sys.stderr, flush=True)


def _insert_first(store: Store) -> None:
    event = make_event("0" * 26, "tenant-00", end_time=START)
    event.model.manifest_digest = b"\x07" * 32
    report = parse_report(report_of(make_attempt(event.request_id, event.tenant, end_time=START)).SerializeToString())

    def work(connection: sa.Connection) -> None:
        insert_entries(connection, [parse(event)], START)
        insert_worker_rows(connection, [report], START)

    store.write_sync(work)


def _common() -> str:
    """Fields that every event has, in hexadecimal."""
    event = make_event("", "", completion=1)
    event.model.manifest_digest = b"\x07" * 32
    for name in ("times", "delivered", "billed", "choice_token_counts", "key_id"):
        event.ClearField(name)  # type: ignore[arg-type]
    return event.SerializeToString().hex()


class _Statements:
    """SQL of the load in either dialect; `n` is the number of a row."""

    PROMPT, CACHED, COMPLETION = "200 + n * 7 % 4000", "128 + n % 64", "128 + n * 13 % 900"
    SECONDS = f"{int(START.timestamp())} + n / {A_SECOND}"

    def __init__(self, sqlite: bool) -> None:
        self._sqlite = sqlite

    def inserts(self) -> tuple[str, str]:
        """Of ledger rows and of their attempts, for `n` from :first to :last."""
        listed = ", ".join(f'"{name}"' for name in ROW_COLUMNS)
        own = self._own_columns()
        picked = ", ".join(own.get(name, f'one."{name}"') for name in ROW_COLUMNS)
        ledger = f"INSERT INTO ledger ({listed}) {self._numbers()} SELECT {picked} FROM s CROSS JOIN ledger one "
        ledger += "WHERE one.row_id = 1"
        listed = ", ".join(ATTEMPT_COLUMNS)
        same = ("request_id", "tenant", "end_time", "insert_time")
        chosen = {name: f"ledger.{name}" for name in same}
        chosen["choices"] = self._json("'[[0, 0, ' || delivered_completion_tokens || ']]'")
        picked = ", ".join(chosen.get(name, f"one.{name}") for name in ATTEMPT_COLUMNS)
        attempts = f"INSERT INTO attempts ({listed}) SELECT {picked} FROM ledger CROSS JOIN attempts one "
        attempts += f"WHERE row_id BETWEEN :first AND :last AND one.request_id = '{'0' * 26}'"
        return ledger, attempts

    def _numbers(self) -> str:
        if self._sqlite:
            return "WITH RECURSIVE s(n) AS (SELECT :first UNION ALL SELECT n + 1 FROM s WHERE n < :last)"
        return "WITH s AS (SELECT n FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) n)"

    def _own_columns(self) -> dict[str, str]:
        counts = {"prompt_tokens": self.PROMPT, "cached_tokens": self.CACHED, "completion_tokens": self.COMPLETION}
        own = {f"{part}_{name}": count for part in ("delivered", "billed") for name, count in counts.items()}
        begin, end = self._time(f"{self.SECONDS} - 1"), self._time(self.SECONDS)
        own |= dict.fromkeys(MARKS.values(), begin) | {"end_time": end, "insert_time": self._time(_NOW[self._sqlite])}
        return own | {
            "row_id": "n",
            "request_id": self._request_id,
            "tenant": self._tenant,
            "key_id": self._key,
            "user_label": self._user,
            "metadata": self._json(f"""'{{"team": "' || {self._team} || '"}}'"""),
            "traceparent": self._traceparent,
            "choice_token_counts": self._json(f"'[' || ({self.COMPLETION}) || ']'"),
            "event": self._event(),
        }

    @property
    def _request_id(self) -> str:
        # As a ULID: the milliseconds, then what looks like chance; its letters are some of a ULID's.
        milliseconds, mixed = f"({self.SECONDS}) * 1000", "n * 2654435761 % 4294967296"
        return f"upper({self._hex(milliseconds, 12)} || {self._hex(mixed, 8)} || {self._hex('n', 6)})"

    @property
    def _tenant(self) -> str:
        return f"'tenant-' || {self._digits(f'n % {TENANTS}', 2)}"

    @property
    def _key(self) -> str:
        return f"'key-' || {self._digits(f'n % {TENANTS}', 2)} || '-' || {self._digits(f'n / {TENANTS} % {KEYS}', 1)}"

    @property
    def _user(self) -> str:
        return f"'user-' || {self._digits('n % 1000', 3)}"

    @property
    def _team(self) -> str:
        return f"'team-' || {self._digits('n % 7', 1)}"

    @property
    def _traceparent(self) -> str:
        return f"'00-' || {self._hex('n', 32)} || '-' || {self._hex('n', 16)} || '-00'"

    def _event(self) -> str:
        field = {name: number.number for name, number in usage_event_pb2.UsageEvent.DESCRIPTOR.fields_by_name.items()}
        counts = [self._varint(count, 2) for count in (self.PROMPT, self.CACHED, self.COMPLETION)]
        tokens = self._join(f"'{8 * (place + 1):02x}' || {count}" for place, count in enumerate(counts))
        begin, end = (self._varint(seconds, 5) for seconds in (f"{self.SECONDS} - 1", self.SECONDS))
        marks = {mark: begin for mark in MARKS} | {END: end}
        times = self._join(f"{_head(mark, 6)} || '08' || {seconds}" for mark, seconds in marks.items())
        parts = [
            ":common",
            *(_head(field[name], 9) + f" || {tokens}" for name in ("delivered", "billed")),
            _head(field["times"], 32) + f" || {times}",
            _head(field["choice_token_counts"], 2) + f" || {counts[2]}",
            _head(field["metadata"], 14) + f" || {_head(1, 4)} || {self._bytes(repr('team'))} || {_head(2, 6)}",
            self._bytes(self._team),
        ]
        texts = {
            "request_id": (26, self._request_id),
            "tenant": (9, self._tenant),
            "key_id": (8, self._key),
            "user": (8, self._user),
            "traceparent": (55, self._traceparent),
        }
        parts += [f"{_head(field[name], size)} || {self._bytes(text)}" for name, (size, text) in texts.items()]
        joined = self._join(parts)
        return f"unhex({joined})" if self._sqlite else f"decode({joined}, 'hex')"

    def _varint(self, value: str, width: int) -> str:
        """Of a value that takes just so many bytes, put together as one number."""
        groups = [
            f"((({value}) >> {7 * place} & 127) | {128 if place < width - 1 else 0}) << {8 * (width - 1 - place)}"
            for place in range(width)
        ]
        return self._hex("(" + " | ".join(f"({group})" for group in groups) + ")", 2 * width)

    def _hex(self, value: str, width: int) -> str:
        return f"printf('%0{width}x', {value})" if self._sqlite else f"lpad(to_hex({value}), {width}, '0')"

    def _digits(self, value: str, width: int) -> str:
        return f"printf('%0{width}d', {value})" if self._sqlite else f"lpad(({value})::text, {width}, '0')"

    def _bytes(self, text: str) -> str:
        return f"hex({text})" if self._sqlite else f"encode(convert_to({text}, 'UTF8'), 'hex')"

    def _time(self, seconds: str) -> str:
        if self._sqlite:
            return f"strftime('%Y-%m-%d %H:%M:%S.000000', {seconds}, 'unixepoch')"
        return f"to_timestamp({seconds})"

    def _json(self, text: str) -> str:
        return text if self._sqlite else f"CAST({text} AS jsonb)"

    def _join(self, parts: Iterable[str]) -> str:
        return "(" + " || ".join(parts) + ")"


def _head(number: int, size: int) -> str:
    """The tag of a length-delimited field of so many bytes."""
    tag = number << 3 | 2
    return "'" + bytes((tag,) if tag < 128 else (tag & 127 | 128, tag >> 7)).hex() + f"{size:02x}'"


def _sum_up(connection: sa.Connection, rows: int) -> None:
    """Balances and head of what was loaded, in the database itself."""
    day = "CAST(end_time AS date)" if connection.dialect.name == "postgresql" else "substr(end_time, 1, 10)"
    names = [f"{part}_{name}" for part in ("delivered", "billed") for name in schema.TOKEN_COLUMNS]
    sums = ", ".join(f"sum({name})" for name in names)
    statements: tuple[Any, ...] = (
        sa.delete(schema.balances),
        sa.delete(schema.key_balances),
        sa.text(
            f"INSERT INTO balances (tenant, day, request_count, {', '.join(names)}) "
            f"SELECT tenant, {day}, count(*), {sums} FROM ledger GROUP BY 1, 2"
        ),
        sa.text(
            "INSERT INTO key_balances (tenant, key_id, day, billed_tokens) "
            f"SELECT tenant, key_id, {day}, sum(billed_prompt_tokens + billed_completion_tokens) FROM ledger "
            "GROUP BY 1, 2, 3"
        ),
        sa.update(schema.ledger_head).values(last_row_id=rows),
    )
    for statement in statements:
        connection.execute(statement)
