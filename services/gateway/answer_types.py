"""Answers of generation as types, for the description of the API only: openai_answer makes them field by field.

Fields may be added to an answer; a client must not mind ones that it does not know. Values only.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishName = Literal["stop", "length", "tool_calls"]


class PromptDetails(msgspec.Struct, kw_only=True):
    """Part of `usage`."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, kw_only=True):
    """Part of `usage`."""

    reasoning_tokens: int


class UsageObject(msgspec.Struct, kw_only=True):
    """Counts of token ids; the prompt counts once for all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class GenerationDetails(msgspec.Struct, kw_only=True):
    """`millrace` of an answer; `stop_reason` is `budget` where a token budget ended it."""

    request_id: str
    version: str
    seed: int
    stop_reason: str | None = None


class Alternative(msgspec.Struct, kw_only=True):
    """One token that could stand at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Alternative, kw_only=True):
    """The token that stands there, and the most likely ones."""

    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """`logprobs` of a chat choice."""

    content: list[ChatLogprob]


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject
    millrace: GenerationDetails


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """`logprobs` of a completion: one entry a token, null for the first of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One of `n` answers."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName


class Completion(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageObject
    millrace: GenerationDetails


class ErrorFields(msgspec.Struct, kw_only=True):
    """`code` is the reason of the error table; `param` names the field at fault; the id is that of `x-request-id`."""

    message: str
    type: str
    param: str | None
    code: str
    request_id: str | None = None


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of every answer that is not 2xx, and of the last frame of a stream that failed."""

    error: ErrorFields
