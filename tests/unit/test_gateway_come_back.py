"""Keys and resumed streams over a scripted generation, a real Redis and a clock that only the test moves."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2

from services.common.errors import QueueFull, WorkerLost
from services.gateway.answer_log import AnswerLog, LogRoom
from services.gateway.idempotency_store import IdempotencyStore
from services.gateway.resumable import GRACE_S, ResumableAnswers
from tests.helpers.echo_generation import (
    REQUEST_ID,
    AsgiClient,
    FakeGenerator,
    FakeKeyRing,
    HttpAnswer,
    Step,
    front,
    key,
    one_by_one,
    resumable_answers,
    tokens,
)
from tests.helpers.fake_clock import FakeClock, settle
from tests.helpers.waiting import WAIT_S, until

IDS = [72, 101, 108, 108, 111]
AUTHORIZATION = (b"authorization", b"Bearer secret")
KEY = (b"idempotency-key", b"order 7")
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 5}


class Rig:
    """One gateway's door; each `post` is a client of its own."""

    def __init__(self, redis: aioredis.Redis, generator: FakeGenerator, *, instance: str = "gateway-1") -> None:
        self.clock = FakeClock()
        self.generator = generator
        self.answers: ResumableAnswers = resumable_answers(redis, self.clock, instance=instance)
        self.records = IdempotencyStore(redis)
        keyring = FakeKeyRing(secret=key(), other=key("other"))
        self.app = front(generator, keyring=keyring, answers=self.answers).app

    def client(self) -> AsgiClient:
        return AsgiClient(self.app)

    async def post(self, *headers: tuple[bytes, bytes], client: AsgiClient | None = None, **fields: Any) -> HttpAnswer:
        sent = [AUTHORIZATION, *headers]
        asked = client if client is not None else self.client()
        return await asked.ask("POST", "/v1/completions", BODY | fields, headers=sent)

    async def get(self, request_id: str, *headers: tuple[bytes, bytes]) -> HttpAnswer:
        return await self.client().ask("GET", f"/v1/streams/{request_id}", headers=[AUTHORIZATION, *headers])

    async def until_forgotten(self) -> None:
        """Let graces pass until no log is held."""
        async with asyncio.timeout(WAIT_S):
            while len(self.answers):
                await self.clock.advance(GRACE_S)
                await asyncio.sleep(0.002)


async def is_free(rig: Rig) -> bool:
    """Whether nobody runs the answer to the key."""
    return await rig.records.read("acme", hashlib.sha256(KEY[1]).hexdigest()) is None


NewRig = Callable[..., Rig]


@pytest.fixture
async def new_rig(redis_client: aioredis.Redis) -> AsyncIterator[NewRig]:
    """Makes gateways that are closed at the end."""
    made: list[Rig] = []

    def make(generator: FakeGenerator, *, instance: str = "gateway-1") -> Rig:
        made.append(Rig(redis_client, generator, instance=instance))
        return made[-1]

    yield make
    for rig in made:
        await rig.answers.close()


def script(*steps: Step) -> Sequence[Step]:
    return steps or one_by_one(IDS)


async def test_a_key_is_replayed_with_equal_bytes_and_runs_once(new_rig: NewRig) -> None:
    rig = new_rig(FakeGenerator(script()))
    first = await rig.post(KEY)
    again = await rig.post(KEY)
    await until(lambda: bool(rig.generator.only.endings))
    await rig.until_forgotten()
    from_redis = await rig.post(KEY)
    elsewhere = await new_rig(rig.generator, instance="gateway-2").post(KEY)

    assert first.status == 200
    assert first.body == again.body == from_redis.body == elsewhere.body
    assert first.headers == again.headers == from_redis.headers == elsewhere.headers
    assert rig.generator.only.endings == [(common_pb2.TERMINAL_STATE_COMPLETED, common_pb2.FINISH_REASON_LENGTH, "")]
    assert rig.generator.only.delivered == {0: 5}


async def test_the_record_is_kept_a_day(new_rig: NewRig, redis_client: aioredis.Redis) -> None:
    rig = new_rig(FakeGenerator(script()))
    await rig.post(KEY)

    [name] = await redis_client.keys("mr:{acme}:idem:*")
    assert 86_390_000 < await redis_client.pttl(name) <= 86_400_000


@pytest.mark.parametrize("fields", [{"max_tokens": 4}, {"stream": True}, {"prompt": "ho"}])
async def test_another_body_is_422_while_it_runs_and_after(new_rig: NewRig, fields: dict[str, Any]) -> None:
    gate = asyncio.Event()
    rig = new_rig(FakeGenerator(script(gate, *one_by_one(IDS))))
    running = asyncio.create_task(rig.post(KEY))
    await until(lambda: rig.generator.generations)

    during = await rig.post(KEY, **fields)
    gate.set()
    await running
    after = await rig.post(KEY, **fields)
    elsewhere = await new_rig(rig.generator, instance="gateway-2").post(KEY, **fields)

    for refused in (during, after, elsewhere):
        assert refused.status == 422
        assert refused.error["code"] == "IDEMPOTENCY_CONFLICT"
    assert len(rig.generator.generations) == 1


