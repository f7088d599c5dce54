"""Tenants against each other on the echo engine, each step priced by its tokens, in simulated time (contract Q6)."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from services.worker.engine.engine import Engine
from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.fake_model_runner import FakeModelRunner
from tests.helpers.engine import make_request, make_spec, prompt

STEP_S, TOKEN_S = 0.010, 0.000_1
SLOTS = 8
PROMPT, OUTPUT = 64, 16
# A running request of the other tenant ends within this time at the latest: one turnover of a slot.
TURNOVER_S = (OUTPUT + 1) * (STEP_S + TOKEN_S * (SLOTS * PROMPT))


@dataclasses.dataclass(frozen=True)
class Ask:
    at: float
    request_id: str
    tenant: str
    weight: float = 1.0


@dataclasses.dataclass
class Seen:
    """What clients saw: time to the first token and tokens, by tenant."""

    ttft: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    tokens: Counter[str] = dataclasses.field(default_factory=Counter)
    completed: int = 0

    def p95(self, tenant: str) -> float:
        return sorted(self.ttft[tenant])[int(len(self.ttft[tenant]) * 0.95)]


def serve(asks: Iterable[Ask], *, until: float) -> Seen:
    """Run one engine until that time; each step takes its floor and a share for each token computed."""
    config = EngineConfig(
        model_version="echo@1", max_num_seqs=SLOTS, max_num_batched_tokens=SLOTS * PROMPT, max_prefill_chunk=PROMPT
    )
    engine = Engine(FakeModelRunner(make_spec(num_blocks=1_024)), config)
    upcoming = sorted(asks, key=lambda ask: ask.at, reverse=True)
    asked: dict[str, Ask] = {}
    seen, now = Seen(), 0.0
    while now < until:
        while upcoming and upcoming[-1].at <= now:
            ask = upcoming.pop()
            asked[ask.request_id] = ask
            tokens = prompt(PROMPT, seed=len(asked))
            made = make_request(ask.request_id, tokens, max_tokens=OUTPUT, tenant=ask.tenant, weight=ask.weight)
            engine.add_request(made, now=now)
        if not engine.has_work():
            if not upcoming:
                break
            now = upcoming[-1].at
            continue
        outputs = engine.step(now)
        now += STEP_S + TOKEN_S * engine.stats(now).scheduled_token_count
        for output in outputs:
            ask = asked[output.key.request_id]
            seen.completed += output.finish_reason is not None
            seen.tokens[ask.tenant] += len(output.token_ids)
            if output.token_ids and output.first_index == 0:
                seen.ttft.setdefault(ask.tenant, []).append(now - ask.at)
    return seen


def poisson(tenant: str, *, per_second: float, until: float, seed: int) -> list[Ask]:
    rng, at = random.Random(seed), 0.0
    asks: list[Ask] = []
    while (at := at + rng.expovariate(per_second)) < until:
        asks.append(Ask(at, f"{tenant}{len(asks)}", tenant))
    return asks


def backlog(tenant: str, count: int, *, weight: float = 1.0) -> list[Ask]:
    return [Ask(0.0, f"{tenant}-{number}", tenant, weight) for number in range(count)]


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 for equal shares, 1 / n when one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def test_a_tenant_at_fifty_times_the_load_at_most_doubles_the_others_waits() -> None:
    quiet = poisson("quiet", per_second=1.0, until=20.0, seed=1)
    noisy = poisson("noisy", per_second=50.0, until=20.0, seed=2)

    alone = serve(quiet, until=25.0)
    together = serve(quiet + noisy, until=25.0)

    assert len(together.ttft["quiet"]) == len(quiet)
    assert together.p95("noisy") > 2.0
    assert together.p95("quiet") <= 2 * alone.p95("quiet") + TURNOVER_S


def test_tenants_of_equal_weight_get_equal_tokens() -> None:
    tenants = [f"t{number}" for number in range(6)]

    seen = serve([ask for n, tenant in enumerate(tenants) for ask in backlog(tenant, 40 * (n + 1))], until=2.0)

    assert jain([seen.tokens[tenant] for tenant in tenants]) >= 0.95


@pytest.mark.parametrize("weight", [2.0, 3.0])
def test_tokens_follow_weights(weight: float) -> None:
    seen = serve(backlog("heavy", 300, weight=weight) + backlog("light", 300), until=4.0)

    assert max(seen.tokens.values()) < 300 * OUTPUT
    ratio = seen.tokens["heavy"] / seen.tokens["light"]
    assert ratio == pytest.approx(weight, rel=0.1)


def test_five_times_more_than_fits_keeps_the_goodput() -> None:
    """Completed requests in the time: work that waits costs the work that runs nothing."""

    def completed(per_second: float) -> int:
        return serve(poisson("t", per_second=per_second, until=4.0, seed=3), until=4.0).completed

    peak = max(completed(30.0), completed(45.0), completed(60.0))

    assert completed(225.0) >= 0.9 * peak
    assert peak < 225.0 * 4.0 / 4
