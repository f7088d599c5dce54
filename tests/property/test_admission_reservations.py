"""Reservations conserve at tenant and key: held + spent never passes a limit, nothing is held at idle (contract M6)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.common.admission_types import QuotaLimits, Reserve, Spent
from services.common.redis_client import connect
from tests.helpers.admission import StoreTime, make_store, open_budget
from tests.helpers.redis import RedisProcess

TENANT = QuotaLimits(
    requests_per_minute=20,
    tokens_per_minute=500,
    concurrent_requests=4,
    budget_tokens=900,
    daily_budget_tokens=400,
    monthly_budget_nanos=40_000,
)
KEY = QuotaLimits(concurrent_requests=3, output_tokens_per_minute=300, daily_budget_tokens=250)
KEYS = ("", "k1", "k2")
PRICES = (7, 50)
HOLD_MS = 30_000


@dataclasses.dataclass
class Held:
    """A reservation as the model knows it."""

    ask: Reserve
    leased: int
    expires_at: int

    @property
    def nanos(self) -> int:
        return cost(self.ask, self.leased)


def cost(ask: Reserve, tokens: int) -> int:
    return min(tokens, ask.prompt_tokens) * ask.prices[0] + max(0, tokens - ask.prompt_tokens) * ask.prices[1]


class Reservations(RuleBasedStateMachine):
    """Gateways that reserve, renew, settle, release and die, against a model that keeps the same books."""

    requests = Bundle("requests")
    server: RedisProcess

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.time = StoreTime()
        self.client = connect(self.server.url)
        self.store = make_store(self.client, self.time)
        self.held: dict[str, Held] = {}
        # What was settled: (key, day, tokens, nanos).
        self.settled: list[tuple[str, Any, int, int]] = []
        self.number = 0

    def wait(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def free_expired(self) -> None:
        self.held = {i: h for i, h in self.held.items() if h.expires_at > self.time.ms}

    def spent(self, key: str, *, day: bool = False) -> tuple[int, int]:
        rows = [s for s in self.settled if key in ("", s[0]) and (not day or s[1] == self.time.day)]
        return sum(row[2] for row in rows), sum(row[3] for row in rows)

    def holding(self, key: str) -> tuple[int, int, int]:
        held = [h for h in self.held.values() if key in ("", h.ask.key_id)]
        return len(held), sum(h.leased for h in held), sum(h.nanos for h in held)

    def room(self, key: str) -> int:
        """Tokens that the budgets of the tenant and of the key still lend."""
        _count, leased, _ = self.holding("")
        rooms = [900 - self.spent("")[0] - leased, 400 - self.spent("", day=True)[0] - leased]
        if key:
            rooms.append(250 - self.spent(key, day=True)[0] - self.holding(key)[1])
        return min(rooms)

    @initialize()
    def flush(self) -> None:
        self.server.flush()
        self.wait(open_budget(self.store, self.time.day, "t", "k1", "k2"))

    @rule(
        target=requests,
        key=st.sampled_from(KEYS),
        prompt=st.integers(0, 60),
        output=st.integers(0, 60),
        lease=st.integers(0, 150),
        twice=st.booleans(),
    )
    def reserve(self, key: str, prompt: int, output: int, lease: int, twice: bool) -> Any:
        self.number += 1
        request_id = f"r{self.number}"
        ask = Reserve("t", request_id, prompt, output, lease, TENANT, key, KEY, PRICES)
        refusal = self.wait(self.store.reserve(ask))
        self.free_expired()
        if refusal is not None:
            self.check_refusal(ask, refusal)
            return multiple()
        assert len(self.held) < 4
        assert not key or self.holding(key)[0] < 3
        assert lease <= self.room(key)
        self.held[request_id] = Held(ask, lease, self.time.ms + HOLD_MS)
        if twice:
            assert self.wait(self.store.reserve(ask)) is None
        return request_id

    def check_refusal(self, ask: Reserve, refusal: Any) -> None:
        if refusal.reason == "BUDGET_EXHAUSTED" and refusal.limit.endswith("tokens"):
            assert ask.lease_tokens > self.room(ask.key_id)
        if refusal.reason == "CONCURRENT_REQUESTS":
            assert self.holding(ask.key_id if refusal.of_key else "")[0] == (3 if refusal.of_key else 4)

    @rule(request_id=requests)
    def renew(self, request_id: str) -> None:
        self.wait(self.store.renew_reservations("t", [request_id]))
        if request_id in self.held:
            self.held[request_id].expires_at = self.time.ms + HOLD_MS

    @rule(request_id=requests, tokens=st.integers(1, 64))
    def renew_budget(self, request_id: str, tokens: int) -> None:
        held = self.held.get(request_id)
        if held is None or held.expires_at <= self.time.ms:
            return  # and the script, which frees what is expired, is not called
        self.free_expired()
        room, money = self.room(held.ask.key_id), 40_000 - self.spent("")[1] - self.holding("")[2]
        granted = self.wait(self.store.renew_budget(dataclasses.replace(held.ask, lease_tokens=held.leased), tokens))
        assert 0 <= granted <= max(0, min(tokens, room))
        assert cost(held.ask, held.leased + granted) - held.nanos <= money
        if granted < min(tokens, room):
            assert cost(held.ask, held.leased + granted + 1) - held.nanos > money
        held.leased += granted
        held.expires_at = self.time.ms + HOLD_MS

    @rule(request_id=consumes(requests), share=st.floats(0, 1), twice=st.booleans())
    def settle(self, request_id: str, share: float, twice: bool) -> None:
        held = self.held.pop(request_id, None)
        billed = int(held.leased * share) if held is not None else 5
        for _ in range(2 if twice else 1):
            self.wait(self.store.settle("t", request_id, billed, billed))
        if held is not None:
            self.settled.append((held.ask.key_id, self.time.day, billed, cost(held.ask, billed)))

    @rule(request_id=consumes(requests))
    def release(self, request_id: str) -> None:
        self.held.pop(request_id, None)
        self.wait(self.store.release("t", request_id))

    @rule(request_id=consumes(requests))
    def gateway_dies(self, request_id: str) -> None:
        pass

    @rule(key=st.sampled_from(KEYS), behind=st.integers(0, 50))
    def ledger_follows(self, key: str, behind: int) -> None:
        total, of_day = self.spent(key)[0], self.spent(key, day=True)[0]
        told = Spent(self.time.day, max(0, total - behind), max(0, of_day - behind), 0, 0, 0)
        self.wait(self.store.raise_spent("t", key, Spent(self.time.day, total + 99), told))

    @rule(ms=st.sampled_from([1, 999, 10_000, 29_999, 30_000, 61_000, 6 * 3_600_000]))
    def time_passes(self, ms: int) -> None:
        self.time.advance(ms)

    @invariant()
    def books_agree(self) -> None:
        for key in KEYS:
            name = f"mr:{{t}}:budget|{key}" if key else "mr:{t}:budget"
            fields = ("reserved", "nanos", "spent", "day_tokens", "day")
            reserved, nanos, spent, of_day, day = (int(v or 0) for v in self.wait(self.client.hmget(name, fields)))
            assert (reserved, nanos) == self.holding(key)[1:]
            assert spent == self.spent(key)[0]
            if day == self.time.ms // 86_400_000:
                assert of_day == self.spent(key, day=True)[0]
                assert reserved + of_day <= (250 if key else 400)
            assert key or reserved + spent <= 900
            assert key or nanos + self.spent("")[1] <= 40_000

    def teardown(self) -> None:
        self.time.advance(61_000)
        self.wait(self.store.renew_budget(Reserve("t", "idle", 0, 0, 0, TENANT), 0))
        for key in ("", "|k1", "|k2"):
            assert self.wait(self.client.hmget(f"mr:{{t}}:budget{key}", "reserved", "nanos", "live")) == [None] * 3
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
