"""What the commands that sum the ledger share: how groups are named and how sums are written."""

from __future__ import annotations

import enum

GROUPS = "tenant, project, key, model, version, day, hour or metadata.<tag>; repeat for more."


class Shape(enum.Enum):
    """How sums are written."""

    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"
