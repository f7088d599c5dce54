"""The table of live requests: frames to requests, stalls, deadlines, one terminal, one finish."""

from __future__ import annotations

import asyncio
import dataclasses
from array import array

import pytest
from millrace.common.v1 import admission_pb2, common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb
from opentelemetry import trace

from services.common.admission_types import KeyRecord, Pool, QuotaLimits
from services.common.errors import DeadlineExceeded, Draining, GatewayLost, Internal
from services.common.metrics import Metrics
from services.gateway.generation import RequestLimits, ServedModel, ValidRequest, token_events
from services.gateway.live_requests import LiveRequest, LiveTable
from services.gateway.metering import ClientLabels
from services.gateway.outbox import OutboxRecord
from services.gateway.request_actions import Own, Readmit, Rechoose
from services.gateway.request_facts import RequestFacts
from services.gateway.request_metrics import RequestMeter
from services.gateway.requests import RequestCore
from services.gateway.targets import parse_targets
from tests.helpers.echo_generation import served
from tests.helpers.fake_clock import FakeClock
from tests.helpers.waiting import WAIT_S, until

REQUEST = ValidRequest(
    model=served(),
    prompt_token_ids=array("I", [1, 2, 3]),
    sampling=common_pb2.SamplingParams(choice_count=1, max_token_count=50),
    stop=(),
    priority_class=common_pb2.PRIORITY_CLASS_INTERACTIVE,
    resume_policy=common_pb2.RESUME_POLICY_RESUME,
    timeout_s=60.0,
)
LABELS = ("echo", "1", "interactive", "short", "acme")

TARGETS = parse_targets("interactive/short=500:50:10000")


class RecordingEffects:
    def __init__(self) -> None:
        self.cancels: list[tuple[str, str, int, int | None]] = []
        self.kept: list[str] = []
        self.disk = asyncio.Event()
        self.disk.set()
        self.acknowledged: list[tuple[str, str]] = []
        self.confirmed: list[pb.AckEntry] = []
        self.owned: list[Own] = []
        self.readmitted: list[Readmit] = []
        self.reattached: list[str] = []
        self.rechosen: list[Rechoose] = []
        self.serving: dict[str, ServedModel] = {}
        self.budget_asks: list[int] = []
        self.published: list[OutboxRecord] = []

    def cancel(self, instance: str, cancel: pb.Cancel) -> None:
        choice = cancel.choice if cancel.HasField("choice") else None
        self.cancels.append((instance, cancel.request_id, cancel.epoch, choice))
        self.kept += [cancel.request_id] if cancel.keep else []

    def acknowledge(self, instance: str, request_id: str) -> None:
        self.acknowledged.append((instance, request_id))

    def confirm(self, instance: str, entry: pb.AckEntry) -> None:
        self.confirmed.append(entry)

    def reattach(self, instance: str) -> None:
        self.reattached.append(instance)

    def own(self, request: LiveRequest, action: Own) -> None:
        self.owned.append(action)

    def rechoose(self, request: LiveRequest, action: Rechoose) -> None:
        self.rechosen.append(action)

    def served_by(self, instance: str) -> ServedModel | None:
        return self.serving.get(instance)

    def readmit(self, request: LiveRequest, action: Readmit) -> None:
        self.readmitted.append(action)

    def renew_budget(self, request: LiveRequest, tokens: int) -> None:
        self.budget_asks.append(tokens)

    async def publish(self, request: LiveRequest, record: OutboxRecord) -> None:
        await self.disk.wait()
        self.published.append(record)


class Rig:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.metrics = Metrics()
        self.effects = RecordingEffects()
        self.table = LiveTable(self.clock)
        self.table.effects = self.effects

    def add(self, request_id: str = "r", **limits: object) -> LiveRequest:
        entry = admission_pb2.AdmissionEntry(request_id=request_id, tenant="acme", token_ids=[1, 2, 3], attempt=1)
        key = KeyRecord("k", "acme", "", (), 1.0, QuotaLimits())
        now = self.clock.monotonic()
        facts = RequestFacts(key, Pool("echo"), entry, REQUEST, ClientLabels(), trace.INVALID_SPAN, now)
        values = {"choice_count": 1, "max_token_count": 50, "deadline": now + 60, **limits}
        core = RequestCore(RequestLimits(**values), now=now)  # type: ignore[arg-type]
        live = LiveRequest(facts, core, self.table, RequestMeter(self.metrics, LABELS, now, TARGETS))
        self.table.add(live)
        return live

    def frame(self, request_id: str, first: int, *ids: int, epoch: int = 257, finish: bool = False) -> None:
        event = pb.Event(request_id=request_id, epoch=epoch)
        event.delta.first_index = first
        event.delta.token_ids.extend(ids)
        if finish:
            event.delta.finish.reason = common_pb2.FINISH_REASON_STOP
        self.table.on_frame("worker-a", [event])


