"""The worker over real gRPC with the echo model: a client plays the gateway and the router."""

from __future__ import annotations

import asyncio

import pytest
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb

from services.worker.engine.fake_model_runner import FakeScript
from tests.helpers.worker import Gate, WorkerRig, echo_config, echo_tokens, entry, running_worker


async def attached(rig: WorkerRig, instance: str = "gateway-1") -> None:
    await rig.until(lambda: rig.app.parts.table.is_attached(instance))


async def test_a_stream_is_exactly_the_echo_sequence() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await attached(rig)

        response = await gateway.submit(entry("r1", max_tokens=50))
        await gateway.finished("r1")

        held = gateway.of("r1")
        assert response.accepted
        assert response.worker_instance == rig.app.instance
        assert held.tokens[0] == echo_tokens("r1", 0, 50)
        assert held.finishes[0].reason == common_pb2.FINISH_REASON_LENGTH
        assert held.finishes[0].usage.completion_token_count == 50
        assert held.finishes[0].usage.prompt_token_count == 3
        assert held.accepted == 1
        assert held.started is not None
        assert held.problems == []
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()
    rig.assert_engine_empty()


async def test_frames_are_numbered_and_name_the_worker() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await attached(rig)

        await gateway.submit(entry("r1", max_tokens=20))
        await gateway.finished("r1")

        assert [frame.sequence for frame in gateway.frames] == list(range(1, len(gateway.frames) + 1))
        assert {frame.worker_instance for frame in gateway.frames} == {rig.app.instance}
        await gateway.close()


async def test_three_choices_arrive_apart_and_whole() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await attached(rig)

        await gateway.submit(entry("r1", max_tokens=30, choices=3))
        await gateway.finished("r1")

        for choice in range(3):
            assert gateway.of("r1").tokens[choice] == echo_tokens("r1", choice, 30)
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()
    rig.assert_engine_empty()


async def test_logprobs_travel_with_their_tokens() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await attached(rig)

        await gateway.submit(entry("r1", max_tokens=12, logprob_count=0))
        await gateway.finished("r1")

        held = gateway.of("r1")
        assert [value.token.token_id for value in held.logprobs[0]] == echo_tokens("r1", 0, 12)
        await gateway.close()


async def test_a_request_without_logprobs_gets_none() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await attached(rig)

        await gateway.submit(entry("r1", max_tokens=5))
        await gateway.finished("r1")

        assert gateway.of("r1").logprobs[0] == []
        await gateway.close()


@pytest.mark.parametrize("count", [1, 40])
async def test_prompt_logprobs_come_once_with_a_place_for_every_prompt_token(count: int) -> None:
    prompt = list(range(100, 100 + count))
    config = echo_config(max_prefill_chunk=16)
    async with running_worker(config=config) as rig:
        gateway = await rig.gateway()
        await attached(rig)

        await gateway.submit(entry("r1", prompt=prompt, max_tokens=3, prompt_logprob_count=0))
        await gateway.finished("r1")

        message = gateway.of("r1").prompt_logprobs
        assert message is not None
        assert not message.positions[0].HasField("token")
        assert [p.token.token_id for p in message.positions[1:]] == prompt[1:]
        await gateway.close()


async def test_a_broken_stream_continues_without_gap_or_repeat() -> None:
    async with running_worker(config=echo_config(step_ms=5)) as rig:
        gateway = await rig.gateway()
        await attached(rig)
        await gateway.submit(entry("r1", max_tokens=200))
        await gateway.until(lambda: len(gateway.of("r1").tokens.get(0, [])) >= 5)

        await gateway.hang_up()
        await rig.until(lambda: not rig.app.parts.table.is_attached("gateway-1"))
        await gateway.attach(continued=["r1"])
        await gateway.finished("r1")

        held = gateway.of("r1")
        assert held.tokens[0] == echo_tokens("r1", 0, 200)
        assert held.problems == []
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()
    rig.assert_engine_empty()


