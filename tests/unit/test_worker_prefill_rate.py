"""How fast a worker says that it prefills."""

from __future__ import annotations

import dataclasses

from services.worker.prefill_rate import PrefillRate
from tests.helpers.engine import EngineRig


def test_the_rate_is_that_of_reports_that_are_mostly_prefill() -> None:
    nothing = EngineRig().engine.stats(0.0)
    rate = PrefillRate()

    rate.note(dataclasses.replace(nothing, prefill_token_total=63), [0.1])
    assert rate.per_second is None
    rate.note(dataclasses.replace(nothing, prefill_token_total=263, decode_token_total=2), [0.1, 0.1])
    assert rate.per_second == 1_000
    rate.note(dataclasses.replace(nothing, prefill_token_total=363, decode_token_total=102), [1.0])
    assert rate.per_second == 1_000, "decodes took that time"
    rate.note(dataclasses.replace(nothing, prefill_token_total=763, decode_token_total=102), [0.1])
    assert 1_000 < rate.per_second < 4_000
