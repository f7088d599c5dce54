"""Sums of the ledger by tenant, project, key, model, version, day, hour or tag, with what they cost.

Tokens come from the rows, costs from their ratings; both by one selection and the same groups, so they always agree.
Functions block; run through `Store.read`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from services.common.errors import InvalidRequest
from services.usage import schema
from services.usage.accelerator import Use, query_use
from services.usage.events import Tokens
from services.usage.prices import Amounts
from services.usage.selection import TAG, Selection, tag_value

COLUMNS = {"tenant": "tenant", "project": "project", "key": "key_id", "model": "model", "version": "version"}
MAX_GROUPS = 50_000
MAX_GROUP_BY = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """One group: its keys in the order asked for (a row without the tag has the empty key), and its sums."""

    keys: tuple[str, ...]
    request_count: int
    billed: Tokens
    costs: Mapping[str, Amounts]
    completed_count: int = 0
    targeted_count: int = 0
    targets_met_count: int = 0
    use: Use = dataclasses.field(default_factory=Use)


def query_usage(connection: sa.Connection, chosen: Selection, group_by: Sequence[str]) -> list[Group]:
    """Groups in the order of their keys; without `group_by` one, also of no rows. Raises InvalidRequest."""
    if len(group_by) > MAX_GROUP_BY or len(set(group_by)) != len(group_by):
        raise InvalidRequest(f"group_by takes at most {MAX_GROUP_BY} different names.", param="group_by")
    keys = [_key(name, connection.dialect.name).label(f"key_{index}") for index, name in enumerate(group_by)]
    costs = _costs(connection, chosen, keys)
    table = schema.ledger
    sums = [sa.func.coalesce(sa.func.sum(table.c[f"billed_{name}"]), 0) for name in schema.TOKEN_COLUMNS]
    met = table.c.targets_met
    counts = [_count(table.c.terminal_state == "completed"), sa.func.count(met), _count(met)]
    query = (
        sa.select(*keys, sa.func.count(), *sums, *counts)
        .where(*chosen.conditions())
        .group_by(*_aliases(keys))
        .limit(MAX_GROUPS + 1)
    )
    uses = query_use(connection, chosen, keys)
    width = len(keys)
    groups = [
        Group(
            row[:width],
            row[width],
            Tokens(*map(int, row[width + 1 : width + 5])),
            costs.get(row[:width], {}),
            *_three(row[width + 5 :]),
            use=uses.get(row[:width], Use()),
        )
        for row in map(tuple, connection.execute(query))
    ]
    if len(groups) > MAX_GROUPS:
        raise InvalidRequest(f"This gives more than {MAX_GROUPS} groups; choose fewer rows.", param="group_by")
    return sorted(groups, key=lambda group: group.keys)


def _costs(
    connection: sa.Connection, chosen: Selection, keys: Sequence[sa.Label[str]]
) -> dict[tuple[str, ...], dict[str, Amounts]]:
    ratings, table = schema.ratings, schema.ledger
    sums = [sa.func.sum(ratings.c[name]) for name in schema.MICRO_COLUMNS]
    query = (
        sa.select(*keys, ratings.c.currency, *sums)
        .join_from(ratings, table, ratings.c.row_id == table.c.row_id)
        .where(*chosen.conditions())
        .group_by(*_aliases(keys), ratings.c.currency)
    )
    costs: dict[tuple[str, ...], dict[str, Amounts]] = {}
    for row in map(tuple, connection.execute(query)):
        amounts = Amounts(*map(int, row[len(keys) + 1 :]))
        if amounts != Amounts():
            costs.setdefault(row[: len(keys)], {})[row[len(keys)]] = amounts
    return costs


def _three(values: Sequence[Any]) -> tuple[int, int, int]:
    one, two, three = map(int, values)
    return one, two, three


def _count(condition: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return sa.func.coalesce(sa.func.sum(sa.case((condition, 1), else_=0)), 0)


def _aliases(keys: Sequence[sa.Label[str]]) -> list[sa.TextClause]:
    # By name: an expression with parameters is not the same one twice to PostgreSQL.
    return [sa.text(key.name) for key in keys]


def _key(name: str, dialect: str) -> sa.ColumnElement[Any]:
    table = schema.ledger
    if name in COLUMNS:
        return table.c[COLUMNS[name]]
    if name.startswith(TAG):
        return sa.func.coalesce(tag_value(name.removeprefix(TAG)), "")
    if name not in ("day", "hour"):
        known = ", ".join((*COLUMNS, "day", "hour", f"{TAG}<tag>"))
        raise InvalidRequest(f"group_by takes {known}; not {name[:64]}.", param="group_by")
    if dialect == "postgresql":
        return sa.func.to_char(table.c.end_time, sa.literal_column("'YYYY-MM-DD'" if name == "day" else _PG_HOUR))
    text = sa.func.substr(sa.cast(table.c.end_time, sa.Text), 1, 10 if name == "day" else 13)
    return text if name == "day" else sa.func.replace(text, " ", "T") + ":00Z"


_PG_HOUR = """'YYYY-MM-DD"T"HH24:00"Z"'"""
