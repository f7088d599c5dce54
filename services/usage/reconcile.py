"""Compares gateways, workers and ledger request by request, and counts what differs by its cause.

The gateway's word is the event as it was sent, the ledger's the row's columns, the workers' their attempts. Reads pages
in short transactions, so a long comparison holds nothing back. Writes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from google.protobuf import message as protobuf_message
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.usage import schema
from services.usage.drift import AttemptSide, Cause, RowSide, cause_of, own_attempts, worker_total
from services.usage.events import Tokens
from services.usage.ledger import CONFLICT, LETTER_PAGE
from services.usage.selection import Selection
from services.usage.store import Store

PAGE_ROWS = 1_000
_TOKENS = [f"{part}_{name}" for part in ("delivered", "billed") for name in schema.TOKEN_COLUMNS]
_ROW = (
    "row_id", "request_id", "tenant", "terminal_state", "error_reason", "attempt", "epoch", "worker_instance", "event",
    "choice_token_counts", *_TOKENS,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Drift:
    """One request whose counts differ; None where a side knows nothing of it."""

    request_id: str
    tenant: str
    cause: Cause
    gateway: int | None
    worker: int | None
    ledger: int | None
    attempt_count: int


@dataclasses.dataclass(slots=True)
class Totals:
    """Sums of completion tokens over the requests looked at, and requests by cause."""

    request_count: int = 0
    gateway: int = 0
    worker: int = 0
    ledger: int = 0
    causes: Counter[Cause] = dataclasses.field(default_factory=Counter)


async def reconcile(store: Store, chosen: Selection, totals: Totals) -> AsyncIterator[list[Drift]]:
    """Drifts of the chosen tenant's requests that ended in [start, end), by pages; adds up `totals` on the way."""
    doubled = await store.read(_doubled)
    after = 0
    while True:
        after, rows, attempts = await store.read(functools.partial(_read_rows, chosen=chosen, after=after))
        if not rows:
            break
        yield [
            drift
            for request_id, row in rows.items()
            if (drift := _compare(request_id, row, attempts.get(request_id, ()), request_id in doubled, totals))
        ]
    last = ""
    while orphans := await store.read(functools.partial(_read_orphans, chosen=chosen, after=last)):
        yield [
            drift for request_id, told in orphans.items() if (drift := _compare(request_id, None, told, False, totals))
        ]
        last = max(orphans)


def _compare(
    request_id: str, row: RowSide | None, attempts: Sequence[AttemptSide], doubled: bool, totals: Totals
) -> Drift | None:
    made = worker_total(attempts)
    totals.request_count += 1
    totals.worker += made or 0
    if row is not None:
        totals.gateway += row.gateway_token_count
        totals.ledger += row.ledger_token_count
    cause = cause_of(row, attempts, doubled=doubled)
    if cause is None:
        return None
    totals.causes[cause] += 1
    tenant = row.tenant if row is not None else attempts[0].tenant
    gateway = row.gateway_token_count if row is not None else None
    ledger = row.ledger_token_count if row is not None else None
    return Drift(request_id, tenant, cause, gateway, made, ledger, len(own_attempts(attempts)))


def _read_rows(
    connection: sa.Connection, chosen: Selection, after: int
) -> tuple[int, dict[str, RowSide], Mapping[str, list[AttemptSide]]]:
    table = schema.ledger
    query = sa.select(*(table.c[name] for name in _ROW)).where(*chosen.conditions(), table.c.row_id > after)
    found = connection.execute(query.order_by(table.c.row_id).limit(PAGE_ROWS)).mappings().all()
    if not found:
        return after, {}, {}
    rows = {row["request_id"]: _row_side(dict(row)) for row in found}
    return found[-1]["row_id"], rows, _attempts(connection, rows)


def _attempts(connection: sa.Connection, request_ids: Iterable[str]) -> Mapping[str, list[AttemptSide]]:
    table = schema.attempts
    columns = (table.c.request_id, table.c.tenant, table.c.epoch, table.c.choices, table.c.asking_worker)
    query = sa.select(*columns).where(table.c.request_id.in_(list(request_ids)))
    told: dict[str, list[AttemptSide]] = defaultdict(list)
    for request_id, tenant, epoch, ranges, asking in connection.execute(query):
        told[request_id].append(AttemptSide(tenant, epoch, tuple(map(tuple, ranges)), for_peer=bool(asking)))
    return told


def _read_orphans(connection: sa.Connection, chosen: Selection, after: str) -> Mapping[str, list[AttemptSide]]:
    """Attempts of requests that the ledger does not know, by request."""
    table, ledger = schema.attempts, schema.ledger
    query = (
        sa.select(table.c.request_id)
        .distinct()
        .join_from(table, ledger, table.c.request_id == ledger.c.request_id, isouter=True)
        .where(ledger.c.request_id.is_(None), table.c.request_id > after)
        .where(table.c.end_time >= chosen.start, table.c.end_time < chosen.end)
        # A prompt computed for a peer is over long before its request.
        .where(table.c.asking_worker.is_(None))
    )
    if chosen.tenant:
        query = query.where(table.c.tenant == chosen.tenant)
    ids = connection.execute(query.order_by(table.c.request_id).limit(PAGE_ROWS)).scalars().all()
    return _attempts(connection, ids)


def _doubled(connection: sa.Connection) -> set[str]:
    """Requests of which a second event said something else."""
    table = schema.dead_letters
    found = set()
    query = sa.select(table.c.payload).where(table.c.reason == CONFLICT)
    for payload in connection.execute(query.execution_options(yield_per=LETTER_PAGE)).scalars():
        try:
            found.add(usage_event_pb2.UsageEvent.FromString(bytes(payload)).request_id)
        except protobuf_message.DecodeError:
            continue
    return found


def _row_side(row: Mapping[str, Any]) -> RowSide:
    event = usage_event_pb2.UsageEvent.FromString(bytes(row["event"]))
    columns = tuple(row[name] for name in _TOKENS)
    return RowSide(
        tenant=row["tenant"],
        terminal_state=row["terminal_state"],
        error_reason=row["error_reason"],
        attempt=row["attempt"],
        epoch=row["epoch"],
        worker_instance=row["worker_instance"],
        row_counts=(columns, tuple(row["choice_token_counts"])),
        event_counts=((*_counts(event.delivered), *_counts(event.billed)), tuple(event.choice_token_counts)),
        delivered=tuple(event.choice_token_counts),
        ledger_token_count=row["delivered_completion_tokens"],
        gateway_token_count=event.delivered.completion_token_count,
    )


def _counts(usage: common_pb2.TokenUsage) -> tuple[int, ...]:
    return Tokens(
        usage.prompt_token_count, usage.cached_token_count, usage.completion_token_count, usage.reasoning_token_count
    ).counts
