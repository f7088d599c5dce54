"""The gRPC door: the same drafts, the same validator, the same text as HTTP. Errors by the common interceptor."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_status import rpc_status
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc
from millrace.gateway.v1 import usage_sums_pb2 as usage_pb

from services.common.admission_types import KeyRecord
from services.common.errors import InvalidRequest
from services.gateway.auth import INFERENCE, USAGE_READ
from services.gateway.come_back import parse_call, refuse_key
from services.gateway.embedding import Embedder
from services.gateway.front_parts import FrontParts
from services.gateway.generation import ValidRequest
from services.gateway.grpc_chat import chat_of
from services.gateway.grpc_embed import embed_drafts, embed_response, timeout_of
from services.gateway.grpc_generate import GenerateJob, GenerateRun, kept_messages
from services.gateway.named_models import capabilities, named_models, owner_of
from services.gateway.peers import HOLDS
from services.gateway.request_draft import (
    SESSION,
    GrammarDraft,
    Prompt,
    RequestDraft,
    SamplingDraft,
    TextPrompt,
    TokenPrompt,
)

SERVICE_NAME = "millrace.gateway.v1.GatewayService"
Context = grpc.aio.ServicerContext[Any, Any]


class GatewayService(pb_grpc.GatewayServiceServicer):
    """Generate, Embed, ListModels, Cancel, GetUsage, and Continue for other gateways."""

    def __init__(self, parts: FrontParts) -> None:
        self._generator = parts.generator
        self._directory = parts.directory
        self._keyring = parts.keyring
        self._clock = parts.clock
        self._answers = parts.answers
        self._validator = parts.validator
        self._usage = parts.usage
        self._embedder = Embedder(parts.generator, self._validator)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server that is not started yet."""
        pb_grpc.add_GatewayServiceServicer_to_server(self, server)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """One generation, whose deadline is the call's. A cancelled call cancels the work, unless it has an
        `idempotency-key`: then as over HTTP. Raises IdempotencyConflict."""
        key = await self._key(context)
        draft = dataclasses.replace(_draft(request, context.time_remaining()), session=_sent(context, SESSION) or "")
        job = GenerateJob(lambda: self._validator.validate(key, draft), lambda valid: self._begin(key, valid))
        ask = parse_call(context.invocation_metadata() or (), request)
        if ask is None:
            await job.validate()
            async with contextlib.aclosing((await job.begin()).direct()) as messages:
                async for message in messages:
                    yield message
            return
        async with (
            self._answers.opened(key.tenant, ask, job) as parts,
            contextlib.aclosing(kept_messages(parts)) as kept,
        ):
            async for found in kept:
                if isinstance(found, pb.GenerateResponse):
                    yield found
                else:
                    await context.abort_with_status(rpc_status.to_status(found))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Embeddings of all inputs, or the first one's error. The call's deadline is that of each."""
        key = await self._key(context)
        refuse_key(context.invocation_metadata() or ())
        requests = await self._embedder.validate(key, embed_drafts(request, context.time_remaining()))
        async with self._embedder.run(key, requests) as found:
            return embed_response(found)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """All that the key may use, by every name: as `GET /v1/models`."""
        key = await self._key(context)
        models = [
            pb.Model(
                id=name,
                model=served.card.model,
                max_model_len=served.card.max_model_len,
                owner=owner_of(served),
                capabilities=capabilities(served),
                deterministic=served.card.deterministic,
            )
            for name, served in named_models(self._directory, key).items()
        ]
        return pb.ListModelsResponse(models=models)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Raises NotFound for a request of another tenant too."""
        key = await self._key(context)
        return pb.CancelResponse(cancelled=await self._generator.cancel(key, request.request_id))

    async def GetUsage(self, request: usage_pb.GetUsageRequest, context: Context) -> usage_pb.GetUsageResponse:
        """Sums of the usage of the key's tenant. Raises PermissionDenied for a key without the scope `usage:read`."""
        key = await self._key(context, USAGE_READ)
        return await self._usage.read(key.tenant, request, _sent(context, "authorization") or "")

    async def Continue(self, request: pb.ContinueRequest, context: Context) -> AsyncIterator[pb.ContinueResponse]:
        """An HTTP answer that this gateway holds, for another gateway. Raises NotFound, IdempotencyConflict."""
        key = await self._key(context)
        async with self._answers.held(key.tenant, request) as parts, contextlib.aclosing(parts):
            await context.send_initial_metadata(((HOLDS, "1"),))
            async for part in parts:
                if isinstance(part, bytes):
                    yield pb.ContinueResponse(body=part)
                else:
                    headers = [pb.AnswerHeader(name=name, value=value) for name, value in part.headers]
                    yield pb.ContinueResponse(head=pb.AnswerHead(status=part.status, headers=headers))

    async def _begin(self, key: KeyRecord, valid: ValidRequest) -> GenerateRun:
        return GenerateRun(await self._generator.start(key, valid), int(self._clock.wall()))

    async def _key(self, context: Context, scope: str = INFERENCE) -> KeyRecord:
        return await self._keyring.authenticate(_sent(context, "authorization"), scope)


