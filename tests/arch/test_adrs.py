"""Decisions are numbered: each number once, and every link leads to a file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "docs" / "adr").glob("*.md"))
LINK = re.compile(r"\]\(([^)#:]*adr/[^)#]+)\)")


def test_no_two_decisions_share_a_number() -> None:
    numbers = Counter(path.name[:4] for path in RECORDS)

    assert [number for number, count in numbers.items() if count > 1] == []


def test_links_to_decisions_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [(page, target) for page in pages for target in LINK.findall(page.read_text())]

    assert links
    assert [(page.name, target) for page, target in links if not (page.parent / target).exists()] == []