async def test_a_gateway_that_lost_the_first_frames_gets_them_again() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await attached(rig)
        gateway.acking = False
        await gateway.submit(entry("r1", max_tokens=40))
        await gateway.finished("r1")
        await gateway.hang_up()
        del gateway.received["r1"]

        gateway.acking = True
        await gateway.attach()
        await gateway.finished("r1")

        held = gateway.of("r1")
        assert held.tokens[0] == echo_tokens("r1", 0, 40)
        assert held.accepted == 1
        assert held.problems == []
        await gateway.close()


async def test_a_continue_of_an_unknown_request_is_answered_as_lost() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await attached(rig)
        await gateway.hang_up()
        gateway.of("r9").accepted = 1
        gateway.of("r9").epoch = 256

        await gateway.attach(continued=["r9"])
        await gateway.finished("r9")

        failed = gateway.of("r9").failed
        assert failed is not None
        assert failed.reason == "WORKER_LOST"
        assert failed.retryable
        await gateway.close()


async def test_a_newer_stream_of_the_same_gateway_replaces_the_older() -> None:
    async with running_worker() as rig:
        first = await rig.gateway()
        await attached(rig)
        await first.submit(entry("r1", max_tokens=300))
        await first.until(lambda: len(first.of("r1").tokens.get(0, [])) >= 5)

        second = await rig.gateway()
        second.received = first.received
        await first.until(lambda: first.ended is not None)
        await second.finished("r1")

        assert second.of("r1").tokens[0] == echo_tokens("r1", 0, 300)
        await second.close()
        await first.close()


async def test_cancel_stops_the_engine_within_one_step() -> None:
    gate = Gate()
    async with running_worker(script=FakeScript(before_step=gate)) as rig:
        gateway = await rig.gateway()
        await attached(rig)
        gate.open.clear()
        await gateway.submit(entry("r1", max_tokens=400))
        await asyncio.to_thread(gate.held.wait, 10)
        steps_at_cancel = gate.steps

        gateway.cancel("r1")
        await rig.until(lambda: rig.app.parts.table.get("r1").abandoned)  # type: ignore[union-attr]
        gate.open.set()
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.finished("r1")

        assert gate.steps <= steps_at_cancel + 1
        assert gateway.of("r1").finishes[0].reason == common_pb2.FINISH_REASON_CANCELLED
        await gateway.close()
    rig.assert_engine_empty()


async def test_cancelling_one_choice_leaves_the_others_running() -> None:
    gate = Gate()
    async with running_worker(script=FakeScript(before_step=gate)) as rig:
        gateway = await rig.gateway()
        await attached(rig)
        gate.open.clear()
        await gateway.submit(entry("r1", max_tokens=60, choices=2))
        await asyncio.to_thread(gate.held.wait, 10)

        gateway.cancel("r1", choice=1)
        # Once the server has read the cancel it lies in the inbox of the held engine.
        await rig.until(lambda: any(getattr(c, "choice", None) == 1 for c in rig.app.parts.engine._inbox))
        gate.open.set()
        await gateway.finished("r1")

        held = gateway.of("r1")
        assert held.tokens[0] == echo_tokens("r1", 0, 60)
        assert held.finishes[0].reason == common_pb2.FINISH_REASON_LENGTH
        assert held.finishes[1].reason == common_pb2.FINISH_REASON_CANCELLED
        await gateway.close()


async def test_a_cancel_that_overtakes_its_submit_wins() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await attached(rig)

        gateway.cancel("r1", epoch=300)
        await rig.until(lambda: rig.app.parts.table._fences.get("r1") == 300)
        late = await gateway.submit(entry("r1"), epoch=300)
        newer = await gateway.submit(entry("r1"), epoch=301)

        assert late.refusal == pb.SUBMIT_REFUSAL_STALE_EPOCH
        assert newer.accepted
        await gateway.finished("r1")
        await gateway.close()