def _sent(context: Context, name: str) -> str | None:
    """The metadata of this name where it was sent once."""
    sent = [v for k, v in context.invocation_metadata() or () if k == name and isinstance(v, str)]
    return sent[0] if len(sent) == 1 else None


def _draft(request: pb.GenerateRequest, remaining_s: float | None) -> RequestDraft:
    def given(name: str) -> Any:
        return getattr(request, name) if request.HasField(name) else None  # type: ignore[arg-type]

    for field, enum in (("priority_class", common_pb2.PriorityClass), ("resume_policy", common_pb2.ResumePolicy)):
        if getattr(request, field) not in enum.values():
            raise InvalidRequest(f"`{field}` is not known.", param=field)
    grammar = request.grammar
    return RequestDraft(
        model=request.model,
        prompt=_prompt(request),
        sampling=SamplingDraft(
            temperature=_shortest(given("temperature")),
            top_p=_shortest(given("top_p")),
            top_k=given("top_k"),
            min_p=_shortest(given("min_p")),
            seed=given("seed"),
            n=given("choice_count"),
            max_tokens=given("max_token_count"),
            min_tokens=given("min_token_count"),
            ignore_eos=request.ignore_eos,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            repetition_penalty=_shortest(given("repetition_penalty")),
            frequency_penalty=_shortest(given("frequency_penalty")),
            presence_penalty=_shortest(given("presence_penalty")),
            logit_bias=tuple((bias.token_id, bias.bias) for bias in request.logit_bias),
            logprobs=given("logprob_count"),
            grammar=(
                GrammarDraft(grammar.kind, "grammar", grammar.text, tuple(grammar.choices))
                if request.HasField("grammar")
                else None
            ),
        ),
        user=request.user,
        metadata=dict(request.metadata),
        priority_class=request.priority_class or common_pb2.PRIORITY_CLASS_INTERACTIVE,
        resume_policy=request.resume_policy or common_pb2.RESUME_POLICY_RESUME,
        timeout_s=timeout_of(remaining_s),
    )


def _prompt(request: pb.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("input")
    if kind == "chat":
        return chat_of(request.chat)
    if kind == "prompt":
        return TextPrompt(request.prompt)
    if kind == "prompt_token_ids":
        return TokenPrompt(tuple(request.prompt_token_ids.token_ids))
    raise InvalidRequest("One of `chat`, `prompt` and `prompt_token_ids` is required.", param="input")


def _shortest(value: float | None) -> float | None:
    """A float32 of the wire as the decimal its sender meant: 0.1, not 0.10000000149."""
    return None if value is None else float(f"{value:.7g}")
