"""The Attach stream against a worker that a test plays: hello, acks, cancels, breaks, loss and return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
import pytest
from millrace.worker.v1 import worker_service_pb2 as pb
from millrace.worker.v1 import worker_service_pb2_grpc

from services.common.admission_types import Pool, WorkerRecord
from services.common.clock import SystemClock
from services.gateway import worker_attach
from services.gateway.worker_pool import WorkerPool, attach_subset
from tests.helpers.waiting import until

GATEWAY = "gateway-1"


class PlayedWorker(worker_service_pb2_grpc.WorkerServiceServicer):
    """Records what gateways say and sends what a test puts into `outgoing`; None ends the stream."""

    def __init__(self, instance: str = "worker-a") -> None:
        self.instance = instance
        self.hellos: list[pb.Hello] = []
        self.acks: list[pb.AckEntry] = []
        self.ack_messages = 0
        self.cancels: list[pb.Cancel] = []
        self.outgoing: asyncio.Queue[list[pb.Event] | None] = asyncio.Queue()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.address = "127.0.0.1:0"
        self._server: grpc.aio.Server | None = None

    async def start(self) -> PlayedWorker:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    def record(self, instance: str | None = None) -> WorkerRecord:
        return WorkerRecord(instance or self.instance, self.address, "m", "1", Pool("m"), "aggregated")

    def send(self, *events: pb.Event) -> None:
        self.outgoing.put_nowait(list(events))

    async def GetModelCard(  # type: ignore[override]
        self, request: pb.GetModelCardRequest, context: object
    ) -> pb.GetModelCardResponse:
        await self.thawed.wait()
        return pb.GetModelCardResponse(worker_instance=self.instance)

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: object
    ) -> AsyncIterator[pb.AttachResponse]:
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (events := await self.outgoing.get()) is not None:
                yield pb.AttachResponse(worker_instance=self.instance, events=events)
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.AttachRequest]) -> None:
        async for message in requests:
            if message.HasField("hello"):
                self.hellos.append(message.hello)
            elif message.HasField("ack"):
                self.ack_messages += 1
                self.acks += message.ack.entries
            else:
                self.cancels.append(message.cancel)


class Listener:
    """Counts tokens of request ids; says what a test wants in the hello."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.acked: list[pb.AckEntry] = []
        self.lost: list[str] = []
        self.held: list[pb.Continue] = []

    def continued(self, instance: str) -> list[pb.Continue]:
        return self.held

    def on_frame(self, instance: str, events: Iterable[pb.Event]) -> None:
        for event in events:
            count = event.delta.first_index + len(event.delta.token_ids)
            self.tokens[event.request_id] = max(count, self.tokens.get(event.request_id, 0))

    def ack_entries(self, instance: str, request_ids: Iterable[str]) -> list[pb.AckEntry]:
        return [pb.AckEntry(request_id=i, epoch=1, next_indices=[self.tokens.get(i, 0)]) for i in request_ids]

    def on_acked(self, entries: Iterable[pb.AckEntry]) -> None:
        self.acked += entries

    def on_worker_lost(self, instance: str) -> None:
        self.lost.append(instance)


def delta(request_id: str, first: int, count: int, *, finish: bool = False) -> pb.Event:
    event = pb.Event(request_id=request_id, epoch=1)
    event.delta.first_index = first
    event.delta.token_ids.extend(range(first, first + count))
    if finish:
        event.delta.finish.SetInParent()
    return event


class Rig:
    def __init__(self, worker: PlayedWorker) -> None:
        self.worker = worker
        self.listener = Listener()
        self.pool = WorkerPool(GATEWAY, self.listener, SystemClock())

    @property
    def counts_to_loss(self) -> bool:
        """Whether the time runs after which the worker is given up."""
        return self.pool._attachments[self.worker.instance]._loss_timer is not None

    async def attached(self) -> None:
        self.pool.update([self.worker.record()])
        # A stream may be broken before the worker has read what was said in it.
        await until(lambda: self.pool.serves("m", "1") and self.worker.hellos)


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    # Never, unless a test says otherwise: a busy machine takes its time to come back.
    monkeypatch.setattr(worker_attach, "GIVE_UP_S", 3_600.0)
    rig = Rig(await PlayedWorker().start())
    yield rig
    await rig.pool.close()
    await rig.worker.stop()


