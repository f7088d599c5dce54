"""The stack of the fault suites: the echo model on two workers, slow enough for faults to hit streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.stack import Stack


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    running = Stack(tmp_path / "home", "--workers", "2", "--model", "echo", env={"MILLRACE_ECHO_STEP_MS": "20"})
    try:
        yield running.wait_ready()
        assert running.stop() == 0
    finally:
        if running.process.poll() is None:
            running.kill_all()
