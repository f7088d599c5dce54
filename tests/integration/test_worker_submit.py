"""What a worker takes and refuses, and what it tells routers and gateways about itself."""

from __future__ import annotations

import asyncio
import hashlib

import grpc
import pytest
from google.protobuf import duration_pb2
from millrace.common.v1 import admission_pb2, common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb

from services.common.errors import InvalidRequest, NotFound
from services.common.grpc_client import error_from_rpc
from services.worker.config import WorkerRole
from services.worker.engine.fake_model_runner import FakeModelRunner, FakeScript
from services.worker.engine.outputs import SchedulerOutput
from services.worker.engine.request import EngineRequest
from services.worker.model_source import LoadedModel, load_model
from services.worker.requests import RequestStream
from services.worker.service import ServedModel
from services.worker.wiring import build
from tests.helpers.waiting import WAIT_S
from tests.helpers.worker import (
    Gate,
    GatewayClient,
    RememberingStore,
    WorkerRig,
    echo_config,
    entry,
    running_worker,
    submit_request,
)


async def ready_gateway(rig: WorkerRig) -> GatewayClient:
    gateway = await rig.gateway()
    await rig.until(lambda: rig.app.parts.table.is_attached("gateway-1"))
    return gateway


def changed(**fields: object) -> admission_pb2.AdmissionEntry:
    work = entry("r1")
    work.MergeFrom(admission_pb2.AdmissionEntry(**fields))  # type: ignore[arg-type]
    return work


@pytest.mark.parametrize(
    ("work", "options", "refusal"),
    [
        (entry("r1", gateway="gateway-9"), {}, pb.SUBMIT_REFUSAL_GATEWAY_NOT_ATTACHED),
        (changed(model=common_pb2.ModelRef(version="2")), {}, pb.SUBMIT_REFUSAL_WRONG_VERSION),
        (changed(model=common_pb2.ModelRef(model="other")), {}, pb.SUBMIT_REFUSAL_WRONG_VERSION),
        (changed(tokenizer_digest=b"x" * 32), {}, pb.SUBMIT_REFUSAL_WRONG_VERSION),
        (changed(adapter="lora"), {}, pb.SUBMIT_REFUSAL_UNKNOWN_ADAPTER),
        (entry("r1"), {"remaining_s": 0.0}, pb.SUBMIT_REFUSAL_EXPIRED),
        (entry("r1", max_tokens=510), {}, pb.SUBMIT_REFUSAL_NEVER_FITS),
        (entry("r1", prompt=[]), {}, pb.SUBMIT_REFUSAL_INVALID),
        (entry("r1", prompt=[32_000]), {}, pb.SUBMIT_REFUSAL_INVALID),
        (entry("r1", choices=9), {}, pb.SUBMIT_REFUSAL_INVALID),
        (entry("r1", temperature=float("nan")), {}, pb.SUBMIT_REFUSAL_INVALID),
        (entry(""), {}, pb.SUBMIT_REFUSAL_INVALID),
        (entry("r1"), {"epoch": 0}, pb.SUBMIT_REFUSAL_INVALID),
    ],
)
async def test_each_refusal_has_its_type_and_leaves_nothing(
    work: admission_pb2.AdmissionEntry, options: dict[str, float], refusal: int
) -> None:
    async with running_worker() as rig:
        gateway = await ready_gateway(rig)

        response = await gateway.submit(work, **options)

        assert not response.accepted
        assert response.refusal == refusal
        assert response.detail
        assert len(rig.app.parts.table) == 0
        await gateway.close()
    rig.assert_engine_empty()