async def test_the_hello_names_the_gateway_and_what_it_holds(rig: Rig) -> None:
    rig.listener.held = [pb.Continue(request_id="r", epoch=5, next_indices=[3])]

    await rig.attached()
    await until(lambda: bool(rig.worker.hellos))

    assert rig.worker.hellos == [pb.Hello(gateway_instance=GATEWAY, continued=rig.listener.held)]


async def test_tokens_wait_for_company_until_an_ack_is_asked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_attach, "ACK_DELAY_S", 3600.0)
    await rig.attached()
    for first in range(20):
        rig.worker.send(delta("r", first, 1, finish=first == 19), delta("s", first, 1))
    await until(lambda: rig.listener.tokens.get("s") == 20)

    rig.pool.acknowledge("worker-a", "r")

    await until(lambda: len(rig.listener.acked) == 2)
    assert [(entry.request_id, list(entry.next_indices)) for entry in rig.worker.acks] == [("r", [20]), ("s", [20])]
    assert rig.worker.ack_messages == 1


async def test_tokens_are_acked_within_the_delay(rig: Rig) -> None:
    await rig.attached()

    rig.worker.send(delta("r", 0, 1))

    await until(lambda: bool(rig.worker.acks))
    assert list(rig.worker.acks[0].next_indices) == [1]


async def test_acks_of_many_requests_share_a_message(rig: Rig) -> None:
    await rig.attached()

    rig.worker.send(*(delta(f"r{n}", 0, 2) for n in range(20)))

    await until(lambda: len(rig.worker.acks) == 20)
    assert rig.worker.ack_messages == 1


async def test_cancels_and_last_acks_are_sent(rig: Rig) -> None:
    await rig.attached()

    rig.pool.cancel("worker-a", pb.Cancel(request_id="r", epoch=5))
    rig.pool.cancel("worker-a", pb.Cancel(request_id="s", epoch=6, choice=2))
    rig.pool.confirm("worker-a", pb.AckEntry(request_id="t", epoch=7, done=True))

    await until(lambda: len(rig.worker.cancels) == 2 and bool(rig.worker.acks))
    whole, choice = rig.worker.cancels
    assert (whole.request_id, whole.epoch, whole.HasField("choice")) == ("r", 5, False)
    assert (choice.request_id, choice.epoch, choice.choice) == ("s", 6, 2)
    assert rig.worker.acks == [pb.AckEntry(request_id="t", epoch=7, done=True)]


async def test_a_short_break_is_no_loss_and_the_next_hello_continues(rig: Rig) -> None:
    await rig.attached()
    rig.worker.send(delta("r", 0, 3))
    await until(lambda: "r" in rig.listener.tokens)
    rig.listener.held = [pb.Continue(request_id="r", epoch=1, next_indices=[3])]

    rig.worker.outgoing.put_nowait(None)
    await until(lambda: len(rig.worker.hellos) == 2)
    rig.worker.send(delta("r", 3, 2))

    await until(lambda: rig.listener.tokens["r"] == 5)
    assert list(rig.worker.hellos[1].continued) == rig.listener.held
    await until(lambda: not rig.counts_to_loss)
    assert rig.listener.lost == []


async def test_an_ack_that_a_break_swallowed_is_sent_again(rig: Rig) -> None:
    await rig.attached()
    await until(lambda: bool(rig.worker.hellos))
    rig.listener.held = [pb.Continue(request_id="r", epoch=1, next_indices=[0])]

    rig.worker.outgoing.put_nowait(None)

    await until(lambda: bool(rig.listener.acked))
    assert len(rig.worker.hellos) == 2
    assert [entry.request_id for entry in rig.listener.acked] == ["r"]


