"""The record of an Idempotency-Key: one owner, an answer that stays, and only a dead owner is replaced (R10)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.common.redis_client import connect
from services.gateway.answer_log import Head, KeptAnswer
from services.gateway.idempotency_store import RESULT_BYTES, IdempotencyStore, Record
from tests.helpers.redis import RedisProcess

GATEWAYS = ("g1", "g2", "g3")
T = TypeVar("T")


def answer_of(token: str, size: int = 0) -> KeptAnswer:
    return KeptAnswer(token, Head(200, []), [token.encode(), b"x" * size])


class Keys(RuleBasedStateMachine):
    """Gateways that claim, complete, release, die and come back frozen, against a model of what may be kept."""

    server: RedisProcess

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.client = connect(self.server.url)
        self.store = IdempotencyStore(self.client)
        self.model: Record | None = None
        self.tokens: dict[str, str] = {}
        self.seen: dict[str, Record | None] = dict.fromkeys(GATEWAYS)
        self.dead: set[str] = set()
        self.answers: set[str] = set()

    def teardown(self) -> None:
        self.wait(self.client.aclose())
        self.loop.close()

    def wait(self, work: Coroutine[object, object, T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize()
    def start_empty(self) -> None:
        self.server.flush()

    @rule(gateway=st.sampled_from(GATEWAYS))
    def look(self, gateway: str) -> None:
        self.seen[gateway] = self.wait(self.store.read("t", "k"))

    @rule(gateway=st.sampled_from(GATEWAYS), body=st.sampled_from("ab"), twice=st.booleans())
    def claim(self, gateway: str, body: str, twice: bool) -> None:
        """As the gateway does: never over a record whose owner it has not found dead."""
        seen = self.seen[gateway]
        if gateway in self.dead or (seen is not None and (seen.done or seen.owner not in self.dead)):
            return
        token = f"{gateway}-{len(self.tokens)}"
        self.tokens[token] = gateway
        expected = None if seen is None else seen.token
        won = [
            self.wait(self.store.claim("t", "k", token, body=body, owner=gateway, instead_of=expected))
            for _ in range(1 + twice)
        ]
        free = self.model is None or (self.model.token == expected and not self.model.done)
        assert set(won) == {free}
        if free:
            assert self.model is None or self.model.owner in self.dead
            self.model = Record(token, body, gateway, False, None)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), size=st.sampled_from([0, RESULT_BYTES]), kept=st.booleans())
    def complete(self, data: st.DataObject, size: int, kept: bool) -> None:
        """By any run there ever was, also one whose gateway was taken for dead."""
        token = data.draw(st.sampled_from(sorted(self.tokens)))
        answer = answer_of(token, size) if kept else None
        won = self.wait(self.store.complete("t", "k", token, answer))
        mine = self.model is not None and self.model.token == token
        assert won == (mine and not (kept and size))
        if won and self.model is not None and not self.model.done:
            self.model = dataclasses.replace(self.model, done=True, result=answer)
            self.answers.add(token)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.tokens)))
        self.wait(self.store.release("t", "k", token))
        if self.model is not None and self.model.token == token and not self.model.done:
            self.model = None

    @rule(gateway=st.sampled_from(GATEWAYS))
    def lose_the_lease(self, gateway: str) -> None:
        self.dead.add(gateway)

    @invariant()
    def redis_holds_what_the_model_says(self) -> None:
        assert self.wait(self.store.read("t", "k")) == self.model
        assert len(self.answers) <= 1
        assert self.wait(self.store.read("other", "k")) is None


def test_a_key_has_one_owner_and_one_answer(redis_process: RedisProcess) -> None:
    Keys.server = redis_process
    machine = Keys.TestCase
    machine.settings = settings(
        max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine().runTest()
