"""Terminals of lost gateways, and the spans and histograms of attempts."""

from __future__ import annotations

import asyncio

import pytest
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.admission_types import SHADOW_TENANT, Pool
from services.common.metrics import Metrics
from services.worker import attempt_records
from services.worker.attempt_records import AttemptRecorder
from services.worker.engine.outputs import EngineOutput
from services.worker.engine.request import FinishReason, RequestKey
from services.worker.streams import Failure, RequestFacts, RequestStream
from services.worker.terminals import BATCH, TerminalWriter, gateway_lost_terminal
from services.worker.usage_reports import AttemptLog
from tests.helpers.fake_clock import FakeClock, settle
from tests.helpers.worker import RememberingStore, entry

WALL = 1_800_000_000.0
POOL = Pool("echo")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def stream_of(request_id: str, *, choices: int = 1) -> RequestStream:
    facts = RequestFacts(request_id, 2, 256, "gateway-1", entry(request_id, choices=choices), 3, 1, PARENT)
    return RequestStream(facts, dict.fromkeys(range(choices), 0), now_wall=WALL)


def produce(stream: RequestStream, choice: int, count: int, *, at: float, finish: FinishReason | None = None) -> None:
    key = RequestKey(stream.facts.request_id, choice, 256)
    first = stream.choices[choice].end
    output = EngineOutput(key, first, tuple(range(count)), started=True, cached_token_count=2, finish_reason=finish)
    stream.apply(output, now_wall=at)
    stream.take_events(10_000)


def test_delivered_is_what_the_gateway_said_and_computed_is_what_was_made() -> None:
    stream = stream_of("r1", choices=2)
    produce(stream, 0, 10, at=WALL + 1)
    produce(stream, 1, 6, at=WALL + 1)
    stream.ack(worker_service_pb2.AckEntry(next_indices=[6, 6], delivered_counts=[4, 5]))

    terminal = gateway_lost_terminal(stream, worker_instance="worker-1", now_wall=WALL + 9)

    event = terminal.event
    assert (terminal.tenant, terminal.epoch, terminal.computed_tokens) == ("tenant-1", 256, 19)
    assert event.terminal_state == common_pb2.TERMINAL_STATE_FAILED
    assert list(event.choice_token_counts) == [4, 5]
    assert event.billed == event.delivered
    assert (event.billed.prompt_token_count, event.billed.cached_token_count) == (3, 2)
    assert event.billed.completion_token_count == 9
    assert event.attempt == 2
    assert event.times.end_time.seconds == int(WALL + 9)


def test_a_mirrored_request_of_a_lost_gateway_bills_nothing() -> None:
    stream = stream_of("r1")
    stream.facts.entry.tenant = SHADOW_TENANT
    produce(stream, 0, 10, at=WALL + 1)
    stream.ack(worker_service_pb2.AckEntry(next_indices=[6], delivered_counts=[4]))

    event = gateway_lost_terminal(stream, worker_instance="worker-1", now_wall=WALL + 9).event

    assert event.billed == common_pb2.TokenUsage()
    assert event.delivered.completion_token_count == 4


def test_a_request_that_never_started_costs_and_computes_nothing() -> None:
    terminal = gateway_lost_terminal(stream_of("r1"), worker_instance="worker-1", now_wall=WALL)

    assert terminal.computed_tokens == 0
    assert terminal.event.billed == common_pb2.TokenUsage()
    assert not terminal.event.times.HasField("start_time")


async def test_terminals_wait_for_redis_and_are_written_once_in_batches() -> None:
    clock, store = FakeClock(), RememberingStore()
    writer = TerminalWriter(store, clock)
    store.away = True
    count = BATCH * 2 + 3
    running = asyncio.create_task(writer.run())
    for number in range(count):
        terminal = gateway_lost_terminal(stream_of(f"r{number}"), worker_instance="worker-1", now_wall=WALL)
        writer.add(POOL, terminal)
    await settle()
    assert len(writer) == count

    store.away = False
    await clock.advance(1.0)

    assert len(writer) == 0
    assert [t.request_id for _, t in store.terminals] == [f"r{n}" for n in range(count)]
    running.cancel()


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(attempt_records, "tracer", lambda: provider.get_tracer("test"))
    return exporter


def test_an_attempt_leaves_prefill_and_decode_under_the_submits_span(exported: InMemorySpanExporter) -> None:
    stream = stream_of("r1")
    produce(stream, 0, 0, at=WALL + 1)
    produce(stream, 0, 1, at=WALL + 3)
    produce(stream, 0, 4, at=WALL + 7, finish=FinishReason.LENGTH)

    AttemptRecorder(Metrics(), AttemptLog("worker-1")).record(stream)

    spans: dict[str, ReadableSpan] = {span.name: span for span in exported.get_finished_spans()}
    assert set(spans) == {"worker.prefill", "worker.decode"}
    for span in spans.values():
        assert span.parent is not None
        assert trace.format_trace_id(span.parent.trace_id) == PARENT.split("-")[1]
        assert trace.format_span_id(span.parent.span_id) == PARENT.split("-")[2]
        attributes = span.attributes or {}
        assert attributes["millrace.attempt"] == 2
        assert attributes["gen_ai.usage.output_tokens"] == 5
    prefill, decode = spans["worker.prefill"], spans["worker.decode"]
    assert (prefill.start_time, prefill.end_time) == (int((WALL + 1) * 1e9), int((WALL + 3) * 1e9))
    assert (decode.start_time, decode.end_time) == (int((WALL + 3) * 1e9), int((WALL + 7) * 1e9))


def test_a_failed_prefill_leaves_its_span_with_the_reason_and_no_decode(exported: InMemorySpanExporter) -> None:
    stream = stream_of("r1")
    produce(stream, 0, 0, at=WALL + 1)
    stream.fail(Failure("ENGINE_ERROR", "x", retryable=True), WALL + 2)

    AttemptRecorder(Metrics(), AttemptLog("worker-1")).record(stream)

    (span,) = exported.get_finished_spans()
    assert span.name == "worker.prefill"
    assert (span.attributes or {})["error.type"] == "ENGINE_ERROR"


def test_an_attempt_that_never_started_leaves_no_span(exported: InMemorySpanExporter) -> None:
    stream = stream_of("r1")
    stream.fail(Failure("DRAINING", "x", retryable=True), WALL + 2)

    AttemptRecorder(Metrics(), AttemptLog("worker-1")).record(stream)

    assert exported.get_finished_spans() == ()
