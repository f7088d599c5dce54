"""What a worker tells the ledger: where its time went, one event an attempt, in bounded batches that outlive Redis."""

from __future__ import annotations

import asyncio

import pytest
from millrace.usage.v1 import usage_event_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_types import Pool
from services.common.errors import StoreUnavailable
from services.worker import usage_reports
from services.worker.engine.outputs import EngineOutput
from services.worker.engine.request import FinishReason, RequestKey
from services.worker.engine.step_costs import ChoiceCost
from services.worker.engine_loop import LoopReport, Rejection
from services.worker.load_reporter import WorkerIdentity
from services.worker.streams import RequestFacts, RequestStream
from services.worker.time_account import TimeAccount, TimeSpent
from services.worker.usage_reports import BATCH, TIME_EVERY_S, AttemptLog, UsageReporter
from tests.helpers.fake_clock import FakeClock
from tests.helpers.worker import entry

NOW = 1_800_000_000.0


def make_stream(request_id: str, choices: int = 1) -> RequestStream:
    facts = RequestFacts(request_id, 1, 256, "gateway-1", entry(request_id), 3, 1, "")
    return RequestStream(facts, dict.fromkeys(range(choices), 0), now_wall=NOW)


def ended(request_id: str, choice: int = 0, **cost: float) -> LoopReport:
    key = RequestKey(request_id, choice, 256)
    output = EngineOutput(key, finish_reason=FinishReason.LENGTH)
    return LoopReport([output], [], None, [], False, costs=[ChoiceCost(key, **cost)])  # type: ignore[arg-type]


class Stream:
    """The usage stream: keeps reports, or is away."""

    def __init__(self) -> None:
        self.reports: list[usage_event_pb2.WorkerReport] = []
        self.away = False

    async def publish(self, raw: bytes) -> None:
        if self.away:
            raise StoreUnavailable("Redis is away.")
        self.reports.append(usage_event_pb2.WorkerReport.FromString(raw))


def make_reporter(log: AttemptLog, stream: Stream, clock: FakeClock) -> UsageReporter:
    identity = WorkerIdentity("worker-1", entry("r").model, Pool("echo"), 8, 16, 64)
    return UsageReporter(
        log, stream.publish, identity, lambda: TimeSpent(clock.monotonic(), idle_s=clock.monotonic()), clock
    )


def test_an_attempt_is_told_once_all_its_choices_ended_with_the_sum_of_their_costs() -> None:
    log = AttemptLog("worker-1")
    log.open(make_stream("r1", choices=2))

    log.take_report(ended("r1", 0, prefill_token_count=3, prefill_seconds=0.25, block_seconds=1.5), NOW)
    assert len(log) == 0
    log.take_report(ended("r1", 1, decode_token_count=7, decode_seconds=0.5, accepted_draft_token_count=2), NOW)

    [event] = log.peek(9)
    assert (event.prefill_token_count, event.decode_token_count, event.accepted_draft_token_count) == (3, 7, 2)
    assert (event.prefill_time.ToMilliseconds(), event.decode_time.ToMilliseconds()) == (250, 500)
    assert (event.block_milliseconds, event.epoch, event.worker_instance) == (1_500, 256, "worker-1")
    assert log.is_idle()


def test_refused_and_broken_attempts_are_told_with_what_they_took() -> None:
    log = AttemptLog("worker-1")
    for name in ("refused", "broken", "waiting"):
        log.open(make_stream(name))

    log.take_report(LoopReport([], [Rejection("refused", 256, "INVALID_REQUEST", "")], None, [], False), NOW)
    key = RequestKey("broken", 0, 256)
    log.take_report(LoopReport([], [], None, [], True, costs=[ChoiceCost(key, prefill_token_count=3)]), NOW)

    told = [(event.request_id, event.prefill_token_count) for event in log.peek(9)]
    assert told == [("refused", 0), ("broken", 3), ("waiting", 0)]
    assert log.is_idle()


def test_a_prompt_computed_for_a_peer_is_told_with_what_it_took_and_for_whom() -> None:
    log = AttemptLog("prefill-1")
    start = worker_service_pb2.PrefillStart(
        request_id="r1", epoch=256, worker_instance="decode-1", tenant="acme", token_ids=bytes(4 * 32)
    )

    log.open_for_peer(start)
    log.take_report(ended("r1", prefill_token_count=32, prefill_seconds=0.25), NOW)

    [event] = log.peek(9)
    assert (event.worker_instance, event.asking_worker_instance) == ("prefill-1", "decode-1")
    assert (event.request_id, event.epoch, event.tenant, list(event.choices)) == ("r1", 256, "acme", [])
    assert (event.prompt_token_count, event.prefill_token_count, event.prefill_time.ToMilliseconds()) == (32, 32, 250)
    assert log.is_idle()


async def test_reports_are_batches_and_wait_for_a_store_that_is_away() -> None:
    log, stream, clock = AttemptLog("worker-1"), Stream(), FakeClock()
    reporter = make_reporter(log, stream, clock)
    for n in range(BATCH + 1):
        log.open(make_stream(f"r{n}"))
        log.take_report(ended(f"r{n}"), NOW)
    stream.away = True
    await reporter.flush()

    stream.away = False
    await reporter.flush()

    assert [len(report.attempts) for report in stream.reports] == [BATCH, 1]
    assert len(log) == 0


async def test_time_is_told_in_spans_without_gaps() -> None:
    stream, clock = Stream(), FakeClock()
    reporter = make_reporter(AttemptLog("worker-1"), stream, clock)
    task = asyncio.create_task(reporter.run())

    await clock.advance(2 * TIME_EVERY_S + 1)
    task.cancel()
    await reporter.flush(last=True)

    spans = [span for report in stream.reports for span in report.times]
    assert [span.sequence for span in spans] == [1, 2, 3]
    assert [b.start_time.ToNanoseconds() for b in spans[1:]] == [a.end_time.ToNanoseconds() for a in spans[:-1]]
    assert sum(span.idle.ToSeconds() for span in spans) == 2 * TIME_EVERY_S + 1


def test_over_the_bound_the_oldest_events_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_reports, "MAX_PENDING", 3)
    log = AttemptLog("worker-1")

    for n in range(5):
        log.open(make_stream(f"r{n}"))
        log.take_report(ended(f"r{n}"), NOW)

    assert [event.request_id for event in log.peek(9)] == ["r2", "r3", "r4"]


def test_every_moment_is_busy_or_idle() -> None:
    account = TimeAccount(10.0)

    account.idle_until(12.0)
    assert account.busy_until(12.5) == 0.5
    account.idle_until(13.0)

    assert account.spent == TimeSpent(13.0, busy_s=0.5, idle_s=2.5)