@pytest.fixture
def rig() -> Rig:
    return Rig()


def readmissions(rig: Rig, kind: str, cause: str) -> float:
    model, version, *_ = LABELS
    return float(rig.metrics.readmissions_total.labels(model, version, kind, cause)._value.get())


async def read(live: LiveRequest) -> list[int]:
    ids: list[int] = []
    async for event in token_events(live):
        ids += event.token_ids
        live.mark_delivered(event.choice, len(ids))
    return ids


async def test_tokens_reach_the_reader_and_the_end_is_counted_once(rig: Rig) -> None:
    live = rig.add()
    reading = asyncio.create_task(read(live))
    await asyncio.sleep(0)
    rig.frame("r", 0, 7, 8)
    await asyncio.sleep(0)
    rig.frame("r", 2, 9, finish=True)

    assert await reading == [7, 8, 9]
    first, second = await asyncio.gather(
        live.finish(common_pb2.TERMINAL_STATE_COMPLETED, common_pb2.FINISH_REASON_STOP),
        live.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED),
    )

    assert first == second
    (record,) = rig.effects.published
    assert record.event.terminal_state == common_pb2.TERMINAL_STATE_COMPLETED
    assert (record.event.billed.prompt_token_count, record.event.billed.completion_token_count) == (3, 3)
    assert record.computed_tokens == 6
    assert rig.effects.confirmed == [
        pb.AckEntry(request_id="r", epoch=257, next_indices=[3], delivered_counts=[3], done=True)
    ]
    assert rig.effects.cancels == []
    assert len(rig.table) == 0
    value = rig.metrics.registry.get_sample_value
    assert value("millrace_requests_total", dict(model="echo", version="1", terminal_state="completed", tenant="acme"))


async def test_a_front_that_leaves_in_the_middle_of_finish_does_not_stop_it(rig: Rig) -> None:
    live = rig.add()
    leaving = asyncio.create_task(live.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await until(lambda: rig.effects.published)
    assert len(rig.effects.published) == 1


async def test_frames_of_unknown_requests_are_answered_by_cancel(rig: Rig) -> None:
    rig.frame("stranger", 0, 1, epoch=9)

    assert rig.effects.cancels == [("worker-a", "stranger", 9, None)]


async def test_one_bad_answer_ends_one_request_and_not_its_neighbours(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = rig.add("bad"), rig.add("good")

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(bad.core, "on_event", broken)
    rig.table.on_frame(
        "worker-a",
        [
            pb.Event(request_id="bad", epoch=257, accepted=pb.Accepted()),
            pb.Event(request_id="good", epoch=257, accepted=pb.Accepted()),
        ],
    )

    assert isinstance(bad.core.error, Internal)
    assert good.core.error is None
    assert good.core.binding is not None


async def test_the_deadline_ends_the_stream_after_what_had_come(rig: Rig) -> None:
    live = rig.add(deadline=rig.clock.monotonic() + 5)
    live.watch_deadline()
    rig.frame("r", 0, 1, 2)
    got: list[int] = []

    async def reader() -> None:
        async for event in token_events(live):
            got.extend(event.token_ids)

    reading = asyncio.create_task(reader())
    for _ in range(10):
        rig.table.tick()
        await rig.clock.advance(0.5)

    with pytest.raises(DeadlineExceeded):
        await reading
    assert got == [1, 2]
    assert rig.effects.cancels == [("worker-a", "r", 257, None)]


async def test_a_finished_request_has_no_deadline_left(rig: Rig) -> None:
    live = rig.add(deadline=rig.clock.monotonic() + 5)
    live.watch_deadline()
    await live.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED)

    await rig.clock.advance(10)

    assert live.core.error is None


async def test_a_gateway_that_was_frozen_ends_its_streams_before_it_hands_out_a_token(rig: Rig) -> None:
    live = rig.add()
    rig.frame("r", 0, 1, 2)

    rig.clock.jump(5.1)

    with pytest.raises(GatewayLost):
        await read(live)
    assert live.core.choices[0].handed == 0


async def test_a_gateway_that_ticks_is_not_taken_for_frozen(rig: Rig) -> None:
    live = rig.add()
    for _ in range(20):
        rig.clock.jump(4.0)
        rig.table.tick()
    rig.frame("r", 0, 1, finish=True)

    assert await read(live) == [1]


async def test_frames_that_waited_while_the_gateway_was_frozen_are_not_taken(rig: Rig) -> None:
    live = rig.add()
    rig.clock.jump(5.1)

    rig.frame("r", 0, 1, finish=True)

    with pytest.raises(GatewayLost):
        await read(live)


async def test_a_drain_tells_every_reader(rig: Rig) -> None:
    readers = [asyncio.create_task(read(rig.add(name))) for name in ("a", "b")]
    await asyncio.sleep(0)

    rig.table.fail_all()

    results = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(result) for result in results] == [Draining, Draining]