async def test_the_order_of_fields_and_white_space_do_not_matter(new_rig: NewRig) -> None:
    rig = new_rig(FakeGenerator(script()))
    headers = [AUTHORIZATION, KEY]
    one = await rig.client().ask(
        "POST", "/v1/completions", b'{"model": "tiny", "prompt": "hi", "max_tokens": 5}', headers=headers
    )
    two = await rig.client().ask(
        "POST", "/v1/completions", b'{"max_tokens":5,\n"prompt":"hi","model":"tiny"}', headers=headers
    )

    assert one.body == two.body
    assert len(rig.generator.generations) == 1


async def test_what_was_refused_or_failed_leaves_the_key_free(new_rig: NewRig) -> None:
    rig = new_rig(FakeGenerator(script(*one_by_one(IDS))))
    invalid = await rig.post(KEY, max_tokens=-1)
    rig.generator.refusal = QueueFull("The queue of this model is full.", retry_after_s=1.0)
    full = await rig.post(KEY)
    rig.generator.refusal = None
    failing = new_rig(FakeGenerator(script(tokens(IDS[:2]), WorkerLost("Lost."))), instance="gateway-2")
    failed = await failing.post(KEY, stream=True)
    await until(lambda: is_free(rig))

    answer = await rig.post(KEY, max_tokens=3)

    assert (invalid.status, full.status, failed.status) == (400, 503, 200)
    assert failed.body.startswith(b"id: ")
    assert b'"code":"WORKER_LOST"' in failed.body
    assert answer.status == 200


async def test_an_owner_without_a_lease_does_not_lock_the_key(new_rig: NewRig) -> None:
    dead = new_rig(FakeGenerator(script(asyncio.Event())), instance="gateway-dead")
    stuck = asyncio.create_task(dead.post(KEY))
    await until(lambda: dead.generator.generations)
    rig = new_rig(FakeGenerator(script()), instance="gateway-2")

    answer = await rig.post(KEY)
    stuck.cancel()
    again = await rig.post(KEY)

    assert answer.status == 200
    assert again.body == answer.body


async def test_a_client_that_leaves_comes_back_within_the_grace_and_gets_the_rest(
    new_rig: NewRig,
) -> None:
    gate = asyncio.Event()
    events = one_by_one(IDS)
    rig = new_rig(FakeGenerator(script(*events[:2], gate, *events[2:])))
    first = rig.client()
    cut = asyncio.create_task(rig.post((b"x-millrace-resume", b"1"), client=first, stream=True))
    await until(lambda: b"ello"[:1] in first.answer.body)
    first.disconnect.set()
    await cut
    await rig.clock.advance(GRACE_S - 1)
    gate.set()
    await settle()

    assert rig.generator.only.endings == []
    rest = await rig.get(REQUEST_ID, (b"last-event-id", f"{REQUEST_ID}:1".encode()))
    whole = await rig.get(REQUEST_ID)

    await until(lambda: rig.generator.only.endings)
    assert first.answer.body + rest.body == whole.body
    assert whole.body.endswith(b"data: [DONE]\n\n")
    assert rig.generator.only.endings[0][0] == common_pb2.TERMINAL_STATE_COMPLETED
    at_the_end = await rig.get(REQUEST_ID, (b"last-event-id", f"{REQUEST_ID}:5".encode()))
    assert at_the_end.status == 204


async def test_without_asking_a_cut_is_a_cancel(new_rig: NewRig) -> None:
    rig = new_rig(FakeGenerator(script(*one_by_one(IDS)[:2], asyncio.Event())))
    client = rig.client()
    cut = asyncio.create_task(rig.post(client=client, stream=True))
    await until(lambda: b"e" in client.answer.body)
    client.disconnect.set()
    await cut

    assert rig.generator.only.endings[0][0] == common_pb2.TERMINAL_STATE_CANCELLED
    assert b"id:" not in client.answer.body
    assert (await rig.get(REQUEST_ID)).status == 404


async def test_the_grace_over_cancels_and_counts_only_what_a_client_took(new_rig: NewRig) -> None:
    gate = asyncio.Event()
    events = one_by_one(IDS)
    rig = new_rig(FakeGenerator(script(*events[:2], gate, *events[2:4], asyncio.Event())))
    client = rig.client()
    cut = asyncio.create_task(rig.post(KEY, client=client, stream=True))
    await until(lambda: client.answer.body.count(b"id: ") == 2)
    client.disconnect.set()
    await cut
    gate.set()
    await rig.clock.advance(GRACE_S - 1)
    assert rig.generator.only.endings == []
    await rig.until_forgotten()

    assert rig.generator.only.endings == [
        (common_pb2.TERMINAL_STATE_CANCELLED, common_pb2.FINISH_REASON_CANCELLED, "CANCELLED")
    ]
    assert rig.generator.only.delivered == {0: 2}
    assert (await rig.get(REQUEST_ID)).status == 404