async def test_a_worker_that_stays_away_is_lost_once_and_may_come_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_attach, "GIVE_UP_S", 0.1)
    await rig.attached()
    rig.worker.send(delta("r", 0, 3))
    await until(lambda: "r" in rig.listener.tokens)

    await rig.worker.stop()
    await until(lambda: bool(rig.listener.lost))
    assert not rig.pool.serves("m", "1")
    assert not rig.pool.expects("worker-a")
    await rig.worker.start()

    await until(lambda: rig.pool.serves("m", "1"))
    rig.worker.send(delta("s", 0, 1))
    await until(lambda: "s" in rig.listener.tokens)
    assert rig.listener.lost == ["worker-a"]
    assert rig.pool.expects("worker-a")


async def test_a_worker_that_left_the_registry_keeps_its_stream_until_it_breaks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_attach, "GIVE_UP_S", 0.1)
    await rig.attached()
    rig.worker.send(delta("r", 0, 1))
    await until(lambda: "r" in rig.listener.tokens)

    rig.pool.update([])
    rig.worker.send(delta("r", 1, 1))
    await until(lambda: rig.listener.tokens["r"] == 2)
    assert rig.listener.lost == []

    await rig.worker.stop()
    await until(lambda: rig.listener.lost == ["worker-a"])
    await until(lambda: not rig.pool._attachments)


async def test_another_incarnation_at_the_address_means_that_the_first_is_dead(
    rig: Rig,
) -> None:
    await rig.attached()
    rig.worker.send(delta("r", 0, 1))
    await until(lambda: "r" in rig.listener.tokens)

    rig.worker.instance = "worker-b"
    rig.worker.outgoing.put_nowait(None)

    await until(lambda: rig.listener.lost == ["worker-a"])
    await until(lambda: not rig.pool._attachments)
    assert len(rig.worker.hellos) == 1, "the new incarnation is not asked for what it never had"
    await rig.attached()


async def test_frames_of_another_incarnation_are_not_taken(rig: Rig) -> None:
    await rig.attached()
    rig.worker.instance = "worker-b"

    rig.worker.send(delta("r", 0, 1))

    await until(lambda: not rig.pool.serves("m", "1"))
    assert rig.listener.tokens == {}


async def test_a_frozen_worker_is_noticed_though_its_socket_is_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_attach, "SILENCE_S", 0.1)
    monkeypatch.setattr(worker_attach, "PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(worker_attach, "GIVE_UP_S", 0.1)
    await rig.attached()
    rig.worker.send(delta("r", 0, 1))
    await until(lambda: "r" in rig.listener.tokens)
    rig.worker.thawed.clear()
    await asyncio.sleep(0.5)
    assert rig.pool.serves("m", "1"), "an idle worker is left in peace"

    rig.listener.held = [pb.Continue(request_id="r", epoch=1, next_indices=[1])]

    await until(lambda: rig.listener.lost == ["worker-a"])
    rig.worker.thawed.set()
    await until(lambda: rig.pool.serves("m", "1"))


async def test_a_reopened_stream_says_hello_again(rig: Rig) -> None:
    await rig.attached()
    await until(lambda: len(rig.worker.hellos) == 1)

    rig.pool.reopen("worker-a")

    await until(lambda: len(rig.worker.hellos) == 2)
    await until(lambda: not rig.counts_to_loss)
    assert rig.listener.lost == []


def test_few_workers_are_all_dialled_and_many_by_a_stable_subset() -> None:
    records = [WorkerRecord(f"w{n}", f"h:{n}", "m", "1", Pool("m"), "aggregated") for n in range(80)]

    assert attach_subset("g1", records[:64]) == records[:64]
    chosen = {r.instance for r in attach_subset("g1", records)}
    assert len(chosen) == 32
    assert chosen != {r.instance for r in attach_subset("g2", records)}
    fewer = {r.instance for r in attach_subset("g1", [r for r in records if r.instance != "w3"])}
    assert len(chosen - fewer) <= 1
