"""Which ledger rows a query or an export speaks of. Pure SQL expressions; runs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime

import sqlalchemy as sa

from services.common.errors import InvalidRequest
from services.usage import schema

MAX_TAG_CHARS = 64
# Leads the name of a tag among other names.
TAG = "metadata."


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Which rows: every field narrows, empty means any; `tags` must all match; ended in [start, end)."""

    tenant: str = ""
    project: str = ""
    key_id: str = ""
    model: str = ""
    version: str = ""
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start: datetime | None = None
    end: datetime | None = None

    def conditions(self) -> list[sa.ColumnElement[bool]]:
        """As SQL, on the ledger."""
        table = schema.ledger
        names = ("tenant", "project", "key_id", "model", "version")
        chosen = [table.c[name] == getattr(self, name) for name in names if getattr(self, name)]
        chosen += [tag_value(name) == value for name, value in sorted(self.tags.items())]
        chosen += [table.c.end_time >= self.start] if self.start is not None else []
        chosen += [table.c.end_time < self.end] if self.end is not None else []
        return chosen


def tag_value(name: str) -> sa.ColumnElement[str]:
    """The value of one metadata tag, NULL without it. Raises InvalidRequest for a name that none can have."""
    if not 0 < len(name) <= MAX_TAG_CHARS or '"' in name or "\\" in name or "\x00" in name:
        raise InvalidRequest("A tag's name has 1 to 64 characters, without quotes and backslashes.", param="metadata")
    value: sa.ColumnElement[str] = schema.ledger.c.metadata[name].as_string()
    return value
