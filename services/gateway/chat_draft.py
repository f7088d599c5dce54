"""Messages and tools of OpenAI chat bodies → the values of a draft. Pure; called by openai_draft."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.common.errors import InvalidRequest, Unsupported
from services.gateway.chat_template import JsonValue
from services.gateway.json_body import decode_raw
from services.gateway.known_fields import refuse_raw
from services.gateway.openai_types import ChatRequest, ContentPart, Message, NamedTool, SentToolCall, ToolSpec
from services.gateway.request_draft import ChatPrompt
from services.gateway.tools import Tool, ToolChoice, ToolRules

_MESSAGE_ONLY: dict[str, tuple[JsonValue, ...]] = {"annotations": ([],), "refusal": ("",)}
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def chat_prompt(body: ChatRequest) -> ChatPrompt:
    """The conversation of a chat body. Raises InvalidRequest, Unsupported."""
    settings = body.chat_template_kwargs
    return ChatPrompt(
        tuple(_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)),
        {} if settings is None else {k: v for k, v in msgspec.structs.asdict(settings).items() if v is not None},
        _rules(body),
        body.reasoning_effort,
    )


def _rules(body: ChatRequest) -> ToolRules:
    tools = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ()))
    sent, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(sent, NamedTool):
        if sent.type != "function":
            raise Unsupported("`tool_choice.type` must be `function`.", param="tool_choice.type")
        return ToolRules(tools, ToolChoice.NAMED, sent.function.name, parallel)
    if sent not in (None, "auto", "none", "required"):
        raise InvalidRequest("`tool_choice` must be auto, none, required or a named function.", param="tool_choice")
    return ToolRules(tools, ToolChoice(sent or "auto"), parallel=parallel)


def _tool(sent: ToolSpec, path: str) -> Tool:
    if sent.type != "function":
        raise Unsupported(f"`{path}.type` must be `function`.", param=f"{path}.type")
    function, field = sent.function, f"{path}.function.parameters"
    parameters = None if len(bytes(function.parameters)) == 0 else decode_raw(function.parameters, field)
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"`{field}` must be a JSON Schema.", param=field)
    return Tool(function.name, function.description, parameters, function.strict is True)


def _message(message: Message, path: str) -> dict[str, JsonValue]:
    refuse_raw(message, f"{path}.", _MESSAGE_ONLY)
    if message.role not in ROLES:
        known = ", ".join(sorted(ROLES))
        raise InvalidRequest(f"`{path}.role` must be one of {known}.", param=f"{path}.role")
    for field, value, role in (
        ("tool_call_id", message.tool_call_id, "tool"),
        ("tool_calls", message.tool_calls or None, "assistant"),
    ):
        if value is not None and message.role != role:
            raise InvalidRequest(f"`{path}.{field}` is for {role} messages.", param=f"{path}.{field}")
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"`{path}.tool_call_id` is required.", param=f"{path}.tool_call_id")
    shaped: dict[str, JsonValue] = {"role": message.role, "content": _content(message, path)}
    if message.tool_calls:
        shaped["tool_calls"] = _calls(message.tool_calls, path)
    given = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": _reasoning(message, path)}
    shaped |= {name: value for name, value in given.items() if value is not None}
    return shaped


def _reasoning(message: Message, path: str) -> str | None:
    first, second = message.reasoning_content, message.reasoning
    if None not in (first, second) and first != second:
        raise InvalidRequest(f"`{path}.reasoning` and `{path}.reasoning_content` differ.", param=f"{path}.reasoning")
    return second if first is None else first


def _content(message: Message, path: str) -> str:
    content = message.content
    if isinstance(content, list):
        return "".join(_part(part, f"{path}.content[{index}]") for index, part in enumerate(content))
    if content is None and not message.tool_calls:
        raise InvalidRequest(f"`{path}.content` is required.", param=f"{path}.content")
    return content or ""


def _calls(sent: Sequence[SentToolCall], path: str) -> list[JsonValue]:
    made: list[JsonValue] = []
    for index, call in enumerate(sent):
        if call.type != "function":
            field = f"{path}.tool_calls[{index}].type"
            raise Unsupported(f"`{field}` must be `function`.", param=field)
        function: dict[str, JsonValue] = {"name": call.function.name, "arguments": call.function.arguments}
        made.append({"id": call.id, "type": "function", "function": function})
    return made


def _part(part: ContentPart, path: str) -> str:
    refuse_raw(part, f"{path}.", {"cache_control": ({"type": "ephemeral"},)})
    if part.type not in ("text", "input_text", "output_text"):
        raise Unsupported(f"`{path}.type` must be `text`: this model reads text only.", param=f"{path}.type")
    if part.text is None:
        raise InvalidRequest(f"`{path}.text` is required.", param=f"{path}.text")
    return part.text
