"""The request core, rule by rule (PROTOCOL §4, §5, §7)."""

from __future__ import annotations

import pytest
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb

from services.common.admission_types import RequestPhase, RequestRecord, first_epoch
from services.common.errors import (
    DeadlineExceeded,
    EngineError,
    Poisoned,
    PoolClosed,
    SlowReader,
    Superseded,
    WorkerLost,
)
from services.gateway.generation import RequestLimits
from services.gateway.request_actions import Binding, Own, Readmit, Reattach, Rechoose, SendCancel
from services.gateway.requests import RequestCore

A, B, C = "worker-a", "worker-b", "worker-c"


def make_core(**limits: object) -> RequestCore:
    values = {"choice_count": 1, "max_token_count": 100, "deadline": 60.0, **limits}
    return RequestCore(RequestLimits(**values), now=0.0)  # type: ignore[arg-type]


def accepted(epoch: int) -> pb.Event:
    return pb.Event(request_id="r", epoch=epoch, accepted=pb.Accepted())


def delta(epoch: int, first: int, *ids: int, choice: int = 0, finish: int | None = None) -> pb.Event:
    event = pb.Event(request_id="r", epoch=epoch)
    event.delta.choice = choice
    event.delta.first_index = first
    event.delta.token_ids.extend(ids)
    if finish is not None:
        event.delta.finish.reason = common_pb2.FinishReason.ValueType(finish)
    return event


def failed(epoch: int, reason: str, *, retryable: bool) -> pb.Event:
    return pb.Event(request_id="r", epoch=epoch, failed=pb.Failed(reason=reason, retryable=retryable))


def record(phase: RequestPhase, **fields: object) -> RequestRecord:
    values = {
        "request_id": "r",
        "phase": phase,
        "epoch": 257,
        "worker_instance": A,
        "gateway_instance": "g",
        "attempt": 1,
        "terminal_state": None,
        **fields,
    }
    return RequestRecord(**values)  # type: ignore[arg-type]


def drain(core: RequestCore) -> list[int]:
    ids: list[int] = []
    while (event := core.pull()) is not None:
        ids += event.token_ids
    return ids


def test_the_first_frame_binds_worker_and_request() -> None:
    core = make_core()

    actions = core.on_event(A, accepted(257), 1.0)

    assert actions == [Own(Binding(257, A))]
    assert core.binding == Binding(257, A)


@pytest.mark.parametrize(("epoch", "instance"), [(256, A), (257, B), (256, B)])
def test_a_lower_epoch_and_an_equal_one_of_another_worker_are_cancelled(epoch: int, instance: str) -> None:
    core = make_core()
    core.on_event(A, accepted(257), 1.0)

    actions = core.on_event(instance, delta(epoch, 0, 1, 2), 1.0)

    assert actions == [SendCancel(instance, epoch)]
    assert core.received_count == 0


def test_a_higher_epoch_is_adopted_before_a_token_was_handed_on() -> None:
    core = make_core()
    core.on_event(A, delta(257, 0, 1, 2), 1.0)

    actions = core.on_event(B, accepted(258), 1.0)

    assert actions == [Own(Binding(258, B)), SendCancel(A, 257)]
    assert core.received_count == 0, "tokens of two samples are never spliced"


def test_after_the_first_token_only_the_gateway_raises_the_epoch() -> None:
    core = make_core()
    core.on_event(A, delta(257, 0, 1, 2), 1.0)
    assert drain(core) == [1, 2]

    actions = core.on_event(B, accepted(512), 1.0)

    assert actions == [SendCancel(B, 512)]
    assert core.binding == Binding(257, A)


def test_a_worker_that_was_given_the_request_anew_lost_what_was_bound_there() -> None:
    core = make_core()
    core.on_event(A, delta(257, 0, 1, 2), 1.0)
    assert drain(core) == [1, 2]

    actions = core.on_event(A, accepted(513), 2.0)

    assert actions == [
        SendCancel(A, 513),
        SendCancel(A, 257, keep=True),
        Readmit(2, ((0, (1, 2)),), cause="WORKER_LOST"),
    ]
    assert core.on_event(A, delta(513, 0, 8), 2.0) == [SendCancel(A, 513)], "what is on its way of it is not taken"
    core.on_event(A, delta(first_epoch(2) + 257, 2, 3), 3.0)
    assert drain(core) == [3], "the answer goes on where it was"