async def test_what_fails_at_one_of_many_says_nothing_about_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_worker() as rig:
        gateway = await ready_gateway(rig)
        submit = rig.app.parts.hub.submit

        def submit_unless_r2(stream: RequestStream, request: EngineRequest) -> None:
            if request.request_id == "r2":
                raise RuntimeError("something that nobody thought of")
            submit(stream, request)

        monkeypatch.setattr(rig.app.parts.hub, "submit", submit_unless_r2)
        together = [submit_request(work) for work in (entry("r1"), entry("r2"), entry("r3", max_tokens=510))]
        call = gateway.stub.SubmitStream(timeout=WAIT_S)
        answers: list[pb.SubmitResponse] = []
        for requests in (together, [submit_request(entry("r4"))]):
            await call.write(pb.SubmitStreamRequest(requests=requests))
            answers += (await call.read()).responses
        await call.done_writing()
        await gateway.finished("r1", "r4")

        assert [(each.request_id, each.epoch, each.accepted, each.refusal) for each in answers] == [
            ("r1", 256, True, pb.SUBMIT_REFUSAL_UNSPECIFIED),
            ("r2", 256, False, pb.SUBMIT_REFUSAL_INTERNAL),
            ("r3", 256, False, pb.SUBMIT_REFUSAL_NEVER_FITS),
            ("r4", 256, True, pb.SUBMIT_REFUSAL_UNSPECIFIED),
        ]
        assert {each.worker_instance for each in answers} == {rig.app.instance}
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()
    rig.assert_engine_empty()


async def test_an_answer_shows_the_room_that_is_left_to_a_router_that_reads_it_there() -> None:
    gate = Gate()
    async with running_worker(config=echo_config(max_num_seqs=64), script=FakeScript(before_step=gate)) as rig:
        gateway = await ready_gateway(rig)
        watch = gateway.stub.Watch(pb.WatchRequest(router_instance="router-1"), timeout=WAIT_S)
        before = await watch.read()
        call = gateway.stub.SubmitStream(timeout=WAIT_S)
        gate.open.clear()
        patience = duration_pb2.Duration(nanos=900_000_000)

        # The engine stands in the step of the first: it has not taken the others.
        await call.write(pb.SubmitStreamRequest(requests=[submit_request(entry("r1"))]))
        silent = await call.read()
        await rig.until(gate.held.is_set)
        requests = [submit_request(entry("r2", prompt=[1] * 40)), submit_request(entry("r3"))]
        await call.write(pb.SubmitStreamRequest(requests=requests, view_patience=patience))
        answer = await call.read()

        assert not silent.HasField("view")
        assert [each.watch_sequence < answer.view.sequence for each in answer.responses] == [True, True]
        assert (before.free_slot_count, answer.view.free_slot_count, answer.view.in_flight_count) == (64, 61, 3)
        assert answer.view.backlog_token_count >= 40 + len(entry("r3").token_ids)
        gate.open.set()
        await call.done_writing()
        await gateway.finished("r1", "r2", "r3")
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        watch.cancel()
        await gateway.close()
    rig.assert_engine_empty()


@pytest.mark.parametrize("role", [WorkerRole.PREFILL, WorkerRole.DECODE])
async def test_a_prefill_worker_says_so_and_takes_no_requests_of_routers(role: WorkerRole) -> None:
    async with running_worker(config=echo_config(role=role)) as rig:
        gateway = await ready_gateway(rig)
        call = gateway.stub.Watch(pb.WatchRequest(router_instance="router-1"))

        seen = await call.read()
        response = await gateway.submit(entry("r1"))

        is_prefill = role is WorkerRole.PREFILL
        assert seen.role == (common_pb2.WORKER_ROLE_PREFILL if is_prefill else common_pb2.WORKER_ROLE_DECODE)
        assert (seen.kv_token_byte_count, seen.HasField("transfer_rate_byte_count")) == (8, False)
        assert rig.app.record().role == role.value
        assert response.accepted is not is_prefill
        assert response.refusal == (pb.SUBMIT_REFUSAL_WRONG_ROLE if is_prefill else pb.SUBMIT_REFUSAL_UNSPECIFIED)
        call.cancel()
        await gateway.close()


async def test_the_longest_request_that_fits_is_taken_and_one_token_more_is_not() -> None:
    async with running_worker(config=echo_config(max_model_len=64)) as rig:
        gateway = await ready_gateway(rig)

        fits = await gateway.submit(entry("r1", prompt=[1] * 34, max_tokens=30))
        over = await gateway.submit(entry("r2", prompt=[1] * 34, max_tokens=31))
        await gateway.finished("r1")

        assert fits.accepted
        assert over.refusal == pb.SUBMIT_REFUSAL_NEVER_FITS
        assert gateway.of("r1").finishes[0].usage.completion_token_count == 30
        await gateway.close()


