"""What requests take of the accelerator: shares of steps in simulated time, and the tokens that they paid for."""

from __future__ import annotations

import random

import pytest

from services.worker.engine.outputs import SchedulerOutput
from services.worker.engine.step_costs import ChoiceCost, TokenWeights
from tests.helpers.engine import EngineRig, assert_engine_empty, make_request, make_spec, prompt

# What the simulated accelerator takes: a step, a decoded token, a prefilled token.
DECODE_S, PREFILL_S = 0.004, 0.0005


class PaidRig(EngineRig):
    """An engine whose steps take simulated time by their tokens; keeps the costs of what ended."""

    def __init__(self, **config: object) -> None:
        super().__init__(**config)  # type: ignore[arg-type]
        self.costs: list[ChoiceCost] = []
        self.busy_s = self.idle_s = 0.0

    def pay(self) -> float:
        """One step, and its time shared; returns the time."""
        self.step(seconds=0.0)
        seconds = step_seconds(self.last)
        self.now += seconds
        self.busy_s += seconds
        self.costs += self.engine.take_costs(seconds)
        return seconds

    def of(self, request_id: str) -> ChoiceCost:
        [cost] = [cost for cost in self.costs if cost.key.request_id == request_id]
        return cost


def step_seconds(decision: SchedulerOutput) -> float:
    return sum(DECODE_S if row.samples and len(row.token_ids) == 1 else len(row.token_ids) * PREFILL_S
               for row in decision.scheduled)  # fmt: skip


def test_shares_and_idle_time_sum_to_the_wall_clock() -> None:
    rig, sizes = PaidRig(spec=make_spec(num_blocks=48)), random.Random(7)
    waiting = [
        make_request(f"r{n}", prompt(sizes.randint(2, 60), seed=n), max_tokens=sizes.randint(1, 30), n=1 + n % 2)
        for n in range(30)
    ]

    while waiting or rig.engine.has_work():
        if waiting and sizes.random() < 0.3:
            rig.add(waiting.pop())
        if not rig.engine.has_work():
            rig.now += 0.05
            rig.idle_s += 0.05
            continue
        rig.pay()

    shares = sum(cost.prefill_seconds + cost.decode_seconds for cost in rig.costs)
    assert len(rig.costs) == 45
    assert rig.idle_s > 0
    assert shares + rig.idle_s == pytest.approx(rig.now, rel=0.01)
    assert shares == pytest.approx(rig.busy_s, rel=1e-9)
    assert_engine_empty(rig)


def test_a_request_pays_for_each_token_that_was_computed_for_it() -> None:
    rig = PaidRig()
    rig.add(make_request("a", prompt(20), max_tokens=6))
    rig.pay()
    rig.add(make_request("b", prompt(20), max_tokens=6))

    while rig.engine.has_work():
        rig.pay()

    a, b = rig.of("a"), rig.of("b")
    assert (a.prefill_token_count, a.decode_token_count) == (20, 5)
    # Whole blocks of the same prompt came from the cache.
    assert b.prefill_token_count < 20
    assert b.decode_token_count == 5
    assert a.block_seconds > 0


def test_a_long_prompt_pays_for_its_prefill_and_not_for_its_neighbours_decodes() -> None:
    rig = PaidRig(max_num_batched_tokens=64, max_prefill_chunk=32)
    # Steps of both kinds teach what each costs.
    for n in range(12):
        rig.add(make_request(f"warm{n}", prompt(40, seed=n), max_tokens=12))
    while rig.engine.has_work():
        rig.pay()
    rig.add(make_request("short", prompt(2, seed=90), max_tokens=40))
    for _ in range(4):
        rig.pay()
    rig.add(make_request("long", prompt(120, seed=91), max_tokens=1))
    while rig.engine.has_work():
        rig.pay()

    assert rig.of("long").prefill_seconds == pytest.approx(120 * PREFILL_S, rel=0.05)
    assert rig.of("short").decode_seconds == pytest.approx(39 * DECODE_S, rel=0.05)