def test_duplicates_are_skipped_by_index() -> None:
    core = make_core()
    core.on_event(A, delta(257, 0, 1, 2, 3), 1.0)

    core.on_event(A, delta(257, 1, 2, 3, 4), 1.0)
    core.on_event(A, delta(257, 0, 1), 1.0)

    assert drain(core) == [1, 2, 3, 4]


def test_a_gap_reopens_the_stream_and_a_second_one_runs_elsewhere() -> None:
    core = make_core()
    core.on_event(A, delta(257, 0, 1), 1.0)

    assert core.on_event(A, delta(257, 2, 3), 1.0) == [Reattach(A)]
    again = core.on_event(A, delta(257, 2, 3), 1.0)

    assert again == [SendCancel(A, 257, keep=True), Readmit(2)]


def test_the_worker_knows_what_was_delivered_but_for_sixteen_tokens() -> None:
    core = make_core()
    core.on_event(A, delta(257, 0, *range(60)), 1.0)

    first = core.pull()
    assert first is not None
    assert first.token_ids == tuple(range(16))
    assert core.mark_delivered(0, 16), "the worker is to be told"
    assert core.pull() is None
    core.on_acked(257, (10,))
    second = core.pull()
    assert second is not None
    assert second.token_ids == tuple(range(16, 26))
    core.mark_delivered(0, 26)
    core.on_acked(256, (26,))
    assert core.pull() is None, "an ack of another epoch"


def test_an_answer_that_is_written_whole_is_handed_on_before_any_of_it_is_delivered() -> None:
    core = make_core()
    core.on_event(A, delta(257, 0, *range(40)), 1.0)

    assert drain(core) == list(range(40))
    entry = core.ack("r")
    assert entry is not None
    assert (list(entry.next_indices), list(entry.delivered_counts)) == ([40], [0])


def test_what_a_lost_worker_had_sent_in_full_is_handed_on_without_it() -> None:
    core = make_core()
    core.on_event(A, delta(257, 0, *range(40), finish=common_pb2.FINISH_REASON_STOP), 1.0)
    assert core.pull() is not None
    core.mark_delivered(0, 16)

    core.on_worker_lost(A, 2.0)

    assert drain(core) == list(range(16, 40))
    assert core.done


def test_a_worker_lost_before_the_first_token_starts_over() -> None:
    core = make_core()
    core.on_event(A, delta(257, 0, 1, 2), 1.0)

    actions = core.on_worker_lost(A, 2.0)

    kept = SendCancel(A, 257, keep=True)
    assert actions == [kept, Readmit(2, lost=(A,))]
    assert core.on_event(A, delta(257, 2, 3), 3.0) == [kept], "the old epoch is fenced"
    assert core.on_event(B, accepted(131_073 << 8), 4.0) == [Own(Binding(131_073 << 8, B)), SendCancel(A, 257)]
    assert core.release() == []


def test_a_worker_lost_in_mid_stream_resumes_after_what_was_received() -> None:
    core = make_core(choice_count=3)
    core.on_event(A, delta(257, 0, 1, 2, choice=0), 1.0)
    core.on_event(A, delta(257, 0, 5, choice=1, finish=common_pb2.FINISH_REASON_STOP), 1.0)
    assert drain(core) == [1, 2, 5]
    core.mark_delivered(0, 1)
    core.on_event(A, delta(257, 2, 3, choice=0), 1.0)

    actions = core.on_worker_lost(A, 2.0)

    assert actions[-1] == Readmit(2, ((0, (1, 2, 3)), (2, ())), lost=(A,))
    core.on_event(B, delta(512, 3, 4, choice=0, finish=common_pb2.FINISH_REASON_STOP), 3.0)
    assert drain(core) == [3, 4]


def test_without_resume_a_worker_lost_after_a_delivered_token_fails_the_request() -> None:
    core = make_core(resumes=False)
    core.on_event(A, delta(257, 0, 1), 1.0)
    drain(core)
    core.mark_delivered(0, 1)

    core.on_worker_lost(A, 2.0)

    assert isinstance(core.error, WorkerLost)


