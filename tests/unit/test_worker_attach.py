"""Attach sessions under a clock that only the test moves: coalescing, back-pressure, broken streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb

from services.common.admission_types import Pool
from services.common.errors import InvalidRequest
from services.common.metrics import Metrics
from services.worker.attach import GatewayHub
from services.worker.attempt_records import AttemptRecorder
from services.worker.engine.outputs import EngineOutput
from services.worker.engine.request import EngineRequest, FinishReason, RequestKey
from services.worker.engine_loop import LoopReport, Rejection
from services.worker.load_reporter import LoadBoard, LoadMetrics, WorkerIdentity
from services.worker.requests import Abort, RequestTable
from services.worker.streams import Failure, RequestFacts, RequestStream
from services.worker.terminals import TerminalWriter
from services.worker.usage_reports import AttemptLog
from services.worker.wire import engine_request
from tests.helpers.fake_clock import FakeClock, settle
from tests.helpers.worker import RememberingStore, entry


class ScriptedEngine:
    """Stands in for the engine loop: remembers what it is told."""

    def __init__(self) -> None:
        self.submitted: list[EngineRequest] = []
        self.aborted: list[Abort] = []
        self.is_healthy = True
        self.untold_token_count = 0

    def check(self, request: EngineRequest) -> None:
        pass

    def submit(self, request: EngineRequest) -> None:
        self.submitted.append(request)

    def abort(self, aborts: list[Abort]) -> None:
        self.aborted += aborts

    def healthy(self) -> bool:
        return self.is_healthy

    def progress_age(self) -> float | None:
        return None


class Bench:
    """A hub with everything around it faked but table and clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine = ScriptedEngine()
        self.table = RequestTable()
        self.store = RememberingStore()
        model = common_pb2.ModelRef(model="echo", version="1")
        identity = WorkerIdentity("worker-1", model, Pool("echo"), 8, 16, 64)
        metrics = Metrics()
        board = LoadBoard(identity, self.table, self.engine, LoadMetrics(metrics, model), self.clock)  # type: ignore[arg-type]
        board.started = True
        self.board = board
        self.terminals = TerminalWriter(self.store, self.clock)
        self.hub = GatewayHub(
            worker_instance="worker-1", table=self.table, engine=self.engine, board=board,  # type: ignore[arg-type]
            recorder=AttemptRecorder(metrics, AttemptLog("worker-1")), terminals=self.terminals, clock=self.clock,
        )  # fmt: skip
        self.frames: list[pb.AttachResponse] = []
        self.inbox: asyncio.Queue[pb.AttachRequest | None] = asyncio.Queue()
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def write(self, frame: pb.AttachResponse) -> None:
        await self.may_write.wait()
        self.frames.append(frame)

    async def attach(self, gateway: str = "gateway-1") -> asyncio.Task[None]:
        self.inbox.put_nowait(pb.AttachRequest(hello=pb.Hello(gateway_instance=gateway)))
        task = asyncio.create_task(self.hub.serve(self._incoming(), self.write))
        await settle()
        return task

    async def _incoming(self) -> AsyncIterator[pb.AttachRequest]:
        while (message := await self.inbox.get()) is not None:
            yield message

    def submit(self, request_id: str = "r1", epoch: int = 256) -> RequestStream:
        work = entry(request_id)
        stream = RequestStream(
            RequestFacts(request_id, 1, epoch, "gateway-1", work, 3, 1, ""), {0: 0}, now_wall=self.clock.wall()
        )
        self.hub.submit(stream, engine_request(work, epoch=epoch, vocab_size=32_000, deadline=None))
        return stream

    def report(self, first: int, ids: tuple[int, ...], finish: FinishReason | None = None) -> None:
        out = EngineOutput(RequestKey("r1", 0, 256), first, ids, started=first == 0, finish_reason=finish)
        self.hub.on_report(LoopReport([out], [], None, [], False))

    def tokens(self) -> list[list[int]]:
        """Token ids of each frame that has any."""
        per_frame = [[t for e in f.events for t in e.delta.token_ids] for f in self.frames]
        return [ids for ids in per_frame if ids]


async def test_the_first_token_goes_at_once_and_later_ones_share_frames_of_twenty_milliseconds() -> None:
    bench = Bench()
    session = await bench.attach()
    bench.submit()
    await settle()
    bench.report(0, (1,))
    await settle()
    assert bench.tokens() == [[1]]

    for index in range(1, 5):
        bench.report(index, (index + 1,))
        await bench.clock.advance(0.004)
    assert bench.tokens() == [[1]]
    await bench.clock.advance(0.005)
    assert bench.tokens() == [[1], [2, 3, 4, 5]]

    bench.report(5, (6,), FinishReason.LENGTH)
    await settle()
    assert bench.tokens()[-1] == [6]
    bench.inbox.put_nowait(None)
    await session


async def test_a_token_after_a_quiet_time_does_not_wait() -> None:
    bench = Bench()
    session = await bench.attach()
    bench.submit()
    bench.report(0, (1,))
    await settle()
    await bench.clock.advance(0.1)

    bench.report(1, (2,))
    await settle()

    assert bench.tokens() == [[1], [2]]
    bench.inbox.put_nowait(None)
    await session


async def test_while_a_write_is_stuck_tokens_gather_and_the_next_frame_has_them_all() -> None:
    bench = Bench()
    session = await bench.attach()
    bench.submit()
    await settle()
    bench.may_write.clear()
    bench.report(0, (1,))
    await settle()
    for index in range(1, 50):
        bench.report(index, (index + 1,))
        await bench.clock.advance(0.05)

    bench.may_write.set()
    await settle()

    assert bench.tokens() == [[1], list(range(2, 51))]
    bench.inbox.put_nowait(None)
    await session


