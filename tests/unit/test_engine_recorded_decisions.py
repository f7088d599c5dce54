"""The scheduler decides today what it decided when the record was made."""

from __future__ import annotations

import json

import pytest

from tests.golden.make_scheduler_decisions import RECORD, SEEDS, digest_of_life


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seeded_life_of_an_engine_is_decided_as_recorded(seed: int) -> None:
    recorded = json.loads(RECORD.read_text())

    assert digest_of_life(seed) == recorded[str(seed)], (
        "decisions changed: see tests/golden/make_scheduler_decisions.py"
    )