def test_an_answer_that_is_complete_survives_its_worker() -> None:
    core = make_core()
    core.on_event(A, delta(257, 0, 1, 2, finish=common_pb2.FINISH_REASON_STOP), 1.0)

    assert not [a for a in core.on_worker_lost(A, 2.0) if isinstance(a, Readmit)]
    assert drain(core) == [1, 2]
    assert core.done


def test_every_worker_that_dies_with_a_request_is_told_to_the_store() -> None:
    core = make_core()
    core.on_event(A, accepted(257), 1.0)
    assert core.on_worker_lost(A, 2.0)[-1] == Readmit(2, lost=(A,))
    core.on_event(B, accepted(512), 3.0)
    assert core.on_event(B, failed(512, "ENGINE_ERROR", retryable=True), 4.0)[-1] == Readmit(3, lost=(A, B))
    actions = core.on_record(
        record(RequestPhase.OWNED, epoch=768, attempt=3, worker_instance=C), 5.0, worker_alive=False
    )

    assert actions[-1] == Readmit(4, lost=(A, B, C))


def test_what_the_store_calls_poison_fails_and_is_never_admitted_again() -> None:
    core = make_core()
    core.on_event(A, accepted(257), 1.0)
    core.on_worker_lost(A, 2.0)

    core.on_poisoned()

    assert isinstance(core.error, Poisoned)
    assert core.on_worker_lost(A, 3.0) == []


def test_the_third_attempt_is_the_last() -> None:
    core = make_core()
    for number in (1, 2):
        core.on_event(A, accepted(number << 8), 1.0)
        assert core.on_event(A, failed(number << 8, "SUPERSEDED", retryable=True), 1.0)[-1] == Readmit(number + 1)
    core.on_event(A, accepted(3 << 8), 1.0)

    core.on_event(A, failed(3 << 8, "SUPERSEDED", retryable=True), 1.0)

    assert isinstance(core.error, Superseded)


def test_workers_that_leave_in_order_use_up_no_attempt() -> None:
    core = make_core()
    for number in range(1, 8):
        core.on_event(A, accepted(number << 8), 1.0)
        actions = core.on_event(A, failed(number << 8, "DRAINING", retryable=True), 1.0)
        assert actions[-1] == Readmit(number + 1)


def test_a_worker_that_leaves_is_named_as_the_holder_of_what_it_had_begun_and_only_then() -> None:
    core = make_core()
    core.on_event(A, pb.Event(request_id="r", epoch=257, started=pb.Started()), 1.0)
    core.on_event(A, delta(257, 0, 1, 2), 1.0)
    assert drain(core) == [1, 2]
    core.mark_delivered(0, 1)

    leaving = core.on_event(A, failed(257, "DRAINING", retryable=True), 2.0)
    core.on_event(B, accepted(513), 3.0)
    lost = core.on_worker_lost(B, 4.0)

    assert leaving[-1] == Readmit(2, ((0, (1, 2)),), holder=A)
    assert lost[-1] == Readmit(3, ((0, (1, 2)),), lost=(B,))


def test_a_failure_that_is_not_retryable_fails_the_request_with_its_reason() -> None:
    core = make_core()
    core.on_event(A, accepted(257), 1.0)

    core.on_event(A, failed(257, "ENGINE_ERROR", retryable=False), 1.0)

    assert isinstance(core.error, EngineError)


def test_nothing_is_admitted_again_after_the_deadline() -> None:
    core = make_core(deadline=5.0)
    core.on_event(A, accepted(257), 1.0)

    core.on_worker_lost(A, 5.0)

    assert isinstance(core.error, DeadlineExceeded)


def test_a_stopped_choice_is_cancelled_alone_and_its_later_tokens_are_ignored() -> None:
    core = make_core(choice_count=2)
    core.on_event(A, delta(257, 0, 1, 2, choice=0), 1.0)
    drain(core)

    assert core.stop_choice(0, 1) == [SendCancel(A, 257, 0)]
    core.on_event(A, delta(257, 2, 3, choice=0), 1.0)
    core.on_event(A, delta(257, 0, 9, choice=1, finish=common_pb2.FINISH_REASON_STOP), 1.0)

    assert drain(core) == [9]
    assert core.done