async def test_the_table_says_when_it_is_empty(rig: Rig) -> None:
    live = rig.add()
    waiting = asyncio.create_task(rig.table.wait_empty())
    await asyncio.sleep(0)
    assert not waiting.done()

    await live.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED)

    await asyncio.wait_for(waiting, WAIT_S)


async def test_only_requests_bound_to_a_worker_are_continued_and_acked_there(rig: Rig) -> None:
    rig.add("bound")
    rig.add("unbound")
    rig.frame("bound", 0, 1, 2)

    assert rig.table.continued("worker-b") == []
    (held,) = rig.table.continued("worker-a")
    assert (held.request_id, held.epoch, list(held.next_indices)) == ("bound", 257, [2])
    assert rig.table.ack_entries("worker-b", ["bound", "unbound", "gone"]) == []
    (entry,) = rig.table.ack_entries("worker-a", ["bound", "unbound", "gone"])
    assert (entry.request_id, list(entry.next_indices), entry.done) == ("bound", [2], False)


@pytest.mark.parametrize("ended", [True, False])
async def test_an_ended_request_is_the_workers_to_settle_until_its_end_is_recorded(rig: Rig, ended: bool) -> None:
    live = rig.add("r")
    rig.frame("r", 0, 1, 2, finish=ended)
    rig.effects.disk.clear()

    finishing = asyncio.create_task(live.finish(common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_STOP))
    await asyncio.sleep(0)
    rig.frame("r", 2, 3, finish=True)
    (before,) = rig.table.ack_entries("worker-a", ["r"])
    confirmed, forgotten = list(rig.effects.confirmed), len(rig.effects.cancels) - len(rig.effects.kept)
    rig.effects.disk.set()
    await finishing

    assert (before.done, confirmed, forgotten) == (False, [], 0)
    assert [(entry.epoch, entry.done) for entry in rig.effects.confirmed] == [(257, True)]
    assert len(rig.table) == 0


async def test_eight_delivered_tokens_are_told_at_once_and_once(rig: Rig) -> None:
    live = rig.add("r")
    rig.frame("r", 0, *range(16))
    reading = aiter(token_events(live))
    await anext(reading)

    live.mark_delivered(0, 7)
    assert rig.effects.acknowledged == []
    live.mark_delivered(0, 8)
    assert rig.effects.acknowledged == [("worker-a", "r")]
    (entry,) = rig.table.ack_entries("worker-a", ["r"])
    assert list(entry.delivered_counts) == [8]

    # That ack is still being written.
    live.mark_delivered(0, 15)
    assert len(rig.effects.acknowledged) == 1
    live.mark_delivered(0, 16)
    assert len(rig.effects.acknowledged) == 2


async def test_who_waits_may_take_tokens_where_their_frame_is_read(rig: Rig) -> None:
    live = rig.add("r")
    got: list[int] = []

    def take() -> bool:
        while (event := live.pull()) is not None:
            got.extend(event.token_ids)
        return not live.done

    waiting = asyncio.create_task(live.more(take))
    await asyncio.sleep(0)
    rig.frame("r", 0, 1, 2)
    rig.frame("r", 2, 3)

    assert got == [1, 2, 3]
    await asyncio.sleep(0)
    assert not waiting.done()
    rig.frame("r", 3, 4, finish=True)
    await waiting
    assert got == [1, 2, 3, 4]


