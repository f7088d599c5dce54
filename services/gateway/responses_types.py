"""Bodies of `/v1/responses`, and their meaning as a chat: one validator serves both. Pure.

A field of type Raw is known but has only the values listed here.
"""

from __future__ import annotations

import msgspec

from services.common.errors import InvalidRequest, Unsupported
from services.gateway.chat_template import JsonValue
from services.gateway.known_fields import refuse_raw
from services.gateway.openai_types import (
    ABSENT,
    CalledFunction,
    ChatRequest,
    FunctionSpec,
    JsonSchema,
    Message,
    MillraceOptions,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    SentToolCall,
    ToolSpec,
)

# Fields of type Raw and the only values of them that are served.
SERVED: dict[str, tuple[JsonValue, ...]] = {
    "background": (False,),
    "include": ([],),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text"})
_EVENTS = "stream_options."


class InputPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of an item; only text is served. The Raw fields come back when an output is sent again."""

    type: str
    text: str | None = None
    image_url: msgspec.Raw = ABSENT
    file_id: msgspec.Raw = ABSENT
    annotations: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message, a call, its result, or reasoning; `id` and `status` come back when an output is sent again."""

    role: str | None = None
    content: str | list[InputPart] | None = None
    type: str = "message"
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: msgspec.Raw = ABSENT
    encrypted_content: msgspec.Raw = ABSENT


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """One of `tools`; without `strict` its schema is shown, not enforced."""

    type: str
    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class NamedFunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` that names a tool."""

    type: str
    name: str


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning`; what came of it is told as it is, not summed up."""

    effort: str | None = None
    summary: msgspec.Raw = ABSENT
    generate_summary: msgspec.Raw = ABSENT


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`text.format`: a chat's `response_format` in one level."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = ABSENT
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: msgspec.Raw = ABSENT


class EventOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`; the last event always tells the usage."""

    include_obfuscation: msgspec.Raw = ABSENT


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
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
    parallel_tool_calls: bool | None = None
    prompt: msgspec.Raw = ABSENT
    prompt_cache_key: str | None = None
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = None
    service_tier: msgspec.Raw = ABSENT
    text: TextOptions | None = None
    tool_choice: str | NamedFunctionTool | None = None
    tools: list[FunctionTool] | None = None
    top_logprobs: msgspec.Raw = ABSENT
    truncation: msgspec.Raw = ABSENT


class TurnCall(msgspec.Struct, frozen=True):
    """A call that an assistant's message made."""

    call_id: str
    name: str
    arguments: str


class Turn(msgspec.Struct, frozen=True):
    """One message of a conversation, as it is stored. `call_id` is the call whose result it is."""

    role: str
    content: str
    calls: list[TurnCall] = []
    call_id: str | None = None
    reasoning: str | None = None


def input_turns(body: ResponsesRequest) -> list[Turn]:
    """The new messages of a request. Raises InvalidRequest, Unsupported."""
    refuse_raw(body, "", SERVED)
    for options, path in ((body.reasoning, "reasoning."), (body.text, "text."), (body.stream_options, _EVENTS)):
        if options is not None:
            refuse_raw(options, path, {"include_obfuscation": (False,)})
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream: true`.", param="stream_options")
    if isinstance(body.input, str):
        return [Turn("user", body.input)]
    if not body.input:
        raise InvalidRequest("`input` must not be empty.", param="input")
    turns: list[Turn] = []
    reasoning: str | None = None
    for index, item in enumerate(body.input):
        path = f"input[{index}]"
        refuse_raw(item, f"{path}.", {"summary": ([],)})
        if item.type == "reasoning":
            reasoning = _text(item.content or "", f"{path}.content")
        elif item.type == "function_call":
            # Calls belong to the assistant's message before them.
            before = turns.pop() if turns and turns[-1].role == "assistant" else Turn("assistant", "")
            calls = [*before.calls, _call(item, path)]
            turns.append(msgspec.structs.replace(before, calls=calls, reasoning=before.reasoning or reasoning))
        else:
            turn = _turn(item, path)
            turns.append(msgspec.structs.replace(turn, reasoning=reasoning) if turn.role == "assistant" else turn)
        if item.type != "reasoning":
            reasoning = None
    return turns


def as_chat(body: ResponsesRequest, turns: list[Turn]) -> ChatRequest:
    """The chat that answers: instructions of this request only, then the conversation."""
    first = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    return ChatRequest(
        model=body.model,
        messages=[*first, *map(_message, turns)],
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_response_format(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        metadata=body.metadata,
        millrace=body.millrace,
    )


def _message(turn: Turn) -> Message:
    calls = [SentToolCall(call.call_id, CalledFunction(call.name, call.arguments)) for call in turn.calls]
    return Message(
        role=turn.role,
        content=turn.content,
        tool_calls=calls or None,
        tool_call_id=turn.call_id,
        reasoning_content=turn.reasoning,
    )


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    sent = None if text is None else text.format
    if sent is None:
        return None
    schema = JsonSchema(sent.name, sent.description, sent.schema, sent.strict)
    return ResponseFormat(sent.type, schema if sent.type == "json_schema" else None)


def _tool(tool: FunctionTool) -> ToolSpec:
    return ToolSpec(tool.type, FunctionSpec(tool.name, tool.description, tool.parameters, tool.strict))


def _tool_choice(sent: str | NamedFunctionTool | None) -> str | NamedTool | None:
    return NamedTool(sent.type, NamedFunction(sent.name)) if isinstance(sent, NamedFunctionTool) else sent


def _turn(item: InputItem, path: str) -> Turn:
    if item.type == "function_call_output":
        if item.output is None:
            raise _missing(f"{path}.output")
        if item.call_id is None:
            raise _missing(f"{path}.call_id")
        return Turn("tool", _text(item.output, f"{path}.output"), call_id=item.call_id)
    if item.type != "message":
        message = f"`{path}.type` must be message, function_call or function_call_output."
        raise Unsupported(message, param=f"{path}.type")
    if item.role is None:
        raise _missing(f"{path}.role")
    if item.content is None:
        raise _missing(f"{path}.content")
    return Turn(item.role, _text(item.content, f"{path}.content"))


def _call(item: InputItem, path: str) -> TurnCall:
    if item.call_id is None:
        raise _missing(f"{path}.call_id")
    if item.name is None:
        raise _missing(f"{path}.name")
    if item.arguments is None:
        raise _missing(f"{path}.arguments")
    return TurnCall(item.call_id, item.name, item.arguments)


def _missing(field: str) -> InvalidRequest:
    return InvalidRequest(f"`{field}` is required.", param=field)


def _text(content: str | list[InputPart], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        field = f"{path}[{index}]"
        if part.type not in _PARTS:
            raise Unsupported(f"`{field}.type` must be `input_text`: only text is served.", param=f"{field}.type")
        if part.text is None:
            raise _missing(f"{field}.text")
        texts.append(part.text)
    return "".join(texts)
