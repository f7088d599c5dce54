"""Whatever workers send, in whatever order, the front gets a gap-free prefix of one sequence."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb

from services.gateway.generation import RequestLimits
from services.gateway.request_actions import Action, Readmit, Reattach, SendCancel
from services.gateway.requests import RequestCore

MAX_TOKENS = 24
WORKERS = ("worker-a", "worker-b")


def token(choice: int, index: int) -> int:
    return choice * 1_000 + index


@dataclasses.dataclass
class Attempt:
    """One run on one worker: what it would send, whether or not anybody listens."""

    epoch: int
    instance: str
    starts: dict[int, int]
    lengths: dict[int, int]


class World:
    """A core, workers that send anything, and a front that reads."""

    def __init__(self, choices: int, ends: list[int]) -> None:
        self.core = RequestCore(RequestLimits(choices, MAX_TOKENS, deadline=1e9), now=0.0)
        self.ends = ends
        self.attempts: list[Attempt] = []
        self.front: dict[int, list[int]] = {c: [] for c in range(choices)}
        self.finished: dict[int, int] = {}
        self.claims = 0
        self.expected = list(range(choices))
        self.new_attempt(WORKERS[0])

    def new_attempt(self, instance: str) -> None:
        """A router submits (again): a fresh epoch, from the prefix of the last admission."""
        self.claims += 1
        starts = {c: self.core.choices[c].base for c in self.expected}
        self.attempts.append(Attempt(self.claims << 8 | 1, instance, starts, {}))

    def send(self, attempt: Attempt, kind: str, choice: int, first: int, count: int) -> None:
        event = pb.Event(request_id="r", epoch=attempt.epoch)
        if kind == "accepted":
            event.accepted.SetInParent()
        elif kind == "started":
            event.started.cached_token_count = 1
        elif kind == "failed":
            event.failed.reason, event.failed.retryable = "DRAINING", True
        else:
            if choice not in attempt.starts:
                return
            first = max(first, attempt.starts[choice])
            end = min(first + count, self.ends[choice])
            if first > end:
                return
            event.delta.choice, event.delta.first_index = choice, first
            event.delta.token_ids.extend(token(choice, i) for i in range(first, end))
            if end == self.ends[choice]:
                event.delta.finish.reason = common_pb2.FINISH_REASON_STOP
        self.perform(self.core.on_event(attempt.instance, event, 1.0))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            assert not (isinstance(action, SendCancel) and self.bound_to(action) and not self.over), "cancelled itself"
            if isinstance(action, Readmit):
                self.expected = [c for c, _ in action.prefix] or list(range(len(self.front)))
                for choice, ids in action.prefix:
                    assert list(ids) == [token(choice, i) for i in range(len(ids))]
                    assert len(ids) >= len(self.front[choice]), "a resume forgets delivered tokens"
            elif isinstance(action, Reattach):
                assert self.core.binding is not None

    @property
    def over(self) -> bool:
        return self.core.error is not None or self.core.produced

    def bound_to(self, cancel: SendCancel) -> bool:
        bound = self.core.binding
        return bound is not None and (bound.epoch, bound.instance) == (cancel.epoch, cancel.instance)

    def read(self) -> None:
        while (event := self.core.pull()) is not None:
            held = self.front[event.choice]
            assert event.choice not in self.finished, "tokens after the end of a choice"
            assert event.first_index == len(held), "a gap or a duplicate"
            held.extend(event.token_ids)
            assert held == [token(event.choice, i) for i in range(len(held))], "a foreign token"
            confirmed = self.core.choices[event.choice].confirmed
            assert self.core.binding is None or len(held) <= confirmed + 16, "ahead of what the worker knows"
            if event.finish_reason is not None:
                self.finished[event.choice] = event.finish_reason
                assert len(held) == self.ends[event.choice]
            self.core.mark_delivered(event.choice, len(held))

    def ack(self) -> None:
        entry = self.core.ack("r")
        if entry is not None:
            self.core.on_acked(entry.epoch, entry.delivered_counts)


OPERATION = st.tuples(
    st.sampled_from(["delta"] * 8 + ["accepted", "started", "failed", "read", "ack", "ack", "resubmit", "lost"]),
    st.integers(0, 5),
    st.integers(0, 1),
    st.integers(0, MAX_TOKENS),
    st.integers(0, 9),
)


@settings(max_examples=400, deadline=None)
@given(ends=st.lists(st.integers(1, MAX_TOKENS), min_size=2, max_size=2), operations=st.lists(OPERATION, max_size=60))
def test_the_front_gets_a_gap_free_prefix_of_one_sequence(
    ends: list[int], operations: list[tuple[str, int, int, int, int]]
) -> None:
    world = World(2, ends)

    for kind, which, choice, first, count in operations:
        if kind == "read":
            world.read()
        elif kind == "ack":
            world.ack()
        elif kind == "resubmit":
            world.new_attempt(WORKERS[which % 2])
        elif kind == "lost":
            world.perform(world.core.on_worker_lost(WORKERS[which % 2], 2.0))
        else:
            world.send(world.attempts[which % len(world.attempts)], kind, choice, first, count)

    world.read()
    if world.core.done:
        assert {c: len(t) for c, t in world.front.items()} == dict(enumerate(ends))


@settings(max_examples=200, deadline=None)
@given(
    ends=st.lists(st.integers(1, MAX_TOKENS), min_size=2, max_size=2),
    deaths=st.lists(st.integers(0, MAX_TOKENS), max_size=1),
    chunk=st.integers(1, 7),
)
def test_a_death_at_any_token_changes_nothing_that_the_front_sees(
    ends: list[int], deaths: list[int], chunk: int
) -> None:
    world = World(2, ends)
    for death in [*deaths, MAX_TOKENS + 1]:
        attempt = world.attempts[-1]
        world.send(attempt, "accepted", 0, 0, 0)
        for first in range(0, min(death, MAX_TOKENS), chunk):
            for choice in (0, 1):
                world.send(attempt, "delta", choice, first, chunk)
                world.ack()
                world.read()
        if death <= MAX_TOKENS:
            world.perform(world.core.on_worker_lost(attempt.instance, 2.0))
            world.new_attempt(WORKERS[1])

    world.ack()
    world.read()

    assert world.core.error is None
    assert world.core.done
    assert {c: len(t) for c, t in world.front.items()} == dict(enumerate(ends))