async def test_times_and_ends_are_counted_under_the_version_that_ran(rig: Rig) -> None:
    live = rig.add("r")
    card = type(REQUEST.model.card)()
    card.CopyFrom(REQUEST.model.card)
    card.model.version = "2"
    rig.effects.serving["worker-a"] = dataclasses.replace(REQUEST.model, card=card)
    rig.table.on_frame("worker-a", [pb.Event(request_id="r", epoch=257, accepted=pb.Accepted())])
    rig.frame("r", 0, 1, 2, finish=True)

    await read(live)
    await live.finish(common_pb2.TERMINAL_STATE_COMPLETED, common_pb2.FINISH_REASON_STOP)

    counted = rig.metrics.ttft_seconds.collect()[0].samples
    assert {s.labels["version"]: s.value for s in counted if s.name.endswith("_count") and s.value} == {"2": 1}


async def test_a_lost_worker_sends_its_requests_elsewhere(rig: Rig) -> None:
    rig.add("a")
    rig.add("b")
    rig.frame("a", 0, 1)

    rig.table.on_worker_lost("worker-a")

    assert rig.effects.readmitted == [Readmit(2, lost=("worker-a",))]
    assert readmissions(rig, "restarted", "WORKER_LOST") == 1


async def test_a_worker_that_goes_on_with_an_answer_is_told_at_once_what_was_delivered(rig: Rig) -> None:
    live = rig.add("r")
    rig.frame("r", 0, 1, 2)
    event = await anext(token_events(live))
    live.mark_delivered(0, len(event.token_ids))
    rig.table.on_worker_lost("worker-a")
    told = list(rig.effects.acknowledged)

    rig.table.on_frame("worker-b", [pb.Event(request_id="r", epoch=131_073 << 8, accepted=pb.Accepted())])

    assert (told, rig.effects.acknowledged) == ([], [("worker-b", "r")])
    (entry,) = rig.table.ack_entries("worker-b", ["r"])
    assert list(entry.delivered_counts) == [2]


async def test_what_runs_elsewhere_is_counted_by_cause_and_by_whether_it_resumed(rig: Rig) -> None:
    live = rig.add("a")
    rig.frame("a", 0, 1)
    reading = asyncio.create_task(read(live))
    await asyncio.sleep(0)

    leaving = pb.Event(request_id="a", epoch=257, failed=pb.Failed(reason="DRAINING", retryable=True))
    rig.table.on_frame("worker-a", [leaving])

    assert rig.effects.readmitted == [Readmit(2, ((0, (1,)),))]
    assert readmissions(rig, "resumed", "DRAINING") == 1
    rig.frame("a", 1, 2, epoch=513, finish=True)
    assert await reading == [1, 2]


async def test_the_budget_is_renewed_once_at_a_time(rig: Rig) -> None:
    live = rig.add(budget_tokens=10)
    rig.frame("r", 0, 1)
    rig.frame("r", 1, 2)
    assert rig.effects.budget_asks == [40], "min(64, rest)"

    live.renewing = False
    live.core.on_budget(40)
    rig.frame("r", 2, 3)

    assert rig.effects.budget_asks == [40]


async def test_the_event_says_how_long_the_client_waited_and_whether_that_met_the_targets(rig: Rig) -> None:
    good, slow, left = rig.add("good"), rig.add("slow"), rig.add("left")
    for live in (good, slow, left):
        rig.frame(live.request_id, 0, 1, 2, 3)
        assert await anext(token_events(live))
    rig.clock.jump(0.25)
    for live in (good, slow, left):
        live.mark_delivered(0, 1)
    rig.clock.jump(0.08)
    good.mark_delivered(0, 3)
    rig.clock.jump(0.08)
    slow.mark_delivered(0, 3)

    completed, cancelled = common_pb2.TERMINAL_STATE_COMPLETED, common_pb2.TERMINAL_STATE_CANCELLED
    for live, state in ((good, completed), (slow, completed), (left, cancelled)):
        await live.finish(state, common_pb2.FINISH_REASON_STOP)

    events = [record.event.latency for record in rig.effects.published]
    assert [event.first_token.ToMilliseconds() for event in events] == [250, 250, 250]
    assert [event.per_token.ToMilliseconds() for event in events] == [40, 80, 0]
    assert [event.whole.ToMilliseconds() for event in events] == [410, 410, 410]
    assert (events[0].targets_met, events[1].targets_met) == (True, False)
    assert not events[2].HasField("targets_met")
