"""The worker's gRPC face: checks what comes in, answers with typed refusals, hands the rest on.

Charter: be slow to add lines here; a new feature is a new file and at most one call. Owns no request state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator, Callable

import grpc
import structlog
from millrace.common.v1 import admission_pb2
from millrace.worker.v1 import worker_service_pb2, worker_service_pb2_grpc
from opentelemetry import trace

from services.common.admission_types import SUSPECT_DEATHS
from services.common.clock import Clock
from services.common.errors import NotFound
from services.common.lifecycle import crash_point
from services.common.telemetry import traceparent_of
from services.worker import wire
from services.worker.attach import GatewayHub
from services.worker.config import WorkerRole
from services.worker.engine.engine_config import EngineError, NeverFitsError
from services.worker.engine.request import EngineRequest
from services.worker.kv_peers import KVPeers
from services.worker.load_reporter import LoadBoard, WorkerIdentity
from services.worker.requests import RequestTable, StaleEpochError
from services.worker.streams import RequestFacts, RequestStream

TOKENIZER_CHUNK_BYTES = 1 << 20
NO_ROOM = worker_service_pb2.SUBMIT_REFUSAL_NO_ROOM


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """The card and the tokenizer file behind it."""

    card: worker_service_pb2.ModelCard
    tokenizer_json: bytes


class _Refused(Exception):
    """A typed refusal on its way to the router."""

    def __init__(self, refusal: worker_service_pb2.SubmitRefusal.ValueType, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal
        self.detail = detail


class WorkerService(worker_service_pb2_grpc.WorkerServiceServicer):
    """`millrace.worker.v1.WorkerService`."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        model: ServedModel,
        table: RequestTable,
        hub: GatewayHub,
        board: LoadBoard,
        peers: KVPeers,
        clock: Clock,
    ) -> None:
        """`begin_drain(grace seconds)` is set by the app that runs this service."""
        self._identity = identity
        self._model = model
        self._table = table
        self._hub = hub
        self._board = board
        self._peers = peers
        self._clock = clock
        self.begin_drain: Callable[[float], None] = lambda grace_s: None

    async def GetModelCard(
        self, request: worker_service_pb2.GetModelCardRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_service_pb2.GetModelCardResponse:
        """What this worker serves."""
        return worker_service_pb2.GetModelCardResponse(card=self._model.card, worker_instance=self._identity.instance)

    async def GetTokenizer(
        self, request: worker_service_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_service_pb2.GetTokenizerResponse]:
        """The tokenizer file in chunks. Raises NotFound when another digest is asked for."""
        if request.tokenizer_digest and request.tokenizer_digest != self._model.card.tokenizer_digest:
            raise NotFound("This worker serves another tokenizer.")
        data = self._model.tokenizer_json
        for start in range(0, len(data), TOKENIZER_CHUNK_BYTES):
            yield worker_service_pb2.GetTokenizerResponse(chunk=data[start : start + TOKENIZER_CHUNK_BYTES])

    async def Submit(
        self, request: worker_service_pb2.SubmitRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_service_pb2.SubmitResponse:
        """Accept one attempt, or say why not. Never waits for the engine."""
        return self._submit(request)

    async def SubmitStream(
        self,
        request_iterator: AsyncIterator[worker_service_pb2.SubmitStreamRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[worker_service_pb2.SubmitStreamResponse]:
        """The same for many. What fails at one says nothing about the others."""
        async for message in request_iterator:
            responses = [self._submit_apart(request) for request in message.requests]
            view = None
            if message.HasField("view_patience") and message.requests:
                router = message.requests[0].router_instance
                view = self._board.views.answer(router, wire.seconds_of(message.view_patience))
            yield worker_service_pb2.SubmitStreamResponse(responses=responses, view=view)

    def _submit_apart(self, request: worker_service_pb2.SubmitRequest) -> worker_service_pb2.SubmitResponse:
        request_id = request.entry.request_id
        try:
            return self._submit(request)
        except Exception as error:
            structlog.get_logger().error("submit_failed", request_id=request_id[: wire.MAX_ID_CHARS], exc_info=error)
            return worker_service_pb2.SubmitResponse(
                request_id=request_id,
                epoch=request.epoch,
                worker_instance=self._identity.instance,
                refusal=worker_service_pb2.SUBMIT_REFUSAL_INTERNAL,
            )

    def _submit(self, request: worker_service_pb2.SubmitRequest) -> worker_service_pb2.SubmitResponse:
        response = worker_service_pb2.SubmitResponse(
            request_id=request.entry.request_id, epoch=request.epoch, worker_instance=self._identity.instance
        )
        try:
            shown = self._board.views.sequence
            self._accept(request)
            crash_point("worker.after_accept")
            response.accepted, response.watch_sequence = True, shown
        except _Refused as refused:
            response.refusal = refused.refusal
            response.detail = refused.detail
            structlog.get_logger().info(
                "submit_refused",
                request_id=request.entry.request_id[: wire.MAX_ID_CHARS],
                refusal=worker_service_pb2.SubmitRefusal.Name(refused.refusal),
            )
        return response

    async def Attach(  # type: ignore[override]  # a coroutine that writes: a write that returned is the next frame's start
        self,
        request_iterator: AsyncIterator[worker_service_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[worker_service_pb2.AttachRequest, worker_service_pb2.AttachResponse],
    ) -> None:
        """One gateway's stream."""
        # At once, so that the gateway knows that the stream stands before there is a token.
        await context.send_initial_metadata(())
        await self._hub.serve(request_iterator, context.write)

    async def Prefill(  # type: ignore[override]  # a coroutine that writes, as Attach
        self,
        request_iterator: AsyncIterator[worker_service_pb2.PrefillRequest],
        context: grpc.aio.ServicerContext[worker_service_pb2.PrefillRequest, worker_service_pb2.PrefillResponse],
    ) -> None:
        """Compute a prompt for a peer."""
        await self._peers.desk.serve(request_iterator, context.write)

    async def Watch(
        self, request: worker_service_pb2.WatchRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_service_pb2.WatchResponse]:
        """Room and health, until the router leaves."""
        async for view in self._board.views.watch(request.router_instance):
            yield view

    async def WatchCache(
        self, request: worker_service_pb2.WatchCacheRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_service_pb2.WatchCacheResponse]:
        """What is cached, and what changes, until the router leaves."""
        async for message in self._board.cache.watch():
            yield message

    async def Drain(
        self, request: worker_service_pb2.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_service_pb2.DrainResponse:
        """Take no more work; what runs gets the grace."""
        self.begin_drain(wire.seconds_of(request.grace))
        return worker_service_pb2.DrainResponse(running_count=len(self._table.unfinished()))

    # --- Submit, step by step ------------------------------------------------------------------------------------
    def _accept(self, request: worker_service_pb2.SubmitRequest) -> None:
        entry = request.entry
        self._check_state(request)
        running = self._table.get(entry.request_id)
        if running is not None and running.facts.epoch == request.epoch and not running.abandoned:
            return
        engine_request = self._parse(request)
        self._table.caps.note(entry)
        self._check_room(entry, engine_request)
        facts = self._facts(request, engine_request)
        crash_point("worker.before_accept")
        starts = {choice.index: len(choice.output_token_ids) for choice in engine_request.choices}
        if request.HasField("prefill_peer"):
            engine_request = self._peers.expect(engine_request, request.prefill_peer.address, facts.traceparent)
        try:
            self._hub.submit(RequestStream(facts, starts, now_wall=self._clock.wall()), engine_request)
        except StaleEpochError:
            self._peers.remotes.forget((facts.request_id, facts.epoch))
            raise _Refused(
                worker_service_pb2.SUBMIT_REFUSAL_STALE_EPOCH, "A newer or cancelled epoch is known."
            ) from None

    def _check_state(self, request: worker_service_pb2.SubmitRequest) -> None:
        entry, card = request.entry, self._model.card
        if self._identity.role is WorkerRole.PREFILL:
            raise _Refused(worker_service_pb2.SUBMIT_REFUSAL_WRONG_ROLE, "The worker prefills for its peers only.")
        if self._board.draining:
            raise _Refused(worker_service_pb2.SUBMIT_REFUSAL_DRAINING, "The worker is draining.")
        if not self._board.ready:
            raise _Refused(NO_ROOM, "The worker is not ready.")
        same_model = (entry.model.model, entry.model.version) == (card.model.model, card.model.version)
        if not same_model or (entry.tokenizer_digest and entry.tokenizer_digest != card.tokenizer_digest):
            raise _Refused(worker_service_pb2.SUBMIT_REFUSAL_WRONG_VERSION, "The worker serves another version.")
        if entry.adapter:
            raise _Refused(worker_service_pb2.SUBMIT_REFUSAL_UNKNOWN_ADAPTER, "The adapter is not loaded here.")
        if not self._table.is_attached(entry.gateway_instance):
            raise _Refused(
                worker_service_pb2.SUBMIT_REFUSAL_GATEWAY_NOT_ATTACHED, "The request's gateway is not attached here."
            )
        if request.HasField("remaining") and wire.seconds_of(request.remaining) <= 0:
            raise _Refused(worker_service_pb2.SUBMIT_REFUSAL_EXPIRED, "The deadline is over.")

    def _parse(self, request: worker_service_pb2.SubmitRequest) -> EngineRequest:
        deadline = None
        if request.HasField("remaining"):
            deadline = self._clock.monotonic() + wire.seconds_of(request.remaining)
        try:
            return wire.engine_request(
                request.entry, epoch=request.epoch, vocab_size=self._model.card.vocab_size, deadline=deadline
            )
        except wire.WireError as error:
            raise _Refused(worker_service_pb2.SUBMIT_REFUSAL_INVALID, f"{error}.") from None

    def _check_room(self, entry: admission_pb2.AdmissionEntry, request: EngineRequest) -> None:
        try:
            self._hub.check(request)
        except NeverFitsError as error:
            raise _Refused(worker_service_pb2.SUBMIT_REFUSAL_NEVER_FITS, f"The {error}.") from None
        except EngineError as error:
            raise _Refused(worker_service_pb2.SUBMIT_REFUSAL_INVALID, f"{error}.") from None
        older = self._table.get(entry.request_id)
        if len(entry.lost_workers) >= SUSPECT_DEATHS and self._table.suspect_count and older is None:
            raise _Refused(NO_ROOM, "Another suspect of poison runs here.")
        freed = older.slot_count if older is not None else 0
        wanted = min(len(request.choices), self._identity.max_num_seqs)
        if wanted > self._board.free_slots() + freed:
            raise _Refused(NO_ROOM, "The batch is full.")
        if self._prompt_blocks(request) > self._board.free_blocks() and self._table.slot_count > freed:
            raise _Refused(NO_ROOM, "The KV pool is full.")

    def _prompt_blocks(self, request: EngineRequest) -> int:
        known = len(request.prompt_token_ids) + max(len(choice.output_token_ids) for choice in request.choices)
        return math.ceil((known + 1) / self._identity.block_size)

    def _facts(self, request: worker_service_pb2.SubmitRequest, engine_request: EngineRequest) -> RequestFacts:
        # The prompt lives in the engine; what is kept here is for frames, usage and spans.
        entry = request.entry
        for field in ("token_ids", "block_hashes", "prefix"):
            entry.ClearField(field)
        return RequestFacts(
            request_id=entry.request_id,
            attempt=request.attempt,
            epoch=request.epoch,
            gateway_instance=entry.gateway_instance,
            entry=entry,
            prompt_token_count=len(engine_request.prompt_token_ids),
            prompt_block_count=self._prompt_blocks(engine_request),
            traceparent=request.traceparent or traceparent_of(trace.get_current_span()) or entry.traceparent,
            claimed_at=request.claim_time if request.HasField("claim_time") else None,
        )
