"""The order at the end of a request, and what each break in it leaves (PROTOCOL §6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_types import FinishResult, Pool, Terminal
from services.common.errors import StoreUnavailable
from services.gateway.outbox import Outbox, OutboxRecord
from services.gateway.publisher import COMMIT_POLL_S, UsagePublisher
from tests.helpers.fake_clock import FakeClock, settle
from tests.helpers.waiting import WAIT_S

POOL = Pool("echo")
COMPLETED = common_pb2.TERMINAL_STATE_COMPLETED


class FakeStore:
    """Remembers the order of calls; breaks at the step a test names."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.winners: dict[str, FinishResult] = {}
        self.break_at: str | None = None
        self.run_id = "run-1/master"
        self.published: list[str] = []

    def _step(self, name: str) -> None:
        if self.break_at == name:
            raise StoreUnavailable("away")
        self.calls.append(name)

    async def finish(self, pool: Pool, terminals: Sequence[Terminal]) -> list[FinishResult]:
        self._step("finish")
        results = []
        for terminal in terminals:
            won = terminal.request_id not in self.winners
            if won:
                self.published.append(terminal.request_id)
                billed = terminal.event.billed.completion_token_count
                self.winners[terminal.request_id] = FinishResult(
                    False, terminal.state, terminal.tenant, terminal.computed_tokens, billed
                )
            winner = self.winners[terminal.request_id]
            results.append(FinishResult(won, winner.state, winner.tenant, winner.computed_tokens, winner.billed_tokens))
        return results

    async def settle(self, tenant: str, request_id: str, computed_tokens: int, billed_tokens: int) -> None:
        self._step("settle")
        self.calls.append(f"{tenant}:{request_id}:{computed_tokens}:{billed_tokens}")

    async def clear_unsettled(self, pool: Pool, request_ids: Sequence[str]) -> None:
        self._step("clear")

    async def uptime(self) -> tuple[int, str]:
        return 1_000, self.run_id


class FakeLedger:
    def __init__(self) -> None:
        self.rows: set[str] = set()

    async def committed(self, pool: Pool, request_ids: Sequence[str]) -> list[str]:
        return [request_id for request_id in request_ids if request_id in self.rows]


class Rig:
    def __init__(self, folder: Path, instance: str = "gateway-1") -> None:
        self.clock = FakeClock()
        self.store = FakeStore()
        self.ledger = FakeLedger()
        self.outbox = Outbox(folder, instance, max_bytes=1 << 20, clock=self.clock)
        self.outbox.open()
        store: object = self.store
        self.publisher = UsagePublisher(store, self.outbox, self.ledger, self.clock)  # type: ignore[arg-type]

    async def add(self, request_id: str) -> None:
        event = usage_event_pb2.UsageEvent(request_id=request_id, tenant="acme", terminal_state=COMPLETED)
        event.pool.model, event.pool.pool = POOL.model, POOL.pool
        event.billed.completion_token_count = 7
        self.clock.jump(1.0)
        await self.publisher.add(POOL, OutboxRecord(12, event))
        await settle()

    async def advance_until(self, condition: Callable[[], bool]) -> None:
        """Move time until `condition`; the outbox writes in a thread that no fake clock waits for."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self.clock.advance(COMMIT_POLL_S)
                await asyncio.sleep(0.005)

    def held(self) -> list[str]:
        return [record.request_id for record in self.outbox.records]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    rig.publisher.start()
    yield rig
    await rig.publisher.close()
    await rig.clock.advance(1.0)
    await rig.outbox.close()


async def test_the_end_comes_in_its_order(rig: Rig) -> None:
    await rig.add("r1")

    assert rig.store.calls == ["finish", "settle", "acme:r1:12:7", "clear"]
    assert rig.held() == ["r1"], "until the ledger has it"


async def test_the_record_is_dropped_once_the_ledger_has_it(rig: Rig) -> None:
    await rig.add("r1")
    rig.ledger.rows.add("r1")

    await rig.advance_until(lambda: rig.held() == [])

    assert rig.publisher.unpublished_count == 0


@pytest.mark.parametrize("step", ["finish", "settle", "clear"])
async def test_a_break_at_any_step_is_tried_again_until_it_is_through(rig: Rig, step: str) -> None:
    rig.store.break_at = step
    await rig.add("r1")
    assert rig.publisher.unpublished_count == 1

    rig.store.break_at = None
    await rig.clock.advance(1.0)

    assert rig.publisher.unpublished_count == 0
    assert rig.store.published == ["r1"], "one event, however often it was tried"
    assert rig.store.calls[-1] == "clear"


async def test_the_loser_of_the_terminal_settles_with_the_winners_counts_and_drops_its_event(rig: Rig) -> None:
    rig.store.winners["r1"] = FinishResult(False, common_pb2.TERMINAL_STATE_FAILED, "acme", 3, 2)

    await rig.add("r1")
    await rig.advance_until(lambda: rig.held() == [])

    assert "acme:r1:3:2" in rig.store.calls
    assert rig.store.published == []
    assert rig.held() == []


async def test_everything_unconfirmed_is_published_again_when_redis_changed(rig: Rig) -> None:
    await rig.add("r1")
    await rig.add("r2")
    rig.ledger.rows.add("r2")
    await rig.advance_until(lambda: rig.held() == ["r1"])

    rig.store.winners.clear()
    rig.store.run_id = "run-2/master"
    await rig.advance_until(lambda: len(rig.store.published) > 2)

    assert rig.store.published == ["r1", "r2", "r1"]
    assert rig.held() == ["r1"]


async def test_a_restarted_gateway_publishes_what_its_outbox_holds(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.add("r1")
    await rig.outbox.close()
    heir = Rig(tmp_path, "gateway-2")

    heir.publisher.start()
    await settle()

    assert heir.store.published == ["r1"]
    await heir.publisher.close()
    await heir.outbox.close()


async def test_what_an_earlier_incarnation_published_is_kept_until_the_ledger_has_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.add("r1")
    await rig.outbox.close()
    heir = Rig(tmp_path, "gateway-2")
    heir.store.winners["r1"] = FinishResult(False, COMPLETED, "acme", 12, 7)

    heir.publisher.start()
    await settle()

    assert heir.held() == ["r1"]
    heir.ledger.rows.add("r1")
    await heir.clock.advance(2 * COMMIT_POLL_S)
    assert heir.held() == []
    await heir.publisher.close()
    await heir.outbox.close()
