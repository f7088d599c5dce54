"""The prefilling side of disaggregation: computes prompts for peers and pushes their blocks while it goes on.

Owns one session per (request, epoch), bound to its Prefill call. A session ends with its call, with the asker's lease,
or when its blocks have landed, whichever comes first; then the engine lets go of everything. A worker that leaves also
serves who takes its requests over: their blocks are still in its cache. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import numpy as np
import structlog
from millrace.worker.v1 import worker_service_pb2 as pb

from services.common.clock import Clock
from services.common.errors import DeadlineExceeded, InvalidRequest
from services.common.lifecycle import crash_point, end_tasks
from services.common.telemetry import tracer
from services.worker import wire
from services.worker.config import WorkerRole
from services.worker.engine.engine_config import EngineError
from services.worker.engine.kv_blocks import KVBlock, KVLayout
from services.worker.engine.request import EngineRequest, FinishReason, KVRole, SamplingParams
from services.worker.engine_loop import EngineLoop, LoopReport
from services.worker.kv_metrics import PeerMetrics
from services.worker.kv_moves import ExportEnd, ExportRoom, Name
from services.worker.kv_transport import BlockSender, KVTransfer, TransferError, Write, layout_message
from services.worker.load_reporter import LoadBoard, WorkerIdentity
from services.worker.requests import Abort

# Blocks that are sent, and announced, together.
BATCH_BYTES = 4 << 20
# What an asker may ask for.
MIN_LEASE_S, MAX_LEASE_S = 0.05, 60.0
Requests = AsyncIterator[pb.PrefillRequest]


class _Refused(Exception):
    """A typed refusal on its way to the asker."""

    def __init__(self, refusal: pb.PrefillRefusal.ValueType, detail: str) -> None:
        super().__init__(detail)
        self.message = pb.PrefillResponse(refused=pb.PrefillRefused(refusal=refusal, detail=detail))


class _Session:
    """One prompt for one peer. Slots that may be written are at least as many as the blocks that wait for them."""

    def __init__(self, start: pb.PrefillStart, *, block_count: int) -> None:
        self.start = start
        self.name: Name = (start.request_id, start.epoch)
        self.block_count = block_count
        self.lease_s = wire.seconds_of(start.lease)
        self.lease: asyncio.Timeout | None = None
        self.slots: deque[int] = deque()
        self.blocks: deque[KVBlock] = deque()
        self.computed_count = 0
        self.is_told = False
        self.ended: _Refused | None = None
        self.wake = asyncio.Event()

    def end(self, refusal: pb.PrefillRefusal.ValueType, detail: str) -> None:
        """Nothing more will be computed for it; the first reason stands."""
        self.ended = self.ended or _Refused(refusal, detail)
        self.wake.set()

    def renew(self) -> None:
        """The asker lives: its lease starts anew."""
        if self.lease is not None and not self.lease.expired():
            self.lease.reschedule(asyncio.get_running_loop().time() + self.lease_s)

    def take(self, limit: int) -> list[tuple[int, KVBlock]]:
        """Up to `limit` blocks that wait, each with the slot it goes into."""
        return [(self.slots.popleft(), self.blocks.popleft()) for _ in range(min(limit, len(self.blocks)))]


class PrefillDesk:
    """Serves `Prefill`."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        layout: KVLayout,
        engine: EngineLoop,
        board: LoadBoard,
        transfers: Sequence[KVTransfer],
        metrics: PeerMetrics,
        clock: Clock,
    ) -> None:
        """`transfers` in the order of preference, gRPC last. `on_open` hears of each prompt before the engine does."""
        self._identity = identity
        self._layout = layout_message(layout, block_size=identity.block_size)
        self._batch = max(1, BATCH_BYTES // layout.block_bytes)
        self._engine = engine
        self._board = board
        self._transfers = transfers
        self._metrics = metrics
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        # Requests that this worker gave up and may still be asked for.
        self._offered: set[str] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.on_open: Callable[[pb.PrefillStart], None] = lambda start: None

    async def serve(self, requests: Requests, write: Write) -> None:
        """Run one Prefill call to its end. Raises InvalidRequest when it does not open well, DeadlineExceeded when the
        asker's lease runs out.
        """
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "start":
            raise InvalidRequest("The first message of Prefill must be its start.")
        try:
            session = self._open(first.start)
        except _Refused as refused:
            structlog.get_logger().info("prefill_refused", request_id=first.start.request_id, detail=str(refused))
            await write(refused.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAX_LEASE_S):
                    async for _ in requests:
                        pass
            return
        attributes = {"millrace.request_id": first.start.request_id, "millrace.tenant": first.start.tenant}
        with tracer().start_as_current_span("worker.peer_prefill", attributes=attributes, record_exception=False):
            await self._run(session, requests, write)

    def on_report(self, report: LoopReport) -> None:
        """Give each session what the engine did for it."""
        if not self._sessions:
            return
        for name, blocks in report.kv.exported:
            session = self._session(name)
            if session is not None:
                session.blocks.extend(blocks)
                session.computed_count += len(blocks)
                session.wake.set()
        for output in report.outputs:
            session = self._session((output.key.request_id, output.key.epoch))
            if session is not None and output.finish_reason not in (None, FinishReason.LENGTH, FinishReason.STOP):
                is_late = output.finish_reason is FinishReason.EXPIRED
                refusal = pb.PREFILL_REFUSAL_EXPIRED if is_late else pb.PREFILL_REFUSAL_FAILED
                session.end(refusal, "The prompt could not be computed.")
        for rejection in report.rejections:
            session = self._session((rejection.request_id, rejection.epoch))
            if session is not None:
                session.end(pb.PREFILL_REFUSAL_INVALID, rejection.detail)
        if report.failed:
            for session in self._sessions.values():
                session.end(pb.PREFILL_REFUSAL_FAILED, "The engine of this worker failed.")

    def offer(self, request_ids: Iterable[str]) -> None:
        """The worker leaves and gives these requests up: who takes one over may have its blocks, once."""
        self._offered.update(request_ids)
        self._note_empty()

    async def wait_ended(self, grace_s: float) -> bool:
        """Wait until no session is left and no offer is open, at most `grace_s`; False when some are."""
        await self._clock.wait(self._empty, grace_s)
        return self._empty.is_set()

    def fail_all(self) -> None:
        """End every session and offer: the worker is leaving."""
        self._offered.clear()
        self._note_empty()
        for session in self._sessions.values():
            session.end(pb.PREFILL_REFUSAL_DRAINING, "The worker is leaving.")

    def _session(self, name: Name) -> _Session | None:
        session = self._sessions.get(name[0])
        return session if session is not None and session.name == name else None

    # --- one session, step by step -------------------------------------------------------------------------------
    def _open(self, start: pb.PrefillStart) -> _Session:
        self._check(start)
        request = self._engine_request(start)
        block_size = self._identity.block_size
        session = _Session(start, block_count=len(request.prompt_token_ids) // block_size)
        older = self._sessions.get(start.request_id)
        if older is not None and older.start.epoch >= start.epoch:
            raise _Refused(pb.PREFILL_REFUSAL_STALE_EPOCH, "This epoch or a newer one is being computed.")
        if older is not None:
            self._close(older)
            older.end(pb.PREFILL_REFUSAL_STALE_EPOCH, "A newer attempt took over.")
        self._sessions[start.request_id] = session
        self._board.prefill_count = len(self._sessions)
        self._note_empty()
        self.on_open(start)
        self._engine.submit(request)
        self._grant(session, start.slots, first=start.held_block_count)
        self._board.touch()
        return session

    def _check(self, start: pb.PrefillStart) -> None:
        board, identity = self._board, self._identity
        is_offered = start.request_id in self._offered
        if identity.role is not WorkerRole.PREFILL and not is_offered:
            raise _Refused(pb.PREFILL_REFUSAL_WRONG_ROLE, "The worker is not of role prefill.")
        if board.draining and not is_offered:
            raise _Refused(pb.PREFILL_REFUSAL_DRAINING, "The worker is draining.")
        if start.model != identity.model:
            raise _Refused(pb.PREFILL_REFUSAL_WRONG_VERSION, "The worker serves another model, version or manifest.")
        if start.layout != self._layout:
            raise _Refused(pb.PREFILL_REFUSAL_WRONG_LAYOUT, f"The layouts differ: blocks here are {self._layout}.")
        if not is_offered and (not board.ready or board.free_slots() < 1):
            raise _Refused(pb.PREFILL_REFUSAL_NO_ROOM, "The batch is full.")
        if start.HasField("remaining") and wire.seconds_of(start.remaining) <= 0:
            raise _Refused(pb.PREFILL_REFUSAL_EXPIRED, "The deadline is over.")
        if not MIN_LEASE_S <= wire.seconds_of(start.lease) <= MAX_LEASE_S:
            raise _Refused(pb.PREFILL_REFUSAL_INVALID, "lease is outside its range.")

    def _engine_request(self, start: pb.PrefillStart) -> EngineRequest:
        deadline = None
        if start.HasField("remaining"):
            deadline = self._clock.monotonic() + wire.seconds_of(start.remaining)
        try:
            request = EngineRequest(
                request_id=wire.request_id(start.request_id),
                epoch=start.epoch,
                prompt_token_ids=np.frombuffer(start.token_ids, dtype="<u4").astype(np.int32),
                sampling=SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True),
                tenant=start.tenant,
                weight=wire.weight(start.weight),
                priority_class=wire.priority_class(start.priority_class),
                cache_salt=start.cache_salt,
                deadline=deadline,
                kv_role=KVRole.EXPORT,
            )
            self._engine.check(request)
        except (wire.WireError, EngineError, ValueError) as error:
            raise _Refused(pb.PREFILL_REFUSAL_INVALID, f"{error}.") from None
        blocks, rest = divmod(len(request.prompt_token_ids), self._identity.block_size)
        if rest or not start.cache_salt or not 0 <= start.held_block_count < blocks:
            raise _Refused(pb.PREFILL_REFUSAL_INVALID, "The tokens are not those of blocks that have a name.")
        return request

    def _grant(self, session: _Session, slots: Sequence[int], *, first: int = 0) -> None:
        session.slots.extend(slots)
        self._engine.move(ExportRoom(session.name, len(slots), first))

    async def _run(self, session: _Session, requests: Requests, write: Write) -> None:
        lock = asyncio.Lock()

        async def write_in_turn(message: pb.PrefillResponse) -> None:
            async with lock:
                await write(message)

        sender: BlockSender | None = None
        tasks = [
            asyncio.create_task(self._read(session, requests)),
            asyncio.create_task(self._pulse(session, write_in_turn)),
        ]
        try:
            async with asyncio.timeout(session.lease_s) as session.lease:
                transport, sender = await self._sender(session.start, write_in_turn)
                accepted = pb.PrefillAccepted(worker_instance=self._identity.instance, transport=transport)
                await write_in_turn(pb.PrefillResponse(accepted=accepted))
                crash_point("prefill.after_accept")
                last = await self._push(session, sender, write_in_turn)
                await sender.close()
                crash_point("prefill.before_last")
                await write_in_turn(last)
                session.is_told = True
                self._close(session)
                # What a caller has not read yet is lost to it once the call is over: the asker ends it.
                await asyncio.shield(tasks[0])
        except TimeoutError:
            if session.is_told:
                return
            self._metrics.orphans(session.computed_count)
            structlog.get_logger().warning("prefill_lease_over", request_id=session.start.request_id)
            raise DeadlineExceeded("The asker's lease ran out.") from None
        finally:
            # Blocks are free at once: what is still being sent are copies.
            self._close(session)
            await end_tasks(tasks)
            if sender is not None:
                await sender.close()

    async def _sender(self, start: pb.PrefillStart, write: Write) -> tuple[str, BlockSender]:
        """The first transport that can reach the asker. The last one always can."""
        for transfer in self._transfers[:-1]:
            try:
                if transfer.accepts(start):
                    return transfer.name, await transfer.sender(start, write)
            except TransferError as error:
                structlog.get_logger().warning("transfer_unavailable", transport=transfer.name, detail=str(error))
        return self._transfers[-1].name, await self._transfers[-1].sender(start, write)

    async def _push(self, session: _Session, sender: BlockSender, write: Write) -> pb.PrefillResponse:
        """Send blocks as they are computed; returns the last message."""
        sent, spent = session.start.held_block_count, 0.0
        try:
            while sent < session.block_count:
                if session.ended is not None:
                    return session.ended.message
                batch = session.take(self._batch)
                if not batch:
                    await session.wake.wait()
                    session.wake.clear()
                    continue
                began = self._clock.monotonic()
                await sender.send(batch)
                spent += self._clock.monotonic() - began
                await write(pb.PrefillResponse(landed=_landed(batch)))
                crash_point("prefill.after_batch")
                sent += len(batch)
        except TransferError as error:
            return _Refused(pb.PREFILL_REFUSAL_FAILED, f"{error}.").message
        done = pb.PrefillDone(
            block_count=sent - session.start.held_block_count, transfer_time=wire.duration_of(max(0.0, spent))
        )
        return pb.PrefillResponse(done=done)

    async def _read(self, session: _Session, requests: Requests) -> None:
        async for message in requests:
            session.renew()
            if message.renew.slots and self._session(session.name) is session:
                self._grant(session, message.renew.slots)
        session.end(pb.PREFILL_REFUSAL_CANCELLED, "The asker left.")
        self._close(session)

    async def _pulse(self, session: _Session, write: Write) -> None:
        while True:
            await self._clock.sleep(session.lease_s / 3)
            await write(pb.PrefillResponse(progress=pb.PrefillProgress()))

    def _close(self, session: _Session) -> None:
        """Stop computing and let go of the blocks; safe to repeat."""
        if self._sessions.get(session.start.request_id) is not session:
            return
        del self._sessions[session.start.request_id]
        self._board.prefill_count = len(self._sessions)
        request_id, epoch = session.name
        self._engine.abort([Abort(request_id, epoch)])
        self._engine.move(ExportEnd(session.name))
        self._board.touch()
        self._offered.discard(request_id)
        self._note_empty()

    def _note_empty(self) -> None:
        if self._sessions or self._offered:
            self._empty.clear()
        else:
            self._empty.set()


def _landed(batch: Sequence[tuple[int, KVBlock]]) -> pb.KVLanded:
    return pb.KVLanded(
        blocks=[pb.LandedBlock(slot=slot, full_hash=block.full_hash, checksum=block.checksum) for slot, block in batch]
    )
