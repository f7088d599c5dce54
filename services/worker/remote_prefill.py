"""The decoding side of disaggregation: asks a peer for the blocks of a prompt, checks them in, or falls back.

Owns one task for each request that waits for a peer, its staging slots and its call. Whatever happens to peer, link or
blocks, the engine gets an answer: blocks, or that no more will come, and then computes the rest itself. A request that
ends takes its task, and so the call to the peer, with it. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable
from typing import TypeVar

import grpc
import numpy as np
import structlog
from millrace.worker.v1 import worker_service_pb2 as pb
from opentelemetry.trace import SpanKind

from services.common.clock import Clock
from services.common.grpc_client import Dial
from services.common.lifecycle import crash_point, end_tasks
from services.common.telemetry import context_from, traceparent_of, tracer
from services.worker import wire
from services.worker.engine.kv_blocks import KVBlock
from services.worker.engine.kv_transfer import ImportOutcome, RemotePrefill
from services.worker.engine.request import EngineRequest
from services.worker.engine_loop import EngineLoop, LoopReport
from services.worker.kv_metrics import PeerMetrics
from services.worker.kv_moves import ImportBlocks, ImportFailed, Name
from services.worker.kv_staging import StagingArea
from services.worker.kv_transport import Reception, TransferError, layout_message, share_of
from services.worker.load_reporter import LoadBoard, WorkerIdentity
from services.worker.peer_fetch import Call, PeerChannels, PeerFetch
from services.worker.prefill_desk import BATCH_BYTES

FENCE_POLL_S, FENCE_RETRY_S = 0.02, 1.0
# A peer may take so many times what prompts of this length took, and this long at least, before the work is done here;
# before anything was measured, this long. At most the share of the time to the deadline.
PATIENCE_FACTOR, MIN_PATIENCE_S, FIRST_PATIENCE_S, DEADLINE_SHARE = 4.0, 5.0, 60.0, 0.5
_RATE_WEIGHT = 0.25
T = TypeVar("T")


class _FallBack(Exception):
    """The rest of the prompt is computed here. `cause` labels metrics."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What was submitted with a peer to ask."""

    request: EngineRequest
    address: str
    traceparent: str


