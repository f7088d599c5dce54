"""Bodies and answers of the endpoints beside generation: models, tokenising, cancel. Values only.

Shapes are OpenAI's where it has one, else vLLM's. None is absent.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from services.gateway.openai_types import Message, TemplateSettings


class ModelDetails(msgspec.Struct, kw_only=True):
    """`millrace` of a model: what no other API tells."""

    version: str
    manifest_digest: str
    deterministic: bool
    capabilities: list[str]


class ModelObject(msgspec.Struct, kw_only=True):
    """One model under one of its names; `max_model_len` is prompt plus output in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    millrace: ModelDetails


class ModelList(msgspec.Struct, kw_only=True):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /tokenize`: exactly one of `prompt` and `messages`.

    `add_special_tokens` false leaves out the BOS that the model's requests begin with.
    """

    model: str
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateSettings | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """Ids as the model would get them; `token_strs` only where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /detokenize`."""

    model: str
    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """Text of the ids, control tokens included; bytes that are not UTF-8 become U+FFFD."""

    prompt: str


class CancelAnswer(msgspec.Struct, kw_only=True):
    """`POST /v1/requests/{id}/cancel`; `cancelled` is false when the request had ended."""

    id: str
    object: Literal["request.cancellation"] = "request.cancellation"
    cancelled: bool


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/embeddings`. `input` is a text, a list of texts, the ids of one text, or lists of ids."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    priority: Literal["interactive", "batch"] | None = None


class EmbeddingObject(msgspec.Struct, kw_only=True):
    """One vector at unit length: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Prompt tokens of all inputs; there is no output."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingDetails(msgspec.Struct, kw_only=True):
    """`millrace` of an answer: each input is one request of the bill."""

    version: str
    request_ids: list[str]


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    """Vectors in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
    millrace: EmbeddingDetails
