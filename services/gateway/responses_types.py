"""Bodies of `/v1/responses`, and their meaning as a chat: one validator serves both. Pure.

A field of type Raw is known but has only the values listed here.
"""

from __future__ import annotations

import msgspec

from services.common.errors import InvalidRequest, Unsupported
from services.gateway.chat_template import JsonValue
from services.gateway.known_fields import refuse_raw
from services.gateway.openai_types import ABSENT, ChatRequest, Message, MillraceOptions, StreamOptions

# Fields of type Raw and the only values of them that are served.
SERVED: dict[str, tuple[JsonValue, ...]] = {
    "background": (False,),
    "include": ([],),
    "parallel_tool_calls": (True, False),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_PARTS = frozenset({"input_text", "output_text", "text"})


class InputPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of an item; only text is served. The Raw fields come back when an output is sent again."""

    type: str
    text: str | None = None
    image_url: msgspec.Raw = ABSENT
    file_id: msgspec.Raw = ABSENT
    annotations: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message; `id` and `status` come back when an output is sent again."""

    role: str | None = None
    content: str | list[InputPart] | None = None
    type: str = "message"
    id: str | None = None
    status: str | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    millrace: MillraceOptions | None = None
    background: msgspec.Raw = ABSENT
    conversation: msgspec.Raw = ABSENT
    include: msgspec.Raw = ABSENT
    max_tool_calls: msgspec.Raw = ABSENT
    parallel_tool_calls: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    prompt_cache_key: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    safety_identifier: msgspec.Raw = ABSENT
    service_tier: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    tool_choice: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    top_logprobs: msgspec.Raw = ABSENT
    truncation: msgspec.Raw = ABSENT


class Turn(msgspec.Struct, frozen=True):
    """One message of a conversation, as it is stored."""

    role: str
    content: str


def input_turns(body: ResponsesRequest) -> list[Turn]:
    """The new messages of a request. Raises InvalidRequest, Unsupported."""
    refuse_raw(body, "", SERVED)
    if isinstance(body.input, str):
        return [Turn("user", body.input)]
    if not body.input:
        raise InvalidRequest("`input` must not be empty.", param="input")
    return [_turn(item, f"input[{index}]") for index, item in enumerate(body.input)]


def as_chat(body: ResponsesRequest, turns: list[Turn]) -> ChatRequest:
    """The chat that answers: instructions of this request only, then the conversation."""
    first = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    return ChatRequest(
        model=body.model,
        messages=[*first, *(Message(role=turn.role, content=turn.content) for turn in turns)],
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        user=body.user,
        metadata=body.metadata,
        millrace=body.millrace,
    )


def _turn(item: InputItem, path: str) -> Turn:
    if item.type != "message":
        raise Unsupported(f"`{path}.type` must be `message`.", param=f"{path}.type")
    if item.role is None or item.content is None:
        missing = "role" if item.role is None else "content"
        raise InvalidRequest(f"`{path}.{missing}` is required.", param=f"{path}.{missing}")
    if isinstance(item.content, str):
        return Turn(item.role, item.content)
    texts = []
    for index, part in enumerate(item.content):
        field = f"{path}.content[{index}]"
        if part.type not in _PARTS:
            raise Unsupported(f"`{field}.type` must be `input_text`: only text is served.", param=f"{field}.type")
        if part.text is None:
            raise InvalidRequest(f"`{field}.text` is required.", param=f"{field}.text")
        texts.append(part.text)
    return Turn(item.role, "".join(texts))
