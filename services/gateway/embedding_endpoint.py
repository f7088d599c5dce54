"""`POST /v1/embeddings`: the body's inputs as drafts, the vectors as OpenAI has them. Called by the HTTP door."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence

from starlette.types import Send

from services.common.admission_types import KeyRecord
from services.common.errors import InvalidRequest, Unsupported
from services.gateway.api_types import (
    EmbeddingAnswer,
    EmbeddingDetails,
    EmbeddingObject,
    EmbeddingRequest,
    EmbeddingUsage,
)
from services.gateway.embedding import Embedded, Embedder, embedding_draft
from services.gateway.json_endpoint import send_json
from services.gateway.request_draft import TextPrompt, TokenPrompt


class EmbeddingEndpoint:
    """Answers with a vector for each input."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def embed(self, key: KeyRecord, body: EmbeddingRequest, send: Send) -> None:
        """Raises before anything was sent: Unsupported, and what `Embedder.run` raises."""
        if body.dimensions is not None:
            message = "`dimensions` is not supported: this model's vectors have one size."
            raise Unsupported(message, param="dimensions")
        drafts = [
            embedding_draft(body.model, prompt, user=body.user or "", batch=body.priority == "batch", timeout_s=None)
            for prompt in _prompts(body.input)
        ]
        async with self._embedder.run(key, drafts) as found:
            await send_json(send, _answer(found, body.encoding_format), request_id=found[0].request_id)


def floats(vector: bytes) -> tuple[float, ...]:
    """The values of little-endian float32."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def _prompts(sent: str | list[str | int | list[int]]) -> Sequence[TextPrompt | TokenPrompt]:
    if isinstance(sent, str):
        return [TextPrompt(sent, "input")]
    ids = [item for item in sent if isinstance(item, int)]
    if ids and len(ids) == len(sent):
        return [TokenPrompt(tuple(ids), "input")]
    prompts: list[TextPrompt | TokenPrompt] = []
    for index, item in enumerate(sent):
        field = f"input[{index}]"
        if isinstance(item, int):
            raise InvalidRequest(f"`{field}` is a number among other inputs.", param=field)
        prompts.append(TextPrompt(item, field) if isinstance(item, str) else TokenPrompt(tuple(item), field))
    return prompts


def _answer(found: Sequence[Embedded], encoding: str | None) -> EmbeddingAnswer:
    model = found[0].request.model.card.model
    tokens = sum(len(each.request.prompt_token_ids) for each in found)
    return EmbeddingAnswer(
        data=[
            EmbeddingObject(
                index=index,
                embedding=base64.b64encode(each.vector).decode() if encoding == "base64" else list(floats(each.vector)),
            )
            for index, each in enumerate(found)
        ],
        model=model.model,
        usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        millrace=EmbeddingDetails(version=model.version, request_ids=[each.request_id for each in found]),
    )
