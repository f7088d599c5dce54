"""Reservations conserve: reserved + spent never passes the limit, and nothing is reserved at idle (contract M6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.common.admission_types import QuotaLimits, Reserve
from services.common.redis_client import connect
from tests.helpers.admission import StoreTime, make_store, open_budget
from tests.helpers.redis import RedisProcess

LIMITS = QuotaLimits(requests_per_minute=20, tokens_per_minute=500, concurrent_requests=4, budget_tokens=400)
HOLD_MS = 30_000


class Reservations(RuleBasedStateMachine):
    """Gateways that reserve, renew, settle, release and die, against a model that keeps the same book."""

    requests = Bundle("requests")
    server: RedisProcess

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.time = StoreTime()
        self.client = connect(self.server.url)
        self.store = make_store(self.client, self.time)
        self.held: dict[str, tuple[int, int]] = {}  # id -> (budget, expiry)
        self.spent = 0
        self.number = 0

    def wait(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def free_expired(self) -> None:
        self.held = {i: h for i, h in self.held.items() if h[1] > self.time.ms}

    @initialize()
    def flush(self) -> None:
        self.server.flush()
        self.wait(open_budget(self.store, self.time.day, "t"))

    @rule(target=requests, tokens=st.integers(0, 100), budget=st.integers(0, 150), twice=st.booleans())
    def reserve(self, tokens: int, budget: int, twice: bool) -> Any:
        self.number += 1
        request_id = f"r{self.number}"
        refusal = self.wait(self.store.reserve(Reserve("t", request_id, 0, tokens, budget, LIMITS)))
        self.free_expired_if_reached(refusal)
        if refusal is not None:
            return multiple()
        assert len(self.held) < 4
        self.held[request_id] = (budget, self.time.ms + HOLD_MS)
        if twice:
            assert self.wait(self.store.reserve(Reserve("t", request_id, 0, tokens, budget, LIMITS))) is None
        return request_id

    def free_expired_if_reached(self, refusal: Any) -> None:
        self.free_expired()
        if refusal is not None and refusal.reason == "BUDGET_EXHAUSTED":
            assert sum(b for b, _ in self.held.values()) + self.spent + 150 > 400
        if refusal is not None and refusal.reason == "CONCURRENT_REQUESTS":
            assert len(self.held) == 4

    @rule(request_id=requests)
    def renew(self, request_id: str) -> None:
        self.wait(self.store.renew_reservations("t", [request_id]))
        if request_id in self.held:
            self.held[request_id] = (self.held[request_id][0], self.time.ms + HOLD_MS)

    @rule(request_id=requests, tokens=st.integers(1, 64))
    def renew_budget(self, request_id: str, tokens: int) -> None:
        self.free_expired()
        room = 400 - self.spent - sum(b for b, _ in self.held.values())
        granted = self.wait(self.store.renew_budget(Reserve("t", request_id, 0, 0, 0, LIMITS), tokens))
        assert granted == max(0, min(tokens, room))
        if granted or request_id in self.held:
            budget = self.held.get(request_id, (0, 0))[0]
            self.held[request_id] = (budget + granted, self.time.ms + HOLD_MS)

    @rule(request_id=consumes(requests), share=st.floats(0, 1), twice=st.booleans())
    def settle(self, request_id: str, share: float, twice: bool) -> None:
        budget = self.held.pop(request_id, (0, 0))[0]
        billed = int(budget * share)
        for _ in range(2 if twice else 1):
            self.wait(self.store.settle("t", request_id, billed, billed))
        self.spent += billed

    @rule(request_id=consumes(requests))
    def release(self, request_id: str) -> None:
        self.held.pop(request_id, None)
        self.wait(self.store.release("t", request_id))

    @rule(request_id=consumes(requests))
    def gateway_dies(self, request_id: str) -> None:
        pass

    @rule(ms=st.sampled_from([1, 999, 10_000, 29_999, 30_000, 61_000]))
    def time_passes(self, ms: int) -> None:
        self.time.advance(ms)

    @invariant()
    def books_agree(self) -> None:
        reserved, spent = (int(v or 0) for v in self.wait(self.client.hmget("mr:{t}:budget", "reserved", "spent")))
        assert spent == self.spent
        assert reserved == sum(budget for budget, _ in self.held.values())
        assert reserved + spent <= 400

    def teardown(self) -> None:
        self.time.advance(61_000)
        self.wait(self.store.renew_budget(Reserve("t", "idle", 0, 0, 0, LIMITS), 0))
        assert self.wait(self.client.hget("mr:{t}:budget", "reserved")) is None
        assert self.wait(self.client.exists("mr:{t}:res", "mr:{t}:live")) == 0
        self.wait(self.client.aclose())
        self.loop.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_reservations_conserve(redis_process: RedisProcess) -> None:
    machine = type("Machine", (Reservations,), {"server": redis_process})
    case = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(
        max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case("runTest").runTest()
