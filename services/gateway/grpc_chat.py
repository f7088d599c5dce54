"""Chat of the gRPC door: messages, tools and tool calls between protobuf and the values of a draft. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from millrace.gateway.v1 import gateway_service_pb2 as pb

from services.common.errors import InvalidRequest
from services.gateway.chat_draft import ROLES
from services.gateway.chat_template import JsonValue
from services.gateway.request_draft import ChatPrompt
from services.gateway.tool_calls import ToolCallDelta
from services.gateway.tools import Tool, ToolChoice, ToolRules

_CHOICES = {
    pb.TOOL_CHOICE_MODE_UNSPECIFIED: ToolChoice.AUTO,
    pb.TOOL_CHOICE_MODE_AUTO: ToolChoice.AUTO,
    pb.TOOL_CHOICE_MODE_NONE: ToolChoice.NONE,
    pb.TOOL_CHOICE_MODE_REQUIRED: ToolChoice.REQUIRED,
    pb.TOOL_CHOICE_MODE_NAMED: ToolChoice.NAMED,
}


def chat_of(sent: pb.ChatInput) -> ChatPrompt:
    """The conversation of a request. Raises InvalidRequest."""
    if sent.tool_choice not in _CHOICES:
        raise InvalidRequest("`tool_choice` is not known.", param="tool_choice")
    rules = ToolRules(
        tuple(_tool(tool, f"tools[{index}].function.parameters") for index, tool in enumerate(sent.tools)),
        _CHOICES[sent.tool_choice],
        sent.tool_choice_name,
        sent.parallel_tool_calls if sent.HasField("parallel_tool_calls") else True,
    )
    messages = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(sent.messages))
    effort = sent.reasoning_effort if sent.HasField("reasoning_effort") else None
    return ChatPrompt(messages, tools=rules, reasoning_effort=effort)


def call_deltas(calls: Sequence[ToolCallDelta]) -> list[pb.ToolCallDelta]:
    """Increments of calls as they go out."""
    return [
        pb.ToolCallDelta(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments) for call in calls
    ]


def _message(sent: pb.ChatMessage, path: str) -> dict[str, JsonValue]:
    if sent.role not in ROLES:
        raise InvalidRequest(f"`{path}.role` is not known.", param=f"{path}.role")
    for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(sent, field) and sent.role != role:
            raise InvalidRequest(f"`{path}.{field}` is for {role} messages.", param=f"{path}.{field}")
    message: dict[str, JsonValue] = {"role": sent.role, "content": sent.content}
    if sent.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in sent.tool_calls
        ]
    given = {"name": sent.name, "tool_call_id": sent.tool_call_id, "reasoning_content": sent.reasoning}
    return message | {name: value for name, value in given.items() if value}


def _tool(sent: pb.Tool, field: str) -> Tool:
    try:
        parameters = json.loads(sent.parameters) if sent.parameters else None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"`{field}` is not valid JSON.", param=field) from None
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"`{field}` must be a JSON Schema.", param=field)
    return Tool(sent.name, sent.description or None, parameters, sent.strict)
