"""The published failure matrix is whole, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
PHASES = (
    "queued", "claimed", "submitted", "prefilling", "transferring", "first token", "decoding", "finishing", "settling"
)  # fmt: skip
FAULTS = ["kill", "freeze", "cut", "half-open", "slow", "disk full", "duplicate", "late"]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def table(first: str) -> list[list[str]]:
    """Rows below the header that begins with this cell."""
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = [cells_of(lines[start])]
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(cells_of(line))
    return rows


def matrix() -> dict[tuple[str, str], tuple[str, list[int]]]:
    """(phase, fault) → outcome and numbers of its proofs."""
    header, *rows = table("phase")
    found = {}
    for phase, *cells in rows:
        for fault, cell in zip(header[1:], cells, strict=True):
            match = re.fullmatch(r"(\w+) \[(–|\d+(?:, \d+)*)\]", cell)
            assert match, f"{phase}, {fault}: {cell!r}"
            numbers = [] if match.group(2) == "–" else [int(n) for n in match.group(2).split(", ")]
            found[phase.strip("*"), fault] = (match.group(1), numbers)
    return found


def proofs() -> dict[int, str]:
    return {int(number): name for number, name in re.findall(r"^(\d+)\. `([^`]+)`$", TEXT, flags=re.MULTILINE)}


def test_every_phase_meets_every_fault_and_has_one_known_outcome() -> None:
    outcomes = {row[0] for row in table("outcome")[1:]}

    assert set(matrix()) == {(phase, fault) for phase in PHASES for fault in FAULTS}
    assert {outcome for outcome, _ in matrix().values()} == outcomes


def test_every_proof_is_named_and_is_a_test_that_exists() -> None:
    used = {number for _, numbers in matrix().values() for number in numbers}
    missing = []
    for name in proofs().values():
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8")) if (ROOT / path).is_file() else ast.Module([], [])
        if function not in {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}:
            missing.append(name)

    assert used == set(proofs())
    assert missing == []


def test_files_named_beside_the_matrix_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", TEXT)

    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_no_outcome_is_without_proof_but_that_nothing_can_happen() -> None:
    assert [cell for cell, (outcome, numbers) in matrix().items() if (outcome == "unaffected") is bool(numbers)] == []
