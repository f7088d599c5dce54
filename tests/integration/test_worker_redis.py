"""The worker against a real Redis: its lease, and the end of a request whose gateway is gone."""

from __future__ import annotations

import pytest
import redis.asyncio as aioredis
from millrace.common.v1 import common_pb2

from services.common.admission_store import AdmissionStore, usage_stream
from services.common.admission_types import Ownership, Pool, PoolCaps, Queued, RequestPhase
from services.common.clock import SystemClock
from services.worker.terminals import TerminalWriter, gateway_lost_terminal
from tests.helpers.redis import RedisProcess, usage_events
from tests.helpers.waiting import until
from tests.helpers.worker import echo_config, entry, running_worker

POOL = Pool("echo")


class ShiftedClock(SystemClock):
    """The machine's clock, which a test may move ahead."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


async def test_the_worker_is_listed_while_it_runs_and_gone_after_its_drain(redis_client: aioredis.Redis) -> None:
    store = AdmissionStore(redis_client)
    async with running_worker(store=store) as rig:
        await rig.app.parts.store.list_workers()
        record = rig.app.record()

        await store.register_worker(record)
        listed = await store.list_workers()
        await rig.app.drain(1.0)

        assert listed == [record]
        assert await store.list_pools() == [POOL]
        assert await store.list_workers() == []


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_lost_gateways_request_ends_once_with_its_acknowledged_tokens(
    redis_client: aioredis.Redis, redis_server: RedisProcess, stopped: bool
) -> None:
    store, clock = AdmissionStore(redis_client), ShiftedClock()
    work = entry("r1", max_tokens=400)
    async with running_worker(config=echo_config(step_ms=5), clock=clock, store=store) as rig:
        gateway = await rig.gateway()
        await until(lambda: rig.app.parts.table.is_attached("gateway-1"))
        assert isinstance(await store.enqueue(POOL, work, PoolCaps()), Queued)
        claimed = (await store.claim(POOL, "router-1", 1))[0]
        epoch = claimed.claim_number << 8
        assert (await gateway.submit(claimed.entry, epoch=epoch)).accepted
        await store.own(POOL, [Ownership("r1", epoch, rig.app.instance)])
        await gateway.until(lambda: len(gateway.of("r1").tokens.get(0, [])) >= 4)
        stream = rig.app.parts.table.get("r1")
        assert stream is not None
        await until(lambda: stream.delivered_counts()[0] >= 4)
        if stopped:
            # Its client left; the gateway dies before that is on its disk.
            gateway.acking = False
            gateway.cancel("r1", epoch, keep=True)
            await gateway.until(lambda: 0 in gateway.of("r1").finishes)

        await gateway.hang_up()
        await until(lambda: not rig.app.parts.table.is_attached("gateway-1"))
        acked = stream.delivered_counts()[0]
        clock.ahead = 5.1
        await until(lambda: rig.app.parts.table.get("r1") is None and len(rig.app.parts.terminals) == 0)

        (record,) = await store.read_requests(POOL, ["r1"])
        assert record is not None
        assert record.phase is RequestPhase.FINISHED
        assert record.terminal_state == common_pb2.TERMINAL_STATE_FAILED
        [event] = await usage_events(redis_client, POOL)
        assert (event.error_reason, event.billed.completion_token_count) == ("GATEWAY_LOST", acked)

        late = TerminalWriter(store, clock)
        late.add(POOL, gateway_lost_terminal(stream, worker_instance="worker-2", now_wall=clock.wall()))
        assert await late.flush()
        assert len(await redis_client.xrange(usage_stream(POOL))) == 1
        await gateway.close()