def test_the_end_of_a_running_request_cancels_it_and_of_an_ended_one_does_not() -> None:
    running, ended = make_core(), make_core()
    running.on_event(A, delta(257, 0, 1), 1.0)
    ended.on_event(A, delta(257, 0, 1, finish=common_pb2.FINISH_REASON_STOP), 1.0)

    assert running.end() == [SendCancel(A, 257, keep=True)]
    assert ended.end() == []
    assert (running.worker_ended, ended.worker_ended) == (False, True)


def test_frames_after_the_end_are_answered_by_cancel() -> None:
    core = make_core()
    core.end()

    assert core.on_event(A, accepted(257), 1.0) == [SendCancel(A, 257, keep=True)]
    assert core.on_event(B, accepted(258), 1.0) == [SendCancel(B, 258)]
    assert core.binding == Binding(257, A), "the last ack goes to the worker that has it"


def test_workers_of_attempts_given_up_keep_them_until_the_end() -> None:
    core = make_core(resumes=False)
    core.on_event(A, delta(257, 0, 1, 2), 1.0)
    assert drain(core) == [1, 2]
    core.mark_delivered(0, 2)

    assert core.on_event(A, failed(257, "ENGINE_ERROR", retryable=True), 2.0) == [SendCancel(A, 257, keep=True)]
    assert core.end() == []
    assert core.on_event(A, accepted(257), 3.0) == [SendCancel(A, 257, keep=True)]
    assert core.release() == [SendCancel(A, 257)]


def test_a_budget_that_is_used_up_stops_at_exactly_that_token() -> None:
    core = make_core(budget_tokens=3)
    core.on_event(A, delta(257, 0, 1, 2, 3, 4, 5), 1.0)
    assert drain(core) == [1, 2, 3]
    assert core.budget_wanted() == 64

    core.on_budget(0)

    event = core.pull()
    assert event is not None
    assert (event.token_ids, event.finish_reason) == ((), common_pb2.FINISH_REASON_BUDGET)
    assert core.done
    assert core.end() == [SendCancel(A, 257, keep=True)], "the worker still runs"


def test_a_renewed_budget_lets_the_stream_go_on() -> None:
    core = make_core(budget_tokens=3, max_token_count=8)
    core.on_event(A, delta(257, 0, 1, 2, 3, 4, 5), 1.0)
    drain(core)
    assert core.budget_wanted() == 5

    core.on_budget(5)

    assert drain(core) == [4, 5]


def test_an_answer_that_ends_with_the_budget_keeps_its_own_reason() -> None:
    core = make_core(budget_tokens=2, max_token_count=2)
    core.on_event(A, delta(257, 0, 1, 2, finish=common_pb2.FINISH_REASON_LENGTH), 1.0)
    core.on_budget(0)

    event = core.pull()

    assert event is not None
    assert event.finish_reason == common_pb2.FINISH_REASON_LENGTH


def test_a_request_that_redis_lost_is_queued_again() -> None:
    core = make_core()

    assert core.on_record(None, 2.0, worker_alive=False) == [Readmit(1, again=True)]


def test_a_running_request_that_redis_lost_runs_on() -> None:
    core = make_core()
    core.on_event(A, accepted(257), 1.0)

    assert core.on_record(None, 8.0, worker_alive=False) == []
    assert core.error is None


def test_an_unbound_request_whose_owner_is_gone_is_admitted_again() -> None:
    core = make_core()

    actions = core.on_record(record(RequestPhase.OWNED), 2.0, worker_alive=False)

    assert actions == [Readmit(2, lost=(A,))]
    assert core.on_event(A, accepted(257), 3.0) == [SendCancel(A, 257)]


def test_an_unbound_request_waits_for_an_owner_that_lives() -> None:
    core = make_core()

    assert core.on_record(record(RequestPhase.OWNED), 2.0, worker_alive=True) == []
    assert core.on_record(record(RequestPhase.QUEUED), 2.0, worker_alive=False) == []
    assert core.on_record(record(RequestPhase.CLAIMED), 2.0, worker_alive=False) == []


