"""The request table: what is sent, kept, confirmed, fenced and forgotten. No network, no clock."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from millrace.worker.v1 import worker_service_pb2 as pb

from services.worker.engine.outputs import EngineOutput
from services.worker.engine.request import FinishReason, RequestKey
from services.worker.requests import (
    COALESCE_S,
    ENDED_RETENTION_S,
    FRAME_POSITIONS,
    GATEWAY_GRACE_S,
    Abort,
    RequestTable,
    StaleEpochError,
)
from services.worker.streams import Failure, RequestFacts, RequestStream
from tests.helpers.worker import Received, entry

WALL = 1_800_000_000.0


def stream_of(
    request_id: str = "r1", *, epoch: int = 256, gateway: str = "g1", choices: int = 1, start: int = 0
) -> RequestStream:
    work = entry(request_id, gateway=gateway, choices=choices)
    facts = RequestFacts(request_id, 1, epoch, gateway, work, 3, 1, "")
    return RequestStream(facts, dict.fromkeys(range(choices), start), now_wall=WALL)


def table_with(*streams: RequestStream, gateway: str = "g1") -> RequestTable:
    table = RequestTable()
    table.attach(pb.Hello(gateway_instance=gateway))
    for stream in streams:
        table.admit(stream)
    return table


def output(
    first: int, ids: tuple[int, ...], *, request_id: str = "r1", choice: int = 0, epoch: int = 256,
    finish: FinishReason | None = None, started: bool = False,
) -> EngineOutput:  # fmt: skip
    return EngineOutput(RequestKey(request_id, choice, epoch), first, ids, started=started, finish_reason=finish)


def apply(table: RequestTable, *outputs: EngineOutput, now: float = 0.0) -> tuple[set[str], list[Abort]]:
    return table.apply(outputs, now=now, now_wall=WALL)


def frame(table: RequestTable, now: float = 0.0, gateway: str = "g1") -> list[pb.Event]:
    events, touched = table.links[gateway].take_events(now)
    table.settle_sent(touched)
    return events


def kinds(events: list[pb.Event]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def ack(request_id: str = "r1", *indices: int, epoch: int = 256, done: bool = False) -> pb.AckEntry:
    return pb.AckEntry(request_id=request_id, epoch=epoch, next_indices=indices, done=done)


def test_the_first_event_is_accepted_then_started_then_tokens_then_the_finish() -> None:
    table = table_with(stream_of())

    first = frame(table)
    apply(table, output(0, (10,), started=True))
    second = frame(table)
    apply(table, output(1, (11, 12), finish=FinishReason.LENGTH))
    third = frame(table)

    assert kinds(first) == ["accepted"]
    assert kinds(second) == ["started", "delta"]
    assert (third[0].delta.first_index, list(third[0].delta.token_ids)) == (1, [11, 12])
    assert third[0].delta.finish.usage.completion_token_count == 3
    assert frame(table) == []


def test_first_token_and_finish_go_at_once_and_the_rest_waits_for_company() -> None:
    table = table_with(stream_of())
    link = table.links["g1"]
    frame(table, now=100.0)

    assert link.next_due() is None
    apply(table, output(0, (10,), started=True))
    assert link.next_due() == float("-inf")
    frame(table, now=100.5)
    apply(table, output(1, (11,)))
    assert link.next_due() == 100.5 + COALESCE_S
    apply(table, output(2, (12,), finish=FinishReason.STOP))
    assert link.next_due() == float("-inf")


def test_nothing_is_built_twice_and_tokens_between_frames_share_a_delta() -> None:
    table = table_with(stream_of())
    apply(table, output(0, (10,), started=True))
    frame(table)

    apply(table, output(1, (11,)))
    apply(table, output(2, (12,)))
    events = frame(table)

    assert len(events) == 1
    assert list(events[0].delta.token_ids) == [11, 12]


def test_acknowledged_tokens_are_forgotten_and_what_was_not_sent_cannot_be_acknowledged() -> None:
    stream = stream_of()
    table = table_with(stream)
    apply(table, output(0, (10, 11, 12), started=True))
    frame(table)
    apply(table, output(3, (13, 14)))

    table.ack("g1", [ack("r1", 99)])

    assert stream.delivered_counts() == [5]
    assert list(frame(table)[0].delta.token_ids) == [13, 14]


def test_an_ack_of_another_epoch_or_gateway_changes_nothing() -> None:
    stream = stream_of()
    table = table_with(stream)
    table.attach(pb.Hello(gateway_instance="g2"))
    apply(table, output(0, (10,), started=True))
    frame(table)

    table.ack("g1", [ack("r1", 1, epoch=255)])
    table.ack("g2", [ack("r1", 1, done=True)])

    assert stream.delivered_counts() == [0]


def test_what_is_held_is_forgotten_and_what_was_delivered_is_kept_for_the_bill() -> None:
    stream = stream_of()
    table = table_with(stream)
    apply(table, output(0, (10, 11, 12), started=True))
    frame(table)

    table.ack("g1", [pb.AckEntry(request_id="r1", epoch=256, next_indices=[3], delivered_counts=[2])])
    table.ack("g1", [pb.AckEntry(request_id="r1", epoch=256, next_indices=[3], delivered_counts=[1])])

    assert stream.choices[0].base == 3
    assert stream.delivered_counts() == [2]


def test_done_forgets_an_ended_request_but_not_a_running_one() -> None:
    table = table_with(stream_of())
    apply(table, output(0, (10,), started=True))
    frame(table)

    table.ack("g1", [ack("r1", 1, done=True)])
    running = len(table)
    apply(table, output(1, (11,), finish=FinishReason.STOP))
    frame(table)
    table.ack("g1", [ack("r1", 2, done=True)])

    assert (running, len(table)) == (1, 0)


def test_a_continue_skips_what_the_gateway_holds_and_repeats_the_rest() -> None:
    table = table_with(stream_of())
    apply(table, output(0, (10, 11, 12, 13), started=True, finish=FinishReason.STOP))
    frame(table)
    table.ack("g1", [ack("r1", 1)])
    table.detach("g1", 0.0)

    hello = pb.Hello(gateway_instance="g1")
    hello.continued.add(request_id="r1", epoch=256, next_indices=[2])
    table.attach(hello)
    events = frame(table)

    assert kinds(events) == ["started", "delta"]
    assert (events[1].delta.first_index, list(events[1].delta.token_ids)) == (2, [12, 13])
    assert events[1].delta.HasField("finish")


def test_a_continue_below_what_is_kept_is_answered_as_lost() -> None:
    table = table_with(stream_of())
    apply(table, output(0, (10, 11, 12), started=True))
    frame(table)
    table.ack("g1", [ack("r1", 2)])

    hello = pb.Hello(gateway_instance="g1")
    hello.continued.add(request_id="r1", epoch=256, next_indices=[1])
    table.attach(hello)

    failed = [e.failed for e in frame(table) if e.HasField("failed")]
    assert [(f.reason, f.retryable) for f in failed] == [("WORKER_LOST", True)]


def test_outputs_of_another_epoch_are_ignored() -> None:
    stream = stream_of(epoch=512)
    table = table_with(stream)

    apply(table, output(0, (10,), epoch=256, started=True))

    assert stream.produced_count() == 0


def test_a_gap_in_the_engine_outputs_fails_the_request_and_stops_it() -> None:
    stream = stream_of()
    table = table_with(stream)

    changed, aborts = apply(table, output(2, (10,), started=True))

    assert changed == {"g1"}
    assert aborts == [Abort("r1", 256)]
    assert stream.failure is not None
    assert stream.failure.retryable
    assert kinds(frame(table))[-1] == "failed"
    table.check_invariants()


def test_an_error_of_one_choice_ends_the_request_and_stops_the_others() -> None:
    stream = stream_of(choices=2)
    table = table_with(stream)

    _, aborts = apply(table, output(0, (), choice=1, finish=FinishReason.ERROR))

    assert aborts == [Abort("r1", 256)]
    assert table.slot_count == 0
    assert stream.failure is not None
    assert not stream.failure.retryable


def test_slots_are_counted_until_each_choice_ends() -> None:
    table = table_with(stream_of(choices=3))
    before = table.slot_count
    apply(table, output(0, (1,), choice=1, finish=FinishReason.LENGTH, started=True))

    assert (before, table.slot_count) == (3, 2)


@pytest.mark.parametrize("epoch", [255, 256])
def test_an_epoch_that_is_not_newer_is_stale(epoch: int) -> None:
    table = table_with(stream_of())

    with pytest.raises(StaleEpochError):
        table.admit(stream_of(epoch=epoch))


def test_a_newer_epoch_replaces_the_older_even_from_another_gateway() -> None:
    older, newer = stream_of(), stream_of(epoch=512, gateway="g2")
    table = table_with(older)
    table.attach(pb.Hello(gateway_instance="g2"))

    superseded = table.admit(newer)

    assert superseded is older
    assert table.get("r1") is newer
    assert frame(table) == []
    table.check_invariants()


def test_a_finished_and_forgotten_request_does_not_run_again_under_its_epoch() -> None:
    table = table_with(stream_of())
    apply(table, output(0, (1,), finish=FinishReason.STOP, started=True))
    frame(table)
    table.ack("g1", [ack("r1", 1, done=True)])

    with pytest.raises(StaleEpochError):
        table.admit(stream_of())


def test_a_cancelled_request_is_forgotten_once_its_end_was_sent() -> None:
    table = table_with(stream_of())
    frame(table)

    stop = table.cancel("g1", pb.Cancel(request_id="r1", epoch=256))
    apply(table, output(0, (), finish=FinishReason.CANCELLED))
    held = len(table)
    events = frame(table)

    assert stop == Abort("r1", 256)
    assert held == 1
    assert events[-1].delta.HasField("finish")
    assert len(table) == 0


def test_a_cancel_of_an_older_epoch_leaves_the_newer_run_alone() -> None:
    table = table_with(stream_of(epoch=512))

    assert table.cancel("g1", pb.Cancel(request_id="r1", epoch=256)) is None
    assert table.get("r1") is not None


def test_a_second_cancel_forgets_at_once() -> None:
    table = table_with(stream_of())
    table.cancel("g1", pb.Cancel(request_id="r1", epoch=256))
    table.cancel("g1", pb.Cancel(request_id="r1", epoch=256))

    assert len(table) == 0
    table.check_invariants()


def test_a_lost_gateway_is_given_up_after_its_grace_and_not_before() -> None:
    stream = stream_of()
    table = table_with(stream)
    table.detach("g1", 100.0)

    early = table.expire(100.0 + GATEWAY_GRACE_S - 0.01)
    late = table.expire(100.0 + GATEWAY_GRACE_S)

    assert early == []
    assert late == [stream]
    assert len(table) == 0
    assert table.links == {}


def test_a_gateway_that_returned_in_time_is_not_given_up() -> None:
    table = table_with(stream_of())
    table.detach("g1", 100.0)
    table.attach(pb.Hello(gateway_instance="g1"))

    assert table.expire(200.0) == []


def test_an_end_that_nobody_confirms_is_forgotten_after_its_retention() -> None:
    table = table_with(stream_of(), stream_of("r2"))
    apply(table, output(0, (1,), finish=FinishReason.STOP, started=True), now=10.0)

    table.expire(10.0 + ENDED_RETENTION_S - 0.01)
    before = len(table)
    table.expire(10.0 + ENDED_RETENTION_S)

    assert (before, len(table)) == (2, 1)
    table.check_invariants()


def test_a_frame_is_bounded_and_the_rest_follows() -> None:
    stream = stream_of()
    table = table_with(stream)
    apply(table, output(0, tuple(range(FRAME_POSITIONS + 5)), started=True, finish=FinishReason.LENGTH))

    first, second = frame(table), frame(table)

    assert len(first[-1].delta.token_ids) == FRAME_POSITIONS
    assert not first[-1].delta.HasField("finish")
    assert len(second[0].delta.token_ids) == 5
    assert second[0].delta.HasField("finish")


def test_a_failure_comes_after_the_tokens_before_it() -> None:
    table = table_with(stream_of())
    apply(table, output(0, (1, 2), started=True))

    table.fail("r1", 256, Failure("ENGINE_ERROR", "x", True), now=0.0, now_wall=WALL)
    events = frame(table)

    assert kinds(events) == ["accepted", "started", "delta", "failed"]


def test_a_failed_request_is_kept_until_its_gateway_gives_it_up() -> None:
    table = table_with(stream_of())
    table.fail("r1", 256, Failure("ENGINE_ERROR", "x", True), now=0.0, now_wall=WALL)
    frame(table)
    held = len(table)

    table.cancel("g1", pb.Cancel(request_id="r1", epoch=256))

    assert (held, len(table)) == (1, 0)
    table.check_invariants()


@pytest.mark.parametrize("recorded", ["before it has stopped", "after it has stopped"])
def test_a_request_stopped_before_its_end_is_recorded_is_kept_until_the_gateway_says_so(recorded: str) -> None:
    table = table_with(stream_of())
    keep, done = pb.Cancel(request_id="r1", epoch=256, keep=True), ack("r1", 0, done=True)
    frame(table)

    assert table.cancel("g1", keep) == Abort("r1", 256)
    if recorded == "before it has stopped":
        table.ack("g1", [done])
    apply(table, output(0, (), finish=FinishReason.CANCELLED))
    frame(table)
    if recorded == "after it has stopped":
        assert table.cancel("g1", keep) is None
        assert len(table) == 1
        table.ack("g1", [done])

    assert len(table) == 0
    table.check_invariants()


def test_a_gateway_that_dies_before_it_records_an_end_leaves_it_to_the_worker() -> None:
    stream = stream_of()
    table = table_with(stream)
    apply(table, output(0, (10, 11), started=True))
    frame(table)
    table.ack("g1", [ack("r1", 2)])

    table.cancel("g1", pb.Cancel(request_id="r1", epoch=256, keep=True))
    apply(table, output(2, (), finish=FinishReason.CANCELLED))
    frame(table)
    table.detach("g1", 100.0)

    assert table.expire(100.0 + GATEWAY_GRACE_S) == [stream]
    assert stream.delivered_counts() == [2]


class GatewayMachine(RuleBasedStateMachine):
    """A gateway that loses frames, breaks, continues and acknowledges at random still sees every token once."""

    @initialize(choices=st.integers(1, 3), start=st.integers(0, 4))
    def begin(self, choices: int, start: int) -> None:
        self.start, self.made = start, [start] * choices
        self.stream = stream_of(choices=choices, start=start)
        self.table = table_with(self.stream)
        self.held = Received(tokens={c: list(range(start)) for c in range(choices)})
        self.attached, self.now = True, 0.0

    @rule(choice=st.integers(0, 2), count=st.integers(1, 5))
    def produce(self, choice: int, count: int) -> None:
        if choice < len(self.made):
            first = self.made[choice]
            ids = tuple(range(first, first + count))
            apply(self.table, output(first, ids, choice=choice, started=first == self.start))
            self.made[choice] += count

    @precondition(lambda self: self.attached)
    @rule(arrives=st.booleans())
    def send(self, arrives: bool) -> None:
        events = frame(self.table, self.now)
        if arrives:
            for event in events:
                self.held.take(event)
        elif events:
            # What did not arrive is lost with the connection.
            self.cut()

    @precondition(lambda self: self.attached)
    @rule()
    def cut(self) -> None:
        self.table.detach("g1", self.now)
        self.attached = False

    @precondition(lambda self: self.attached and self.held.accepted)
    @rule()
    def confirm(self) -> None:
        self.table.ack("g1", [ack("r1", *self.held.next_indices())])

    @precondition(lambda self: not self.attached)
    @rule()
    def come_back(self) -> None:
        hello = pb.Hello(gateway_instance="g1")
        if self.held.accepted:
            hello.continued.add(request_id="r1", epoch=256, next_indices=self.held.next_indices())
        self.table.attach(hello)
        self.attached = True

    @invariant()
    def nothing_is_missing_repeated_or_foreign(self) -> None:
        self.table.check_invariants()
        assert self.held.problems == []
        for tokens in self.held.tokens.values():
            assert tokens == list(range(len(tokens)))

    def teardown(self) -> None:
        if not self.attached:
            self.come_back()
        for event in frame(self.table):
            self.held.take(event)
        assert self.held.failed is None
        assert [len(self.held.tokens[c]) for c in range(len(self.made))] == self.made


GatewayMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestGatewayMachine = GatewayMachine.TestCase