async def test_a_newer_epoch_supersedes_the_running_one() -> None:
    gate = Gate()
    async with running_worker(script=FakeScript(before_step=gate)) as rig:
        gateway = await rig.gateway()
        await attached(rig)
        gate.open.clear()
        await gateway.submit(entry("r1", max_tokens=30), epoch=256)
        await asyncio.to_thread(gate.held.wait, 10)

        newer = await gateway.submit(entry("r1", max_tokens=30), epoch=512)
        older = await gateway.submit(entry("r1", max_tokens=30), epoch=511)
        gate.open.set()
        await gateway.finished("r1")

        held = gateway.of("r1")
        assert newer.accepted
        assert older.refusal == pb.SUBMIT_REFUSAL_STALE_EPOCH
        assert held.epoch == 512
        assert held.tokens[0] == echo_tokens("r1", 0, 30)
        assert all(e.epoch == 512 for f in gateway.frames for e in f.events if e.HasField("delta"))
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()
    rig.assert_engine_empty()


async def test_the_same_submit_twice_is_accepted_once() -> None:
    gate = Gate()
    async with running_worker(script=FakeScript(before_step=gate)) as rig:
        gateway = await rig.gateway()
        await attached(rig)
        gate.open.clear()

        first = await gateway.submit(entry("r1", max_tokens=100))
        second = await gateway.submit(entry("r1", max_tokens=100))
        gate.open.set()
        await gateway.finished("r1")

        assert first.accepted
        assert second.accepted
        assert gateway.of("r1").tokens[0] == echo_tokens("r1", 0, 100)
        await gateway.close()


async def test_a_resume_goes_on_after_the_received_tokens() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await attached(rig)
        work = entry("r1", max_tokens=20, choices=2)
        work.prefix.add(choice=1, token_ids=echo_tokens("r1", 1, 13))
        gateway.of("r1").tokens[1] = echo_tokens("r1", 1, 13)

        await gateway.submit(work)
        await gateway.until(lambda: 1 in gateway.of("r1").finishes)

        held = gateway.of("r1")
        assert held.tokens[1] == echo_tokens("r1", 1, 20)
        assert 0 not in held.tokens
        assert held.finishes[1].usage.completion_token_count == 20
        await gateway.close()


async def test_a_request_of_another_gateway_cannot_be_cancelled_or_acknowledged() -> None:
    async with running_worker() as rig:
        owner = await rig.gateway("gateway-1")
        stranger = await rig.gateway("gateway-2")
        await attached(rig, "gateway-1")
        await attached(rig, "gateway-2")
        await owner.submit(entry("r1", max_tokens=100))

        stranger.cancel("r1", epoch=2**40)
        stranger.of("r1").epoch = 256
        stranger.ack("r1", done=True)
        await owner.finished("r1")

        assert owner.of("r1").tokens[0] == echo_tokens("r1", 0, 100)
        await owner.close()
        await stranger.close()


@pytest.mark.parametrize("count", [200])
async def test_many_requests_at_once_leave_nothing_behind(count: int) -> None:
    config = echo_config(max_num_seqs=64, num_blocks=1024)
    async with running_worker(config=config) as rig:
        gateways = [await rig.gateway(f"gateway-{n}") for n in range(4)]
        for gateway in gateways:
            await attached(rig, gateway.instance)

        async def one(number: int) -> None:
            gateway, request_id = gateways[number % 4], f"r{number}"
            work = entry(request_id, gateway=gateway.instance, max_tokens=10 + number % 40, choices=1 + number % 2)
            while not (response := await gateway.submit(work)).accepted:
                assert response.refusal == pb.SUBMIT_REFUSAL_NO_ROOM
                await asyncio.sleep(0.01)
            if number % 7:
                await gateway.finished(request_id)
            else:
                gateway.cancel(request_id)
                # A cancel that finds the end unsent takes the end with the request.
                await rig.until(lambda: gateway.is_finished(request_id) or rig.app.parts.table.get(request_id) is None)

        await asyncio.gather(*(one(number) for number in range(count)))

        for number in (n for n in range(count) if n % 7):
            held = gateways[number % 4].of(f"r{number}")
            assert held.tokens[0] == echo_tokens(f"r{number}", 0, 10 + number % 40)
            assert held.problems == []
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        for gateway in gateways:
            await gateway.close()
    rig.assert_engine_empty()
