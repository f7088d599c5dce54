"""`/v1/files` and `/v1/batches` through the OpenAI SDK: a whole gateway over Redis, an echo worker, a real folder."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2
from openai.types import Batch

from services.common.admission_store import AdmissionStore
from services.common.lease import Lease
from services.gateway.batch_run import BATCH_LINES
from services.gateway.batch_runner import LEASE_S
from services.gateway.batch_store import BatchStore, batch_database
from services.gateway.config import GatewayConfig
from services.gateway.limits import Limits
from services.gateway.wiring import GatewayApp, build
from services.worker.model_source import load_model
from services.worker.wiring import build as build_worker
from tests.helpers.gateway import KEY, POOL, FakeRouter
from tests.helpers.redis import RedisProcess, usage_events
from tests.helpers.waiting import WAIT_S, until
from tests.helpers.worker import echo_config, echo_tokens


@dataclasses.dataclass
class Rig:
    """Gateways that share a folder; `acme` and `other` are SDK clients of the last one started."""

    config: GatewayConfig
    redis: aioredis.Redis
    stack: contextlib.AsyncExitStack
    router: FakeRouter
    app: GatewayApp | None = None

    async def start(self) -> GatewayApp:
        self.app = app = build(self.config)
        await app.start()
        await self.until(app.back.ready)
        base = f"http://127.0.0.1:{app.http_port}/v1"
        self.acme = openai.AsyncOpenAI(base_url=base, api_key="acme", max_retries=0)
        self.other = openai.AsyncOpenAI(base_url=base, api_key="other", max_retries=0)
        self.stack.push_async_callback(self.acme.close)
        self.stack.push_async_callback(self.other.close)
        return app

    async def stop(self) -> None:
        app, self.app = self.app, None
        if app is not None:
            await app.stop()

    async def until(self, condition: Any) -> None:
        await until(condition)

    async def submit(self, *lines: object, endpoint: Any = "/v1/completions") -> Batch:
        raw = b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)
        file = await self.acme.files.create(file=("in.jsonl", raw), purpose="batch")
        return await self.acme.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")

    async def reached(self, batch: Batch, *statuses: str, completed: int = 0) -> Batch:
        async with asyncio.timeout(WAIT_S):
            while True:
                found = await self.acme.batches.retrieve(batch.id)
                assert found.request_counts is not None
                if found.status in statuses and found.request_counts.completed >= completed:
                    return found
                await asyncio.sleep(0.02)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        content = await self.acme.files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]

    async def events(self) -> list[Any]:
        assert self.app is not None
        await self.app.back.parts.publisher.wait_published()
        return [event for event in await usage_events(self.redis, POOL) if event.HasField("billed")]


@pytest.fixture
async def rig(redis_server: RedisProcess, redis_client: aioredis.Redis, tmp_path: Path) -> AsyncIterator[Rig]:
    store = AdmissionStore(redis_client)
    keys = {"acme": KEY, "other": dataclasses.replace(KEY, key_id="key-2", tenant="other")}
    await store.replace_keys({hashlib.sha256(secret.encode()).digest(): key for secret, key in keys.items()})
    worker_config = echo_config(step_ms=2.0)
    worker = build_worker(worker_config, store=store, model=load_model(worker_config))
    await worker.start()
    config = GatewayConfig(
        redis_url=redis_server.url,
        http_listen="127.0.0.1:0",
        grpc_listen="127.0.0.1:0",
        data_dir=str(tmp_path / "gateway"),
        store_dir=str(tmp_path / "store"),
        cache_secret="secret",
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(worker.stop)
        router = FakeRouter(store).start()
        stack.push_async_callback(router.stop)
        rig = Rig(config, redis_client, stack, router)
        stack.push_async_callback(rig.stop)
        await rig.start()
        yield rig


def completion(custom_id: str, max_tokens: int = 4, **body: object) -> dict[str, Any]:
    fields = {"model": "echo", "prompt": "t1 t2 ", "max_tokens": max_tokens, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": fields}


async def test_good_lines_are_answered_and_bad_ones_are_in_the_error_file(rig: Rig) -> None:
    elsewhere = completion("elsewhere") | {"url": "/v1/embeddings"}
    batch = await rig.submit(
        completion("a"),
        b"{not json",
        completion("b"),
        completion("a"),
        elsewhere,
        completion("no-model", model="absent"),
        completion("streamed", stream=True),
    )

    done = await rig.reached(batch, "completed")

    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (7, 2, 5)
    output, errors = await rig.lines(done.output_file_id), await rig.lines(done.error_file_id)
    assert [line["custom_id"] for line in output] == ["a", "b"]
    for line in output:
        text = "".join(f"t{token} " for token in echo_tokens(line["response"]["request_id"], 0, 4))
        assert line["response"]["body"]["choices"][0]["text"] == text
        assert (line["response"]["status_code"], line["error"]) == (200, None)
    assert [line["custom_id"] for line in errors] == [None, "a", "elsewhere", "no-model", "streamed"]
    assert [line["response"] is None for line in errors] == [True, True, True, False, False]
    assert errors[3]["response"]["body"]["error"]["code"] == "MODEL_NOT_FOUND"
    assert errors[4]["response"]["body"]["error"]["param"] == "stream"
    events = await rig.events()
    assert sorted(event.request_id for event in events) == sorted(line["response"]["request_id"] for line in output)


async def test_a_batch_goes_on_at_the_next_gateway_and_bills_each_line_once(rig: Rig) -> None:
    count = 40
    batch = await rig.submit(*(completion(f"line-{i}", max_tokens=60) for i in range(count)))
    begun = await rig.reached(batch, "in_progress", completed=1)
    first = rig.app
    assert first is not None

    await first.drain(20.0)
    await rig.stop()
    await rig.start()
    left = await rig.acme.batches.retrieve(batch.id)
    done = await rig.reached(batch, "completed")

    assert begun.request_counts is not None
    assert left.status == "in_progress"
    output = await rig.lines(done.output_file_id)
    assert [line["custom_id"] for line in output] == [f"line-{i}" for i in range(count)]
    assert done.error_file_id is None
    events = await rig.events()
    billed = Counter(event.request_id for event in events if event.billed.completion_token_count)
    assert billed == Counter(line["response"]["request_id"] for line in output)
    assert len(events) == count


async def test_of_two_gateways_that_see_a_batch_one_runs_it(rig: Rig, tmp_path: Path) -> None:
    other = build(dataclasses.replace(rig.config, data_dir=str(tmp_path / "other")))
    await other.start()
    rig.stack.push_async_callback(other.stop)
    await rig.until(other.back.ready)

    batches = [await rig.submit(*(completion(f"line-{i}") for i in range(10))) for _ in range(3)]
    done = [await rig.reached(batch, "completed") for batch in batches]
    await other.back.parts.publisher.wait_published()

    lines = [line for batch in done for line in await rig.lines(batch.output_file_id)]
    assert [line["custom_id"] for line in lines] == [f"line-{i}" for _ in batches for i in range(10)]
    billed = Counter(event.request_id for event in await rig.events())
    assert billed == Counter(line["response"]["request_id"] for line in lines)


async def test_a_line_that_was_cut_is_run_again_and_billed_once(rig: Rig) -> None:
    batch = await rig.submit(*(completion(f"line-{i}", max_tokens=400) for i in range(4)))
    first = rig.app
    assert first is not None
    await rig.until(lambda: len(first.back.parts.table) == 4)

    await rig.stop()
    await rig.start()
    done = await rig.reached(batch, "completed")

    output = await rig.lines(done.output_file_id)
    assert len(output) == 4
    billed = Counter(event.request_id for event in await rig.events() if event.billed.completion_token_count)
    assert billed == Counter(line["response"]["request_id"] for line in output)


async def test_lines_run_in_the_class_batch_on_every_endpoint(rig: Rig) -> None:
    chat = {"model": "echo", "messages": [{"role": "user", "content": "t1"}], "max_tokens": 2}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    seen = []
    assert rig.app is not None
    admit = rig.app.back.generator.start

    async def start(key: Any, request: Any) -> Any:
        seen.append(request.priority_class)
        return await admit(key, request)

    rig.app.back.generator.start = start  # type: ignore[method-assign]
    vector = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"model": "echo", "input": "t1"}}
    batches = [
        await rig.submit(line, endpoint="/v1/chat/completions"),
        await rig.submit(completion("t")),
        await rig.submit(vector, endpoint="/v1/embeddings"),
    ]
    done = [await rig.reached(batch, "completed") for batch in batches]

    kinds = [(await rig.lines(each.output_file_id))[0]["response"]["body"]["object"] for each in done]
    assert kinds == ["chat.completion", "text_completion", "list"]
    assert seen == [common_pb2.PRIORITY_CLASS_BATCH] * 3


async def test_another_tenant_finds_neither_file_nor_batch(rig: Rig) -> None:
    batch = await rig.submit(completion("a"))
    done = await rig.reached(batch, "completed")
    assert done.output_file_id is not None

    for asked in (
        rig.other.files.retrieve(batch.input_file_id),
        rig.other.files.content(done.output_file_id),
        rig.other.files.delete(batch.input_file_id),
        rig.other.batches.retrieve(batch.id),
        rig.other.batches.cancel(batch.id),
        rig.other.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            await asked
    assert (await rig.other.files.list()).data == []
    assert (await rig.other.batches.list()).data == []
    assert [each.id for each in (await rig.acme.batches.list()).data] == [batch.id]


async def test_a_cancelled_batch_keeps_what_was_answered(rig: Rig) -> None:
    batch = await rig.submit(completion("short", max_tokens=2), *(completion(f"l{i}", 450) for i in range(40)))
    await rig.reached(batch, "in_progress", completed=1)
    with pytest.raises(openai.BadRequestError, match="cancel that first"):
        await rig.acme.files.delete(batch.input_file_id)

    await rig.acme.batches.cancel(batch.id)
    done = await rig.reached(batch, "cancelled")

    assert done.request_counts is not None
    assert 1 <= done.request_counts.completed < 41
    assert (await rig.lines(done.output_file_id))[0]["custom_id"] == "short"
    assert (await rig.acme.files.delete(batch.input_file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await rig.acme.files.retrieve(batch.input_file_id)


async def test_what_its_time_did_not_suffice_for_is_told_in_the_error_file(rig: Rig) -> None:
    batch = await rig.submit(completion("short", max_tokens=2), *(completion(f"l{i}", 450) for i in range(40)))
    await rig.reached(batch, "in_progress", completed=1)
    database = batch_database(Path(rig.config.store_dir))
    batches = BatchStore(database, Limits())
    now = await batches.get("acme", batch.id)
    assert now is not None

    assert await batches.change("acme", now, msgspec.structs.replace(now, expires_at=now.created_at))
    done = await rig.reached(batch, "expired")

    assert done.request_counts is not None
    assert done.request_counts.completed + done.request_counts.failed == 41
    await database.close()
    errors = await rig.lines(done.error_file_id)
    assert {line["error"]["code"] for line in errors} == {"DEADLINE_EXCEEDED"}
    assert errors[-1]["custom_id"] == "l39"


async def test_lines_of_a_revoked_key_are_refused(rig: Rig) -> None:
    rig.router.paused = True
    batch = await rig.submit(*(completion(f"l{i}") for i in range(40)))
    assert rig.app is not None
    await rig.until(lambda: rig.app is not None and len(rig.app.back.parts.table) == BATCH_LINES)

    digest = hashlib.sha256(b"acme").digest()
    revoked = dataclasses.replace(KEY, revoked=True)
    await AdmissionStore(rig.redis).replace_keys({digest: revoked})
    rig.app.back.parts.keyring._cache.clear()
    rig.router.paused = False
    database = batch_database(Path(rig.config.store_dir))
    batches = BatchStore(database, Limits())
    async with asyncio.timeout(WAIT_S):
        while (done := await batches.get("acme", batch.id)) is None or done.status != "completed":
            await asyncio.sleep(0.02)

    assert (done.request_counts.completed, done.request_counts.failed) == (BATCH_LINES, 40 - BATCH_LINES)
    assert done.error_file_id is not None
    path = Path(rig.config.store_dir) / "files" / f"{done.error_file_id}.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    assert first["response"]["status_code"] == 401
    await database.close()


async def test_only_the_gateway_with_the_lease_runs_a_batch(rig: Rig) -> None:
    first = Lease(rig.redis, "mr:{batch_x}:batch_runner", LEASE_S)
    second = Lease(rig.redis, "mr:{batch_x}:batch_runner", LEASE_S)

    assert await first.take()
    assert not await second.take()
    assert await first.keep()
    await first.release()
    assert await second.take()
    assert not await first.keep()


async def test_what_a_batch_may_not_be_is_refused_by_name(rig: Rig) -> None:
    file = await rig.acme.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    make = rig.acme.batches.create
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await make(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        await make(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await rig.acme.files.create(file=("in.jsonl", b"{}\n"), purpose="vision")
    with pytest.raises(openai.BadRequestError, match="empty"):
        await rig.acme.files.create(file=("in.jsonl", b""), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="Line 1 is longer") as caught:
        await rig.acme.files.create(file=("in.jsonl", b"x" * (1024 * 1024 + 1)), purpose="batch")
    assert caught.value.status_code == 413
    with pytest.raises(openai.APIStatusError, match="more than 50000 lines"):
        await rig.acme.files.create(file=("in.jsonl", b"\n" * 50_001), purpose="batch")