async def test_a_full_batch_has_no_room_until_a_choice_ends() -> None:
    gate = Gate()
    config = echo_config(max_num_seqs=2)
    async with running_worker(config=config, script=FakeScript(before_step=gate)) as rig:
        gateway = await ready_gateway(rig)
        gate.open.clear()
        await gateway.submit(entry("r1", max_tokens=300))
        await gateway.submit(entry("r2", max_tokens=10))

        full = await gateway.submit(entry("r3", max_tokens=5))
        gate.open.set()
        await gateway.finished("r2")
        after = await gateway.submit(entry("r3", max_tokens=5))

        assert full.refusal == pb.SUBMIT_REFUSAL_NO_ROOM
        assert after.accepted
        await gateway.close()


async def test_a_prompt_that_finds_too_few_free_blocks_has_no_room() -> None:
    gate = Gate()
    config = echo_config(max_model_len=256, num_blocks=16)
    async with running_worker(config=config, script=FakeScript(before_step=gate)) as rig:
        gateway = await ready_gateway(rig)
        gate.open.clear()
        await gateway.submit(entry("r1", prompt=list(range(150)), max_tokens=60))

        refused = await gateway.submit(entry("r2", prompt=list(range(500, 650)), max_tokens=5))

        assert refused.refusal == pb.SUBMIT_REFUSAL_NO_ROOM
        gate.open.set()
        await gateway.close()


async def test_a_deadline_ends_the_work_as_expired() -> None:
    async with running_worker(config=echo_config(step_ms=20)) as rig:
        gateway = await ready_gateway(rig)

        await gateway.submit(entry("r1", max_tokens=400), remaining_s=0.2)
        await gateway.finished("r1")

        assert gateway.of("r1").finishes[0].reason == common_pb2.FINISH_REASON_EXPIRED
        await gateway.close()


async def test_the_card_says_what_is_served() -> None:
    async with running_worker() as rig:
        gateway = await ready_gateway(rig)

        response = await gateway.stub.GetModelCard(pb.GetModelCardRequest(), timeout=WAIT_S)

        card = response.card
        assert (card.model.model, card.model.version, card.runner) == ("echo", "1", "fake")
        assert (card.vocab_size, card.max_model_len, card.block_count) == (32_000, 512, 512)
        assert card.deterministic
        assert len(card.model.manifest_digest) == 32
        assert response.worker_instance == rig.app.instance
        await gateway.close()


async def test_a_tokenizer_larger_than_a_chunk_comes_whole_and_another_digest_is_not_found() -> None:
    config = echo_config()
    data = bytes(range(256)) * 10_000
    model = load_model(config)
    card = model.served.card
    card.tokenizer_digest = hashlib.sha256(data).digest()
    model = LoadedModel(FakeModelRunner(model.runner.spec), ServedModel(card, data), "")
    app = build(config, store=RememberingStore(), model=model)  # type: ignore[arg-type]
    await app.start()
    gateway = GatewayClient(app.address)

    chunks = [
        message.chunk
        async for message in gateway.stub.GetTokenizer(pb.GetTokenizerRequest(tokenizer_digest=card.tokenizer_digest))
    ]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        _ = [m async for m in gateway.stub.GetTokenizer(pb.GetTokenizerRequest(tokenizer_digest=b"other"))]

    assert b"".join(chunks) == data
    assert max(map(len, chunks)) == 1 << 20
    assert isinstance(error_from_rpc(refused.value), NotFound)
    await gateway.close()
    await app.stop()


async def test_attach_without_hello_is_an_invalid_request() -> None:
    async with running_worker() as rig:
        gateway = GatewayClient(rig.app.address)
        call = gateway.stub.Attach(iter([pb.AttachRequest(ack=pb.Ack())]))

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()

        assert isinstance(error_from_rpc(refused.value), InvalidRequest)
        await gateway.close()


