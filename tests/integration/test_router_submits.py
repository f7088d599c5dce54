"""The stream of submits of one worker: few messages for many requests, and one answer for each whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from millrace.worker.v1 import worker_service_pb2

from services.common.clock import SystemClock
from services.common.lifecycle import end_tasks
from services.router.submit_link import ALONE_BYTES, BATCH, Answer, SubmitLink
from tests.helpers.admission import make_entry
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.waiting import until


class Counting(FakeWorker):
    """Counts the messages that come by the stream, and holds answers back until `open`."""

    def __init__(self) -> None:
        super().__init__("worker-1", slots=1_000)
        self.messages: list[int] = []
        self.open = asyncio.Event()

    async def SubmitStream(self, request_iterator: Any, context: Any) -> Any:
        async def counted() -> AsyncIterator[worker_service_pb2.SubmitStreamRequest]:
            async for message in request_iterator:
                self.messages.append(len(message.requests))
                await self.open.wait()
                yield message

        async for response in super().SubmitStream(counted(), context):
            yield response


class Older(FakeWorker):
    """Of before there was a stream of submits."""

    async def SubmitStream(self, request_iterator: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield


class Rig:
    """A link to a worker, and the answers that came by it."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.answers: dict[str, list[Answer]] = {}

    async def start(self) -> None:
        await self.worker.start()
        self._channel = grpc.aio.insecure_channel(self.worker.record.address)
        self._link = SubmitLink(self._channel, SystemClock())
        self.task = asyncio.create_task(self._link.run())

    def send(self, *names: str, prompt: int = 10, answered: Callable[[Answer], None] | None = None) -> None:
        for name in names:
            head = worker_service_pb2.SubmitRequest(epoch=1, attempt=1)
            entry = make_entry(name, prompt=prompt).SerializeToString()
            self._link.send(name, head, entry, answered or self.answers.setdefault(name, []).append)

    def answered(self, *names: str) -> bool:
        return all(self.answers[name] for name in names)

    def accepted(self) -> set[str]:
        return {
            name
            for name, [answer] in self.answers.items()
            if not isinstance(answer, grpc.StatusCode) and answer.accepted
        }

    async def close(self) -> None:
        await end_tasks([self.task])
        await self._channel.close()
        await self.worker.kill()


@pytest.fixture
async def counting() -> AsyncIterator[tuple[Rig, Counting]]:
    worker = Counting()
    rig = Rig(worker)
    await rig.start()
    yield rig, worker
    await rig.close()


async def test_requests_that_come_together_travel_together(counting: tuple[Rig, Counting]) -> None:
    rig, worker = counting
    worker.open.set()
    names = [f"r{i}" for i in range(2 * BATCH)]

    rig.send(*names)
    await until(lambda: rig.answered(*names))

    assert worker.messages == [BATCH, BATCH]
    assert rig.accepted() == set(names)


async def test_a_view_comes_after_the_answers_that_it_came_with() -> None:
    class Telling(FakeWorker):
        """Of a version that shows its room with its answers."""

        async def SubmitStream(self, request_iterator: Any, context: Any) -> Any:
            async for message in request_iterator:
                patience_ms = message.view_patience.ToMilliseconds()
                responses = [await self.Submit(request, context) for request in message.requests]
                view = self.view()
                view.backlog_token_count = patience_ms
                yield worker_service_pb2.SubmitStreamResponse(responses=responses, view=view)

    came: list[str | int] = []
    worker = Telling("worker-1", slots=10)
    await worker.start()
    channel = grpc.aio.insecure_channel(worker.record.address)
    link = SubmitLink(
        channel, SystemClock(), on_view=lambda view: came.append(view.backlog_token_count), view_patience_s=lambda: 0.25
    )
    task = asyncio.create_task(link.run())

    for name in ("r1", "r2"):
        head = worker_service_pb2.SubmitRequest(epoch=1, attempt=1)
        link.send(name, head, make_entry(name).SerializeToString(), lambda answer, name=name: came.append(name))
    await until(lambda: len(came) == 3)

    assert came == ["r1", "r2", 250]
    await end_tasks([task])
    await channel.close()
    await worker.kill()


@pytest.mark.parametrize("prompt", [0, 10, 100, 20_000, 200_000])
async def test_the_worker_reads_the_entry_beside_the_rest_of_the_request(
    counting: tuple[Rig, Counting], prompt: int
) -> None:
    rig, worker = counting
    worker.open.set()

    rig.send("a", prompt=prompt)
    await until(lambda: rig.answered("a"))

    entry = make_entry("a", prompt=prompt)
    assert worker.submits == [worker_service_pb2.SubmitRequest(entry=entry, epoch=1, attempt=1)]


async def test_a_broken_stream_answers_all_that_are_open_and_the_next_submit_opens_another(
    counting: tuple[Rig, Counting],
) -> None:
    rig, worker = counting
    rig.send("a", "b")
    await until(lambda: worker.messages)
    address = worker.record.address
    await worker.kill()
    await until(lambda: rig.answered("a", "b"))
    assert {answer for [answer] in rig.answers.values()} == {grpc.StatusCode.UNAVAILABLE}

    worker.open.set()
    await worker.start(address)
    rig.answers.clear()
    tries = 0

    def taken() -> bool:
        nonlocal tries
        if all(rig.answers.values()) and not rig.worker.running:
            tries += 1
            rig.send(f"c{tries}")
        return bool(rig.worker.running)

    await until(taken)


async def test_a_worker_that_says_nothing_is_given_up_and_what_it_had_is_answered_once(
    counting: tuple[Rig, Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.submit_link.SUBMIT_TIMEOUT_S", 0.05)
    rig, worker = counting

    rig.send("a", "b")
    await until(lambda: rig.answered("a", "b"))

    worker.open.set()
    rig.send("c")
    await until(lambda: rig.answered("c"))
    assert [rig.answers[name] for name in "ab"] == [[grpc.StatusCode.DEADLINE_EXCEEDED]] * 2


async def test_the_end_of_a_link_answers_what_is_open(counting: tuple[Rig, Counting]) -> None:
    rig, worker = counting
    rig.send("a")
    await until(lambda: worker.messages)

    await end_tasks([rig.task])

    assert rig.answers["a"] == [grpc.StatusCode.CANCELLED]


async def test_who_fails_over_an_answer_keeps_no_other_from_theirs(counting: tuple[Rig, Counting]) -> None:
    rig, worker = counting
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def fail(_: Answer) -> None:
        raise RuntimeError("of no use")

    rig.send("a", answered=fail)
    rig.send("b")
    worker.open.set()
    await until(lambda: rig.answered("b"))

    assert rig.accepted() == {"b"}
    assert [str(failure["exception"]) for failure in failures] == ["of no use"]


async def test_a_request_that_would_hold_up_others_goes_alone(counting: tuple[Rig, Counting]) -> None:
    rig, worker = counting

    rig.send("large", prompt=ALONE_BYTES)
    await until(lambda: rig.answered("large"))

    assert worker.messages == []
    assert rig.accepted() == {"large"}


async def test_a_worker_of_before_the_stream_is_asked_one_by_one() -> None:
    rig = Rig(Older("worker-1", slots=9))
    await rig.start()
    try:
        rig.send("a", "b")
        await until(lambda: rig.answered("a", "b"))
        rig.send("c")
        await until(lambda: rig.answered("c"))

        assert rig.accepted() == {"a", "b", "c"}
        assert [submit.entry.request_id for submit in rig.worker.submits] == ["a", "b", "c"]
    finally:
        await rig.close()
