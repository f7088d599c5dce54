"""What the commands that sum the ledger share: how groups are named, and how tables are shown to people."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

GROUPS = "tenant, project, key, model, version, day, hour or metadata.<tag>; repeat for more."
NUMBER = re.compile(r"^\d+(?=$|\.)")
MONEY = re.compile(r"(-?[\d,]+)\.(\d+) ([A-Z]{3})")
# In a table: nothing was measured, or no price held.
NOTHING = "–"
MAX_WIDTH = 2_000


class Shape(enum.Enum):
    """How sums are written."""

    TABLE = "table"
    CSV = "csv"
    JSONL = "jsonl"


def show_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, left: int, title: str = "", total: Sequence[str] = ()
) -> None:
    """Print a table whose first `left` columns are words and the others figures; `total` is its last row.

    No figure is ever cut: a table that is wider than the terminal is printed as wide as it is.
    """
    table = Table(title=title or None, title_justify="left", show_footer=bool(total))
    cells = list(zip(*rows, *([total] if total else ()), strict=True)) or [()] * len(names)
    columns = [
        (name, list(column)) if place < left else _figures(name, column)
        for place, (name, column) in enumerate(zip(names, cells, strict=True))
    ]
    for place, (name, column) in enumerate(columns):
        footer = column.pop() if total else ""
        table.add_column(name, footer, justify="left" if place < left else "right", no_wrap=True)
    for row in zip(*(column for _, column in columns), strict=True):
        table.add_row(*row)
    needed = Console(width=MAX_WIDTH).measure(table).maximum
    Console(highlight=False, width=max(Console().width, needed)).print(table)


def _figures(name: str, cells: Sequence[str]) -> tuple[str, list[str]]:
    """Counts with their thousands apart; amounts of one currency with equal places, the currency in the heading."""
    money = [MONEY.fullmatch(cell) for cell in cells]
    currencies = {found[3] for found in money if found is not None}
    if len(currencies) == 1 and all(found or not cell for found, cell in zip(money, cells, strict=True)):
        places = max(len(found[2]) for found in money if found is not None)
        shown = [NOTHING if found is None else f"{found[1]}.{found[2]:0<{places}}" for found in money]
        return f"{name} {currencies.pop()}", shown
    return name, [NUMBER.sub(lambda found: f"{int(found[0]):,}", cell, count=1) or NOTHING for cell in cells]