async def test_watch_tells_room_at_once_and_again_when_it_changes() -> None:
    async with running_worker(config=echo_config(step_ms=5, max_num_seqs=4)) as rig:
        gateway = await ready_gateway(rig)
        await rig.until(lambda: rig.app.parts.engine.progress_age() is None)
        call = gateway.stub.Watch(pb.WatchRequest(router_instance="router-1"))
        first = await call.read()

        taken = await gateway.submit(entry("r1", max_tokens=500, choices=3))
        before, busy = first, await call.read()
        while busy.free_slot_count == 4:
            before, busy = busy, await call.read()
        gateway.cancel("r1")
        idle = await call.read()
        while idle.free_slot_count < 4:
            idle = await call.read()

        assert (first.free_slot_count, first.ready, first.draining) == (4, True, False)
        assert list(first.attached_gateways) == ["gateway-1"]
        assert not first.HasField("progress_age")
        assert (busy.free_slot_count, busy.in_flight_count) == (1, 1)
        assert idle.sequence > busy.sequence > taken.watch_sequence >= before.sequence >= first.sequence
        call.cancel()
        await gateway.close()


async def test_watch_speaks_each_second_even_when_nothing_changes() -> None:
    async with running_worker() as rig:
        gateway = await ready_gateway(rig)
        call = gateway.stub.Watch(pb.WatchRequest(router_instance="router-1"))

        async with asyncio.timeout(WAIT_S):
            sequences = [(await call.read()).sequence for _ in range(3)]

        assert sequences == sorted(set(sequences))
        call.cancel()
        await gateway.close()


async def test_the_worker_registers_its_address_and_outlives_an_absent_redis() -> None:
    async with running_worker() as rig:
        gateway = await ready_gateway(rig)
        await rig.until(lambda: rig.app.instance in rig.store.workers)

        rig.store.away = True
        response = await gateway.submit(entry("r1", max_tokens=20))
        await gateway.finished("r1")

        record = rig.store.workers[rig.app.instance]
        assert record.address == rig.app.address
        assert (record.model, record.version, record.role, record.pool.tag) == (
            "echo",
            "1",
            "aggregated",
            "echo/default/0",
        )
        assert response.accepted
        await gateway.close()


async def test_a_second_suspect_of_poison_finds_no_room_while_others_do() -> None:
    gate = Gate()
    async with running_worker(script=FakeScript(before_step=gate)) as rig:
        gateway = await ready_gateway(rig)
        gate.open.clear()
        first, second = entry("s1"), entry("s2")
        for work in (first, second):
            work.lost_workers.extend(("worker-a", "worker-b"))

        assert (await gateway.submit(first)).accepted
        refused = await gateway.submit(second)
        assert (await gateway.submit(entry("r1"))).accepted
        snapshot = await gateway.stub.Watch(pb.WatchRequest(router_instance="x")).read()
        gate.open.set()
        await gateway.finished("s1", "r1")

        assert refused.refusal == pb.SUBMIT_REFUSAL_NO_ROOM
        assert snapshot.suspect_count == 1
        assert (await gateway.submit(second, epoch=512)).accepted
        await gateway.finished("s2")
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()


async def test_the_caps_that_a_tenants_newest_request_carries_hold_from_then_on() -> None:
    gate, together = Gate(), set[frozenset[str]]()

    def before_step(decision: SchedulerOutput) -> None:
        gate(decision)
        together.add(frozenset(row.key.request_id for row in decision.scheduled))

    async with running_worker(script=FakeScript(before_step=before_step)) as rig:
        gateway = await ready_gateway(rig)

        async def run(*works: admission_pb2.AdmissionEntry) -> set[str]:
            """Submit before any of them can step; returns the largest company of a step."""
            gate.open.clear()
            together.clear()
            for work in works:
                assert (await gateway.submit(work)).accepted
            gate.open.set()
            await gateway.finished(*(work.request_id for work in works))
            return set(max(together, key=len))

        capped = [entry("r1"), entry("r2")]
        for work in capped:
            work.tenant_slot_cap = 1
        other = entry("r3")
        other.tenant = "tenant-2"
        large = entry("r4", prompt=[1] * 40)
        large.tenant_block_cap = 2

        assert await run(*capped, other) in ({"r1", "r3"}, {"r2", "r3"})
        assert (await gateway.submit(large)).refusal == pb.SUBMIT_REFUSAL_NEVER_FITS
        assert await run(entry("r5"), entry("r6")) == {"r5", "r6"}
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()
