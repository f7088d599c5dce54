"""Who changed what, when, from what and to what: written in the transaction of the change, never altered afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from services.usage.schema import audit

Fields = Mapping[str, Any]
# The digest of a secret is no secret, but tells nothing either.
_HIDDEN = frozenset({"digest", "prefix"})


@dataclasses.dataclass(frozen=True, slots=True)
class Act:
    """One change. `before` is None where there was nothing."""

    actor: str
    action: str
    tenant: str
    subject: str
    before: Fields | None
    after: Fields


def record(connection: sa.Connection, act: Act, now: datetime) -> None:
    """Write one record."""
    connection.execute(sa.insert(audit), {"time": now, **dataclasses.asdict(act)})


def shown(row: sa.Row[Any]) -> dict[str, Any]:
    """A row as an audit record shows it."""
    fields = {name: value for name, value in row._mapping.items() if name not in _HIDDEN and value is not None}
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in fields.items()}


def read_acts(connection: sa.Connection, tenant: str, after_id: int, limit: int) -> Sequence[sa.Row[Any]]:
    """Records after a cursor, oldest first, of one tenant or of all for the empty name."""
    query = sa.select(audit).where(audit.c.audit_id > after_id).order_by(audit.c.audit_id).limit(limit)
    return list(connection.execute(query.where(audit.c.tenant == tenant) if tenant else query))