def test_what_a_preemption_computes_again_is_paid_for_again() -> None:
    rig = PaidRig(spec=make_spec(num_blocks=10))
    for name in ("a", "b"):
        rig.add(make_request(name, prompt(8, seed=ord(name)), max_tokens=20))

    while rig.engine.has_work():
        rig.pay()

    assert rig.engine.stats(rig.now).preemption_total > 0
    assert sum(cost.prefill_token_count for cost in rig.costs) > 16
    assert sum(cost.prefill_seconds + cost.decode_seconds for cost in rig.costs) == pytest.approx(rig.busy_s)


def test_a_cancelled_request_leaves_what_it_took_and_one_that_never_ran_leaves_nothing() -> None:
    rig = PaidRig(max_num_seqs=1)
    rig.add(make_request("runs", prompt(8), max_tokens=50))
    rig.add(make_request("waits", prompt(8, seed=1), max_tokens=50))
    for _ in range(3):
        rig.pay()
    rig.engine.abort("runs")
    rig.engine.abort("waits")
    rig.pay()

    assert [cost.key.request_id for cost in rig.costs] == ["runs"]
    assert rig.of("runs").decode_token_count == 2
    assert rig.of("runs").prefill_seconds + rig.of("runs").decode_seconds == pytest.approx(rig.busy_s)


def test_a_name_that_is_used_again_pays_for_itself_alone() -> None:
    rig = PaidRig()
    for _ in range(2):
        # One token to compute, as in the decode before: the whole blocks of the prompt come from the cache.
        rig.add(make_request("again", prompt(9), max_tokens=4))
        while rig.engine.has_work():
            rig.pay()
        rig.outputs.clear()

    first, second = rig.costs
    assert (first.prefill_token_count, first.decode_token_count) == (9, 3)
    assert (second.prefill_token_count, second.decode_token_count) == (1, 3)
    assert sum(cost.prefill_seconds + cost.decode_seconds for cost in rig.costs) == pytest.approx(rig.busy_s)


def test_blocks_are_held_for_the_time_of_each_step() -> None:
    rig = PaidRig()
    for name, size in (("a", 5), ("b", 11)):
        rig.add(make_request(name, prompt(size, seed=size), max_tokens=30 if name == "a" else 18))
    held: dict[str, float] = {"a": 0.0, "b": 0.0}
    while rig.engine.has_work():
        seconds = rig.pay()
        for row in rig.last.scheduled:
            held[row.key.request_id] += len(row.block_table) * seconds

    assert {name: rig.of(name).block_seconds for name in held} == pytest.approx(held)


def test_costs_of_steps_that_nobody_timed_are_dropped() -> None:
    rig = PaidRig()
    for n in range(5):
        rig.add(make_request(f"r{n}", max_tokens=3))
        rig.run()
    rig.add(make_request("timed", max_tokens=1))
    rig.pay()

    assert [cost.key.request_id for cost in rig.costs] == ["timed"]
    assert rig.engine.take_costs(1.0) == []


def test_weights_are_learnt_from_mixed_steps_alone() -> None:
    weights, sizes = TokenWeights(), random.Random(1)

    for _ in range(200):
        decoded, prefilled = sizes.randint(1, 32), sizes.randint(0, 256)
        weights.note(decoded, prefilled, decoded * 0.002 + prefilled * 0.0002)

    assert weights.prefill_weight == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("steps", [[], [(1, 0, 0.1)] * 50, [(0, 9, 0.1)] * 50, [(1, 1, 0.1)] * 50])
def test_what_steps_of_one_kind_cannot_teach_weighs_the_same(steps: list[tuple[int, int, float]]) -> None:
    weights = TokenWeights()
    for decoded, prefilled, seconds in steps:
        weights.note(decoded, prefilled, seconds)

    assert weights.prefill_weight == 1.0
