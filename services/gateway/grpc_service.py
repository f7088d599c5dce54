"""The gRPC door: the same drafts, the same validator, the same text as HTTP. Errors by the common interceptor."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc
from millrace.gateway.v1 import usage_sums_pb2 as usage_pb

from services.common.admission_types import KeyRecord
from services.common.errors import Cancelled, InvalidRequest, Unsupported
from services.gateway.answering import ending_of
from services.gateway.auth import INFERENCE, USAGE_READ
from services.gateway.embedding import Embedder
from services.gateway.front_parts import FrontParts
from services.gateway.generation import Generation, ValidRequest
from services.gateway.grpc_chat import call_deltas, chat_of
from services.gateway.grpc_embed import embed_drafts, embed_response, timeout_of
from services.gateway.http_errors import as_millrace
from services.gateway.peers import HOLDS
from services.gateway.request_draft import (
    GrammarDraft,
    Prompt,
    RequestDraft,
    SamplingDraft,
    TextPrompt,
    TokenPrompt,
)
from services.gateway.text_stream import TextDelta, TextToken, text_deltas
from services.gateway.tokenizer import Tokenizer

# As the header of the HTTP door.
SESSION_METADATA = "x-millrace-session"
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
        """One generation. A cancelled call cancels the work; the call's deadline is the request's."""
        key = await self._key(context)
        if any(name == "idempotency-key" for name, _ in context.invocation_metadata() or ()):
            raise Unsupported("`idempotency-key` is served over HTTP only.", param="idempotency-key")
        draft = dataclasses.replace(
            _draft(request, context.time_remaining()), session=_sent(context, SESSION_METADATA) or ""
        )
        valid = await self._validator.validate(key, draft)
        generation = await self._generator.start(key, valid)
        ending = ending_of(Cancelled("The client went away."))
        reasons: dict[int, common_pb2.FinishReason.ValueType] = {}
        counts, reasoned = [0] * valid.sampling.choice_count, [0] * valid.sampling.choice_count
        request_id = generation.request_id
        try:
            accepted = pb.GenerateAccepted(
                model=valid.model.card.model, seed=valid.sampling.seed, created_unix_seconds=int(self._clock.wall())
            )
            yield pb.GenerateResponse(request_id=request_id, accepted=accepted)
            async with contextlib.aclosing(text_deltas(generation)) as deltas:
                async for delta in deltas:
                    yield pb.GenerateResponse(request_id=request_id, delta=_delta(delta, generation.request))
                    # The generator is resumed once the transport has taken the message.
                    generation.mark_delivered(delta.choice, delta.delivered, delta.reasoning_delivered)
                    counts[delta.choice] = delta.delivered
                    reasoned[delta.choice] = delta.reasoning_delivered
                    if delta.finish_reason is not None:
                        reasons[delta.choice] = delta.finish_reason
            completed = pb.GenerateCompleted(
                usage=_usage(generation, counts, reasoned), model=generation.request.model.card.model
            )
            ending = common_pb2.TERMINAL_STATE_COMPLETED, reasons[0], ""
            yield pb.GenerateResponse(request_id=request_id, completed=completed)
        except Exception as error:
            ending = ending_of(as_millrace(error))
            raise
        finally:
            # A cancelled call leaves by CancelledError or GeneratorExit.
            await asyncio.shield(generation.finish(*ending))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Embeddings of all inputs, or the first one's error. The call's deadline is that of each."""
        key = await self._key(context)
        drafts = embed_drafts(request, context.time_remaining())
        async with self._embedder.run(key, drafts) as found:
            return embed_response(found)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """The versions that the key may use."""
        key = await self._key(context)
        models = []
        for served in self._directory.models():
            ref = served.card.model
            if not key.models or ref.model in key.models or f"{ref.model}@{ref.version}" in key.models:
                models.append(
                    pb.Model(
                        id=f"{ref.model}@{ref.version}",
                        model=ref,
                        max_model_len=served.card.max_model_len,
                        owner=served.card.owner,
                    )
                )
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


def _delta(delta: TextDelta, valid: ValidRequest) -> pb.GenerateDelta:
    tokenizer = valid.model.tokenizer
    return pb.GenerateDelta(
        choice=delta.choice,
        text=delta.text,
        token_ids=[token.token_id for token in delta.tokens],
        logprobs=_logprobs(tokenizer, delta.tokens),
        finish_reason=delta.finish_reason or common_pb2.FINISH_REASON_UNSPECIFIED,
        reasoning=delta.reasoning,
        tool_calls=call_deltas(delta.calls),
    )


def _logprobs(tokenizer: Tokenizer, tokens: Sequence[TextToken]) -> list[pb.TokenLogprob]:
    made = []
    for position in (token.logprobs for token in tokens if token.logprobs is not None):
        raw = tokenizer.token_bytes(position.token.token_id)
        top = [
            pb.AlternativeLogprob(token=t.decode("utf-8", "replace"), token_bytes=t, logprob=alternative.logprob)
            for alternative in position.top
            for t in (tokenizer.token_bytes(alternative.token_id),)
        ]
        text = raw.decode("utf-8", "replace")
        made.append(pb.TokenLogprob(token=text, token_bytes=raw, logprob=position.token.logprob, top=top))
    return made


def _usage(generation: Generation, counts: Sequence[int], reasoned: Sequence[int]) -> common_pb2.TokenUsage:
    return common_pb2.TokenUsage(
        prompt_token_count=len(generation.request.prompt_token_ids),
        cached_token_count=generation.cached_token_count,
        completion_token_count=sum(counts),
        reasoning_token_count=sum(reasoned),
    )
