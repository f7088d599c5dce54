"""The stack of the fault suites: the echo model on two workers, slow enough for faults to hit streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.stack import Stack, running_stack


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with running_stack(
        tmp_path / "home", "--workers", "2", "--model", "echo", env={"MILLRACE_ECHO_STEP_MS": "20"}
    ) as stack:
        yield stack
