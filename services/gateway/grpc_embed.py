"""`Embed` of the gRPC door: messages to drafts and vectors to messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb

from services.common.errors import InvalidRequest
from services.gateway.embedding import Embedded, embedding_draft
from services.gateway.embedding_endpoint import floats
from services.gateway.request_draft import RequestDraft, TextPrompt, TokenPrompt

_LONGEST_S = 3_600.0


def timeout_of(remaining_s: float | None) -> float | None:
    """A call's remaining time as a request's timeout."""
    return None if remaining_s is None else max(0.001, min(remaining_s, _LONGEST_S))


def embed_drafts(request: pb.EmbedRequest, remaining_s: float | None) -> list[RequestDraft]:
    """A draft for each input. Raises InvalidRequest."""
    if request.priority_class not in common_pb2.PriorityClass.values():
        raise InvalidRequest("`priority_class` is not known.", param="priority_class")
    batch = request.priority_class == common_pb2.PRIORITY_CLASS_BATCH
    return [
        embedding_draft(
            request.model, _prompt(each, index), user=request.user, batch=batch, timeout_s=timeout_of(remaining_s)
        )
        for index, each in enumerate(request.inputs)
    ]


def embed_response(found: Sequence[Embedded]) -> pb.EmbedResponse:
    """The answer of one call."""
    return pb.EmbedResponse(
        model=found[0].request.model.card.model,
        embeddings=[pb.Embedding(request_id=each.request_id, values=floats(each.vector)) for each in found],
        usage=common_pb2.TokenUsage(prompt_token_count=sum(len(each.request.prompt_token_ids) for each in found)),
    )


def _prompt(sent: pb.EmbedInput, index: int) -> TextPrompt | TokenPrompt:
    kind, field = sent.WhichOneof("input"), f"inputs[{index}]"
    if kind is None:
        raise InvalidRequest(f"`{field}` needs `text` or `token_ids`.", param=field)
    return TextPrompt(sent.text, field) if kind == "text" else TokenPrompt(tuple(sent.token_ids.token_ids), field)
