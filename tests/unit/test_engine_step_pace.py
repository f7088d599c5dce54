"""Step time is learnt, and prefills leave running answers their pace."""

from __future__ import annotations

import pytest

from services.worker.engine.step_pace import MIN_PREFILL, StepPace
from tests.helpers.engine import EngineRig, make_request, prompt

BASE_S, SLOPE_S = 0.010, 0.002


def learnt(target_s: float | None) -> StepPace:
    pace = StepPace(target_s)
    for tokens in (1, 4, 16, 64, 100, 200, 8, 32):
        pace.note(tokens, BASE_S + SLOPE_S * tokens)
    return pace


def test_a_line_is_found_from_steps_that_lie_on_it() -> None:
    assert learnt(None).predict(150) == pytest.approx(BASE_S + SLOPE_S * 150)


def test_steps_of_one_size_are_taken_as_proportional() -> None:
    pace = StepPace(None)
    for _ in range(20):
        pace.note(4, 0.02)

    assert pace.predict(8) == pytest.approx(0.04)


def test_nothing_is_predicted_and_nothing_limited_before_enough_steps() -> None:
    pace = StepPace(0.001)
    for _ in range(7):
        pace.note(100, 1.0)

    assert pace.predict(100) is None
    assert pace.prefill_room(4, 256) == 256


def test_prefills_get_what_the_target_leaves_beside_the_decodes() -> None:
    room = learnt(0.110).prefill_room(10, 256)

    assert room == pytest.approx((0.110 - BASE_S) / SLOPE_S - 10, abs=1)


def test_a_target_that_decodes_alone_miss_still_leaves_prefills_a_little() -> None:
    assert learnt(0.001).prefill_room(10, 256) == MIN_PREFILL
    assert learnt(0.001).prefill_room(10, 5) == 5


@pytest.mark.parametrize("slope", [0.0, 1e-6])
def test_prefills_that_cost_next_to_nothing_are_not_held_back_by_decodes_that_miss_the_target(slope: float) -> None:
    pace = StepPace(0.2)
    for tokens in (1, 4, 16, 64, 100, 200, 8, 32):
        pace.note(tokens, 1.0 + slope * tokens)

    assert pace.prefill_room(100, 256) == 256


def test_beside_decodes_that_miss_the_target_prefills_make_a_step_a_tenth_longer_at_most() -> None:
    pace = StepPace(0.2)
    for tokens in (1, 4, 16, 64, 100, 200, 8, 32):
        pace.note(tokens, 0.9 + 0.001 * tokens)

    assert pace.prefill_room(100, 256) == pytest.approx(100, abs=1)


def test_steps_without_decodes_and_engines_without_a_target_are_not_limited() -> None:
    assert learnt(0.001).prefill_room(0, 256) == 256
    assert learnt(None).prefill_room(10, 256) == 256


def test_a_long_prompt_beside_running_answers_keeps_every_step_within_the_target() -> None:
    rig = EngineRig(step_time_target_s=0.05, max_num_batched_tokens=64, max_prefill_chunk=64)

    def step() -> int:
        rig.step()
        tokens = sum(len(row.token_ids) for row in rig.last.scheduled)
        rig.engine.note_step_time(BASE_S + SLOPE_S * tokens)
        return tokens

    rig.add(make_request("talk", prompt(5), max_tokens=60))
    rig.add(make_request("first", prompt(100), max_tokens=1))
    for _ in range(12):
        step()
    rig.add(make_request("long", prompt(150, seed=1), max_tokens=1))

    sizes = [step() for _ in range(9)]

    assert 1 + MIN_PREFILL < max(sizes) <= (0.05 - BASE_S) / SLOPE_S
    rig.run()
    assert len(rig.token_ids("long")) == 1
    assert len(rig.token_ids("talk")) == 60