async def test_a_gateway_away_for_five_seconds_loses_its_requests_with_a_terminal() -> None:
    bench = Bench()
    session = await bench.attach()
    bench.submit()
    bench.report(0, (1, 2, 3))
    await settle()
    bench.inbox.put_nowait(pb.AttachRequest(ack=pb.Ack(entries=[_ack("r1", 2)])))
    await settle()
    bench.inbox.put_nowait(None)
    await session

    bench.clock.jump(4.9)
    bench.hub.expire()
    kept = len(bench.table)
    bench.clock.jump(0.2)
    bench.hub.expire()
    await bench.terminals.flush()

    assert (kept, len(bench.table)) == (1, 0)
    assert bench.engine.aborted == [Abort("r1", 256)]
    event = bench.store.terminals[0][1].event
    assert list(event.choice_token_counts) == [2]
    assert event.times.first_token_time.seconds > 0


async def test_the_sweep_looks_after_lost_gateways_by_itself() -> None:
    bench = Bench()
    session = await bench.attach()
    bench.submit()
    bench.inbox.put_nowait(None)
    await session
    sweep = asyncio.create_task(bench.hub.sweep())

    await bench.clock.advance(5.3)

    assert len(bench.table) == 0
    sweep.cancel()


async def test_a_rejection_of_the_engine_reaches_the_gateway_as_a_final_failure() -> None:
    bench = Bench()
    session = await bench.attach()
    bench.submit()

    bench.hub.on_report(LoopReport([], [Rejection("r1", 256, "CONTEXT_LENGTH_EXCEEDED", "too long")], None, [], False))
    await settle()

    failed = bench.frames[-1].events[-1].failed
    assert (failed.reason, failed.retryable) == ("CONTEXT_LENGTH_EXCEEDED", False)
    bench.inbox.put_nowait(None)
    await session


async def test_an_error_of_one_row_stops_what_else_runs_of_its_request() -> None:
    bench = Bench()
    session = await bench.attach()
    bench.submit()

    bench.report(0, (), FinishReason.ERROR)
    await settle()

    assert bench.engine.aborted == [Abort("r1", 256)]
    assert bench.frames[-1].events[-1].failed.reason == "ENGINE_ERROR"
    bench.inbox.put_nowait(None)
    await session


async def test_a_superseded_attempt_is_aborted_before_the_new_one_is_submitted() -> None:
    bench = Bench()
    session = await bench.attach()
    bench.submit(epoch=256)
    bench.submit(epoch=512)

    assert bench.engine.aborted == [Abort("r1", 256)]
    assert [request.epoch for request in bench.engine.submitted] == [256, 512]
    bench.inbox.put_nowait(None)
    await session


async def test_cancelling_the_handler_at_any_await_detaches_the_gateway() -> None:
    for turns in range(12):
        bench = Bench()
        session = asyncio.create_task(bench.hub.serve(bench._incoming(), bench.write))
        bench.inbox.put_nowait(pb.AttachRequest(hello=pb.Hello(gateway_instance="gateway-1")))
        await settle(turns)

        session.cancel()
        with pytest.raises(asyncio.CancelledError):
            await session

        assert not bench.table.is_attached("gateway-1")


async def test_the_end_is_awaited_until_the_last_request_is_confirmed() -> None:
    bench = Bench()
    session = await bench.attach()
    bench.submit()
    waiting = asyncio.create_task(bench.hub.wait_ended(60.0))
    bench.report(0, (1,), FinishReason.STOP)
    await settle()
    assert not waiting.done()

    bench.inbox.put_nowait(pb.AttachRequest(ack=pb.Ack(entries=[_ack("r1", 1, done=True)])))
    await settle()

    assert await waiting
    bench.inbox.put_nowait(None)
    await session


async def test_the_wait_for_the_end_gives_up_after_the_grace() -> None:
    bench = Bench()
    session = await bench.attach()
    bench.submit()
    waiting = asyncio.create_task(bench.hub.wait_ended(3.0))

    await bench.clock.advance(3.0)
    ended = await waiting
    bench.hub.fail_all(Failure("DRAINING", "leaving", True))
    await settle()

    assert not ended
    assert bench.frames[-1].events[-1].failed.reason == "DRAINING"
    bench.inbox.put_nowait(None)
    await session


@pytest.mark.parametrize(
    "first", [pb.AttachRequest(), pb.AttachRequest(ack=pb.Ack()), pb.AttachRequest(hello=pb.Hello())]
)
async def test_a_stream_that_does_not_open_with_a_named_hello_is_refused(first: pb.AttachRequest) -> None:
    bench = Bench()
    bench.inbox.put_nowait(first)

    with pytest.raises(InvalidRequest):
        await bench.hub.serve(bench._incoming(), bench.write)


async def test_watchers_hear_of_a_change_within_five_milliseconds_and_of_silence_each_second() -> None:
    bench = Bench()
    heard: list[pb.WatchResponse] = []

    async def listen() -> None:
        async for snapshot in bench.board.views.watch("router-1"):
            heard.append(snapshot)

    listener = asyncio.create_task(listen())
    await settle()
    session = await bench.attach()
    await bench.clock.advance(0.005)
    assert [list(s.attached_gateways) for s in heard] == [[], ["gateway-1"]]

    await bench.clock.advance(0.99)
    assert len(heard) == 2
    await bench.clock.advance(0.02)
    assert len(heard) == 3

    listener.cancel()
    bench.inbox.put_nowait(None)
    await session


def _ack(request_id: str, *indices: int, done: bool = False) -> pb.AckEntry:
    return pb.AckEntry(request_id=request_id, epoch=256, next_indices=indices, done=done)