def test_an_owner_has_five_seconds_to_say_so_however_long_the_request_was_queued() -> None:
    core = make_core()
    owned = record(RequestPhase.OWNED)
    assert core.on_record(record(RequestPhase.QUEUED), 30.0, worker_alive=False) == []

    assert core.on_record(owned, 31.0, worker_alive=True) == []
    assert core.on_record(owned, 36.0, worker_alive=True) == []
    assert core.on_record(record(RequestPhase.OWNED, epoch=258), 37.0, worker_alive=True) == []
    assert core.on_record(record(RequestPhase.OWNED, epoch=258), 42.1, worker_alive=True) == [Readmit(2)]


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        (common_pb2.TERMINAL_STATE_EXPIRED, "", "DEADLINE_EXCEEDED"),
        (common_pb2.TERMINAL_STATE_CANCELLED, "", "CANCELLED"),
        (common_pb2.TERMINAL_STATE_FAILED, "GATEWAY_LOST", "GATEWAY_LOST"),
    ],
)
def test_a_request_that_was_ended_elsewhere_says_how(state: int, reason: str, expected: str) -> None:
    core = make_core()

    core.on_record(record(RequestPhase.FINISHED, terminal_state=state, error_reason=reason), 2.0, worker_alive=False)

    assert core.error is not None
    assert core.error.row.reason == expected


def test_tokens_that_were_not_asked_for_fail_the_request() -> None:
    for event in (delta(257, 0, *range(101)), delta(257, 0, 1, choice=1), delta(257, -1, 1)):
        core = make_core()
        core.on_event(A, event, 1.0)
        assert isinstance(core.error, EngineError)


def test_a_reader_that_holds_too_much_is_cut() -> None:
    core = make_core(unread_bytes=256)

    core.on_event(A, delta(257, 0, *range(17)), 1.0)

    assert isinstance(core.error, SlowReader)


def test_prompt_logprobs_come_once_on_choice_0() -> None:
    core = make_core(choice_count=2)
    event = pb.Event(request_id="r", epoch=257)
    event.prompt_logprobs.positions.add()
    core.on_event(A, event, 1.0)
    core.on_event(A, event, 1.0)

    first = core.pull()

    assert first is not None
    assert (first.choice, len(first.prompt_logprobs)) == (0, 1)
    assert core.pull() is None


def test_logprobs_follow_their_tokens_over_duplicates_and_adoption() -> None:
    def with_logprobs(epoch: int, first: int, *ids: int) -> pb.Event:
        event = delta(epoch, first, *ids)
        for token_id in ids:
            event.delta.logprobs.add().token.token_id = token_id
        return event

    core = make_core()
    core.on_event(A, with_logprobs(257, 0, 1, 2), 1.0)
    core.on_event(B, with_logprobs(258, 0, 7), 1.0)
    core.on_event(B, with_logprobs(258, 0, 7, 8), 1.0)

    event = core.pull()

    assert event is not None
    assert event.token_ids == (7, 8)
    assert [p.token.token_id for p in event.logprobs] == [7, 8]
    assert core.choices[0].unread_logprob_bytes == 0


def test_a_request_whose_version_was_withdrawn_chooses_again_and_takes_no_frame_of_before() -> None:
    core = make_core()

    actions = core.on_record(record(RequestPhase.CLOSED), 3.0, worker_alive=False)
    late = core.on_event(A, accepted(300), 3.1)
    again = core.on_event(A, accepted((1 << 24) + 1), 3.2)

    assert actions == [Rechoose(2)]
    assert late == [SendCancel(A, 300)]
    assert again == [Own(Binding((1 << 24) + 1, A))]
    assert core.on_record(record(RequestPhase.CLOSED), 9.0, worker_alive=False) == []


def test_an_answer_that_has_begun_is_not_continued_by_another_version() -> None:
    core = make_core()
    core.on_event(A, accepted(257), 0.0)
    core.on_event(A, delta(257, 0, 5, 6), 0.1)
    assert drain(core) == [5, 6]
    core.on_worker_lost(A, 1.0)

    core.on_record(record(RequestPhase.CLOSED, attempt=2), 3.0, worker_alive=False)

    assert isinstance(core.error, PoolClosed)