@pytest.mark.parametrize(
    "headers",
    [
        [(b"idempotency-key", b"")],
        [(b"idempotency-key", b"x" * 256)],
        [(b"idempotency-key", b"a"), (b"idempotency-key", b"b")],
        [(b"x-millrace-resume", b"yes")],
        [KEY, (b"last-event-id", b"nonsense")],
        [(b"x-millrace-resume", b"1"), (b"last-event-id", f"{REQUEST_ID}:1".encode())],
        [(b"last-event-id", f"{REQUEST_ID}:1".encode())],
    ],
)
async def test_odd_headers_are_400(new_rig: NewRig, headers: list[tuple[bytes, bytes]]) -> None:
    rig = new_rig(FakeGenerator(script()))
    answer = await rig.post(*headers, stream=True)

    assert answer.status == 400
    assert rig.generator.generations == []


async def test_to_resume_a_whole_answer_is_400(new_rig: NewRig) -> None:
    rig = new_rig(FakeGenerator(script()))
    answer = await rig.post((b"x-millrace-resume", b"1"))

    assert (answer.status, answer.error["param"]) == (400, "x-millrace-resume")
    assert rig.generator.generations == []


async def test_equal_embeddings_under_a_key_are_one_request_and_a_failed_one_frees_it(new_rig: NewRig) -> None:
    finish = common_pb2.FINISH_REASON_STOP
    steps: list[Step] = [WorkerLost("Lost.")]
    rig = new_rig(FakeGenerator(lambda _: steps))
    rig.generator.embedding_of = lambda _: bytes(8)
    sent = {"model": "tiny", "input": ["a", "b"]}

    async def ask(**fields: Any) -> HttpAnswer:
        return await rig.client().ask("POST", "/v1/embeddings", sent | fields, headers=[AUTHORIZATION, KEY])

    failed = await ask()
    begun = len(rig.generator.generations)
    await until(lambda: is_free(rig))
    steps[:] = [tokens([], finish=finish)]
    first, second = await ask(), await ask()
    other = await ask(input=["a"])

    assert (failed.status, failed.error["code"]) == (502, "WORKER_LOST")
    assert failed.headers["x-request-id"] == failed.error["request_id"]
    assert first.status == 200
    assert (second.body, second.headers) == (first.body, first.headers)
    assert (other.status, other.error["code"]) == (422, "IDEMPOTENCY_CONFLICT")
    assert len(rig.generator.generations) == begun + 2


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
async def test_a_key_where_nothing_is_run_once_for_it_is_refused(new_rig: NewRig, path: str) -> None:
    rig = new_rig(FakeGenerator(script()))
    answer = await rig.client().ask("POST", path, {}, headers=[AUTHORIZATION, KEY])

    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "UNSUPPORTED", "idempotency-key")


@pytest.mark.parametrize("sent", [b"x" * 255, b'"8e03978e-40d5-43dd-bc93-6894a57f9324"', "ключ 🔑".encode(), b"a b\tc"])
async def test_any_bytes_make_a_key(new_rig: NewRig, sent: bytes) -> None:
    rig = new_rig(FakeGenerator(script()))
    answers = [await rig.post((b"idempotency-key", sent)) for _ in range(2)]

    assert [a.status for a in answers] == [200, 200]
    assert len(rig.generator.generations) == 1


async def test_a_last_event_of_a_stream_that_is_gone_starts_nothing(new_rig: NewRig) -> None:
    rig = new_rig(FakeGenerator(script()))
    answer = await rig.post(KEY, (b"last-event-id", f"{REQUEST_ID}:1".encode()), stream=True)

    assert answer.status == 404
    assert rig.generator.generations == []


async def test_a_log_forgets_what_was_read_and_waits_when_nothing_was() -> None:
    room = LogRoom()
    log = AnswerLog(REQUEST_ID, room, limit=1_000)
    await log.start(200, [(b"content-type", b"text/event-stream")])
    for _ in range(5):
        await log.write([b"data: " + b"x" * 80 + b"\n\n"])
    full = asyncio.create_task(log.write([b"data: " + b"y" * 80 + b"\n\n"], more=False))
    await settle()
    assert not full.done()

    parts = [part async for part in log.read(-1)]

    await full
    assert log.frame_count == 6
    assert b"".join(p for p in parts if isinstance(p, bytes)).count(b"id: ") == 6
    assert room.used <= 1_000
    log.drop()
    assert room.used == 0