class RemotePrefills:
    """Every request of this worker whose prompt a peer computes."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        reception: Reception,
        engine: EngineLoop,
        board: LoadBoard,
        metrics: PeerMetrics,
        dial: Dial,
        clock: Clock,
    ) -> None:
        self._identity = identity
        self._reception = reception
        self._engine = engine
        self._board = board
        self._metrics = metrics
        self._clock = clock
        self._channels = PeerChannels(dial)
        self._asked: dict[Name, _Asked] = {}
        self._fetches: dict[Name, tuple[PeerFetch, asyncio.Task[None]]] = {}
        self._fencing: asyncio.Task[None] | None = None
        self._tokens_per_s: float | None = None
        self._note_staging()

    @property
    def staging(self) -> StagingArea:
        """Where blocks land."""
        return self._reception.staging

    def expect(self, request: EngineRequest, address: str, traceparent: str) -> None:
        """`request`, of role IMPORT, is about to be submitted; the peer at `address` will be asked for its blocks."""
        self._asked[request.request_id, request.epoch] = _Asked(request, address, traceparent)

    def on_report(self, report: LoopReport) -> None:
        """Ask for what the engine wants, hand on what it says to blocks, leave what has ended."""
        for prefill in report.kv.asked:
            self._start(prefill)
        for name, outcome in report.kv.imported:
            if name in self._fetches:
                self._fetches[name][0].tell(outcome)
        if not self._asked and not self._fetches:
            return
        ended = [(o.key.request_id, o.key.epoch) for o in report.outputs if o.finish_reason is not None]
        ended += [(rejection.request_id, rejection.epoch) for rejection in report.rejections]
        if report.failed:
            ended += [*self._asked, *self._fetches]
        for name in ended:
            self.forget(name)

    def forget(self, name: Name) -> None:
        """The request has ended: its call to the peer ends at once, unless it is about to end by itself."""
        self._asked.pop(name, None)
        if name in self._fetches:
            fetch, task = self._fetches[name]
            if fetch.outcome is ImportOutcome.WAITING:
                task.cancel()

    async def close(self) -> None:
        """End every call and close the channels."""
        await end_tasks([task for _, task in self._fetches.values()])
        if self._fencing is not None:
            await end_tasks([self._fencing])
        await self._channels.close()

    # --- one request, step by step -------------------------------------------------------------------------------
    def _start(self, prefill: RemotePrefill) -> None:
        name = (prefill.key.request_id, prefill.key.epoch)
        asked = self._asked.pop(name, None)
        if asked is None:
            self._engine.move(ImportFailed(name))
            return
        staging = self._reception.staging
        share = share_of(staging, batch_bytes=BATCH_BYTES)
        fetch = PeerFetch(prefill, staging, staging.lease(min(len(prefill.full_hashes), share)))
        self._note_staging()
        task = asyncio.create_task(self._run(fetch, asked))
        self._fetches[name] = (fetch, task)
        task.add_done_callback(lambda _: self._end(name))

    def _end(self, name: Name) -> None:
        """However the task ended, and were it before it began."""
        fetch, _ = self._fetches.pop(name)
        staging = self._reception.staging
        risky = fetch.granted if self._reception.transfer.is_one_sided and not fetch.is_settled else set()
        staging.quarantine(risky)
        staging.release(slot for slot in fetch.slots if slot not in risky)
        self._note_staging()
        if risky and not staging.is_closed:
            staging.is_closed = True
            self._fencing = asyncio.create_task(self._fence())

    async def _fence(self) -> None:
        """Nobody says whether quarantined slots are still written to: cut all off, once nobody else has a slot."""
        staging = self._reception.staging
        while staging.counts().leased:
            await self._clock.sleep(FENCE_POLL_S)
        while True:
            try:
                await self._reception.transfer.fence()
                break
            except TransferError as error:
                structlog.get_logger().error("staging_fence_failed", detail=str(error))
            await self._clock.sleep(FENCE_RETRY_S)
        staging.settle()
        staging.is_closed = False
        self._note_staging()
        structlog.get_logger().info("staging_fenced")

    async def _run(self, fetch: PeerFetch, asked: _Asked) -> None:
        """Blocks, or word that none will come; raises nothing but CancelledError, when the request has ended."""
        reception, began, outcome = self._reception, self._clock.monotonic(), "cancelled"
        fetch.transport = reception.transfer.name
        span = tracer().start_span(
            "worker.transfer",
            context=context_from(asked.traceparent),
            kind=SpanKind.CLIENT,
            attributes={"millrace.request_id": fetch.name[0]},
        )
        try:
            await self._fetch(fetch, asked, traceparent_of(span))
            outcome = "imported"
        except _FallBack as error:
            outcome = error.cause
            # A spoilt block has told the engine already.
            if outcome != "spoilt":
                self._engine.move(ImportFailed(fetch.name))
            self._metrics.fell_back(outcome)
            structlog.get_logger().warning("prefill_fell_back", request_id=fetch.name[0], cause=outcome)
            span.set_attribute("error.type", outcome)
        finally:
            await self._leave(fetch)
            span.set_attribute("millrace.transport", fetch.transport)
            size = fetch.block_count * reception.layout.block_bytes
            seconds = self._clock.monotonic() - began
            self._metrics.transferred(fetch.transport, outcome, received_bytes=size, seconds=seconds)
            if outcome == "imported":
                tokens = len(fetch.prefill.full_hashes) * self._identity.block_size
                self._note_rate(tokens / max(seconds, 1e-6))
            span.end()

    async def _fetch(self, fetch: PeerFetch, asked: _Asked, traceparent: str) -> None:
        """Return when all blocks are in, or the request is gone. Raises _FallBack."""
        if not fetch.slots:
            raise _FallBack("no_staging")
        try:
            async with asyncio.timeout(self._patience_s(fetch.prefill, asked.request)):
                await self._call(fetch, asked, traceparent)
        except TimeoutError:
            raise _FallBack("timeout") from None
        except grpc.aio.AioRpcError as error:
            structlog.get_logger().info("prefill_call_failed", code=error.code().name, detail=error.details())
            raise _FallBack("peer_lost") from None
        except ValueError as error:
            structlog.get_logger().warning("prefill_broke_protocol", detail=str(error))
            raise _FallBack("broken_protocol") from None

    async def _call(self, fetch: PeerFetch, asked: _Asked, traceparent: str) -> None:
        stub = self._channels.stub(asked.address)
        await self._channels.trim()
        call = fetch.call = stub.Prefill(metadata=(("traceparent", traceparent),) if traceparent else ())
        fetch.is_settled = False
        renewing: asyncio.Task[None] | None = None
        try:
            # Over a link that carries nothing, the first write waits for as long as it may.
            await self._within_lease(call.write(pb.PrefillRequest(start=self._start_message(fetch, asked.request))))
            crash_point("decode.after_ask")
            renewing = asyncio.create_task(self._renew(fetch, call))
            while not fetch.is_settled:
                await self._take(fetch, await self._read(fetch, call))
        except (_FallBack, grpc.aio.AioRpcError):
            # All blocks are in: how the call ends does not matter any more.
            if fetch.outcome is not ImportOutcome.READY:
                raise
        finally:
            if renewing is not None:
                await end_tasks([renewing])

    async def _leave(self, fetch: PeerFetch) -> None:
        """End the call. A peer that writes by itself is asked to say when it has ended; else its slots are risky."""
        if fetch.call is None:
            return
        try:
            if fetch.transport == self._reception.transfer.name and self._reception.transfer.is_one_sided:
                await self._within_lease(fetch.call.done_writing())
                while not fetch.is_settled:
                    message = await self._read(fetch, fetch.call)
                    fetch.is_settled = message.WhichOneof("message") in ("done", "refused")
            else:
                fetch.is_settled = True
        except (_FallBack, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            structlog.get_logger().warning("peer_left_unsettled", request_id=fetch.name[0])
        finally:
            fetch.call.cancel()
            if fetch.reading is not None:
                await end_tasks([fetch.reading])

    async def _read(self, fetch: PeerFetch, call: Call) -> pb.PrefillResponse:
        """The peer's next message. Raises _FallBack when it says nothing for a lease, or has gone.

        A read that is cancelled would cancel the whole call: the peer must be let to say its last word.
        """
        if fetch.reading is None:
            fetch.reading = asyncio.create_task(_next(call))
        message = await self._within_lease(asyncio.shield(fetch.reading))
        fetch.reading = None
        if not isinstance(message, pb.PrefillResponse):
            raise _FallBack("peer_lost")
        return message

    async def _within_lease(self, doing: Awaitable[T]) -> T:
        """What it returns. Raises _FallBack when that takes longer than a lease."""
        try:
            async with asyncio.timeout(self._reception.lease_s):
                return await doing
        except TimeoutError:
            raise _FallBack("silent") from None

    async def _take(self, fetch: PeerFetch, message: pb.PrefillResponse) -> None:
        """One answer of the peer. Raises _FallBack when no more blocks will come, ValueError for nonsense."""
        match message.WhichOneof("message"):
            case "accepted":
                fetch.transport = message.accepted.transport
            case "part":
                fetch.take_part(message.part)
            case "landed":
                crash_point("decode.after_landed")
                await self._import(fetch, fetch.take_landed(message.landed))
            case "done":
                fetch.is_settled = True
                if fetch.outcome is not ImportOutcome.READY or message.done.block_count != fetch.block_count:
                    raise _FallBack("incomplete")
                self._note_transfer(fetch, wire.seconds_of(message.done.transfer_time))
            case "refused":
                fetch.is_settled = True
                name = pb.PrefillRefusal.Name(message.refused.refusal)
                raise _FallBack("refused_" + name.removeprefix("PREFILL_REFUSAL_").lower())

    async def _import(self, fetch: PeerFetch, blocks: tuple[KVBlock, ...]) -> None:
        fetch.told.clear()
        self._engine.move(ImportBlocks(fetch.name, blocks))
        await fetch.told.wait()
        if fetch.outcome is ImportOutcome.SPOILT:
            raise _FallBack("spoilt")
        fetch.wake.set()

    async def _renew(self, fetch: PeerFetch, call: Call) -> None:
        """Keep the peer's lease, and grant slots again, until cancelled or the call is over."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._clock.wait(fetch.wake, self._reception.lease_s / 3)
                fetch.wake.clear()
                await call.write(pb.PrefillRequest(renew=pb.PrefillRenew(slots=fetch.take_freed())))

    def _start_message(self, fetch: PeerFetch, request: EngineRequest) -> pb.PrefillStart:
        prefill, identity, reception = fetch.prefill, self._identity, self._reception
        end = prefill.start + len(prefill.full_hashes) * identity.block_size
        known = np.concatenate((request.prompt_token_ids, request.choices[0].output_token_ids))
        start = pb.PrefillStart(
            request_id=request.request_id,
            epoch=request.epoch,
            worker_instance=identity.instance,
            model=identity.model,
            tenant=request.tenant,
            weight=request.weight,
            priority_class=wire.priority_class_message(request.priority_class),
            cache_salt=request.cache_salt,
            token_ids=known[:end].astype("<u4").tobytes(),
            held_block_count=prefill.start // identity.block_size,
            layout=layout_message(reception.layout, block_size=identity.block_size),
            lease=wire.duration_of(reception.lease_s),
            slots=fetch.slots,
        )
        if request.deadline is not None:
            start.remaining.CopyFrom(wire.duration_of(max(0.0, request.deadline - self._clock.monotonic())))
        reception.transfer.offer(start)
        return start

    def _patience_s(self, prefill: RemotePrefill, request: EngineRequest) -> float:
        """How long the peer may take before the work is done here."""
        patience = FIRST_PATIENCE_S
        if self._tokens_per_s is not None:
            tokens = len(prefill.full_hashes) * self._identity.block_size
            patience = max(MIN_PATIENCE_S, PATIENCE_FACTOR * tokens / self._tokens_per_s)
        if request.deadline is not None:
            patience = min(patience, DEADLINE_SHARE * (request.deadline - self._clock.monotonic()))
        return patience

    def _note_rate(self, tokens_per_s: float) -> None:
        known = self._tokens_per_s
        self._tokens_per_s = tokens_per_s if known is None else known + _RATE_WEIGHT * (tokens_per_s - known)

    def _note_transfer(self, fetch: PeerFetch, seconds: float) -> None:
        rate = fetch.block_count * self._reception.layout.block_bytes / max(seconds, 1e-6)
        known = self._board.transfer_rate
        self._board.transfer_rate = rate if known is None else known + _RATE_WEIGHT * (rate - known)

    def _note_staging(self) -> None:
        self._metrics.staging(self._reception.staging.counts())


async def _next(call: Call) -> object:
    return await call.read()
