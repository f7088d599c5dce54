"""Checks of what a chat request says about tools, and of the calls and results in its messages. Pure; both doors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from millrace.common.v1 import common_pb2

from services.common.errors import InvalidRequest
from services.gateway.chat_template import JsonValue
from services.gateway.grammar_limits import check_grammar_limits
from services.gateway.limits import Limits
from services.gateway.request_draft import GrammarDraft
from services.gateway.tools import Tool, ToolChoice, ToolRules

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID_CHARACTERS = 128


def check_tools(rules: ToolRules, limits: Limits) -> None:
    """Raises InvalidRequest or Unsupported that names the field."""
    if len(rules.tools) > limits.tools:
        raise InvalidRequest(f"`tools` takes at most {limits.tools} tools.", param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(rules.tools):
        field = f"tools[{index}].function"
        _check_name(tool.name, f"{field}.name")
        if tool.name in seen:
            raise InvalidRequest(f"`{field}.name` is there twice.", param=f"{field}.name")
        seen.add(tool.name)
        _check_parameters(tool, f"{field}.parameters", limits, held=tool.strict or rules.forced)
    if rules.forced and not rules.tools:
        raise InvalidRequest("`tool_choice` needs `tools`.", param="tool_choice")
    if rules.choice is ToolChoice.NAMED and rules.named not in seen:
        raise InvalidRequest("`tool_choice` names a tool that is not in `tools`.", param="tool_choice")


def _check_parameters(tool: Tool, field: str, limits: Limits, *, held: bool) -> None:
    """A schema that the answer is `held` to keeps every limit of structured output, one that is only shown its size."""
    if tool.parameters is None:
        return
    if tool.parameters.get("type", "object") != "object":
        raise InvalidRequest(f"`{field}` must describe an object.", param=field)
    text = json.dumps(tool.parameters)
    if held:
        check_grammar_limits(GrammarDraft(common_pb2.GRAMMAR_KIND_JSON_SCHEMA, field, text), limits)
    elif len(text) > limits.schema_bytes:
        raise InvalidRequest(f"`{field}` takes at most {limits.schema_bytes} bytes.", param=field)


def check_conversation(messages: Sequence[Mapping[str, JsonValue]]) -> None:
    """Each call is answered by one `tool` message, right after the message that made it, in any order.

    Raises InvalidRequest that names the message.
    """
    open_ids: set[str] = set()
    caller = 0
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            answered = str(message.get("tool_call_id", ""))
            if answered not in open_ids:
                field = f"messages[{index}].tool_call_id"
                raise InvalidRequest(f"`{field}` answers no open call of the message before.", param=field)
            open_ids.remove(answered)
            continue
        _check_answered(open_ids, caller)
        caller, open_ids = index, _call_ids(message, f"messages[{index}]")
    _check_answered(open_ids, caller)


def _check_answered(open_ids: set[str], caller: int) -> None:
    if open_ids:
        field = f"messages[{caller}].tool_calls"
        raise InvalidRequest(f"`{field}` has a call without a `tool` message that answers it.", param=field)


def _call_ids(message: Mapping[str, JsonValue], path: str) -> set[str]:
    calls = message.get("tool_calls")
    ids: set[str] = set()
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        field = f"{path}.tool_calls[{index}]"
        if not isinstance(call, dict) or not isinstance(function := call["function"], dict):
            raise TypeError("a call of another shape")
        call_id = str(call["id"])
        if not 0 < len(call_id) <= _ID_CHARACTERS or call_id in ids:
            message_text = f"`{field}.id` must be 1 to {_ID_CHARACTERS} characters, and not there twice."
            raise InvalidRequest(message_text, param=f"{field}.id")
        _check_name(str(function["name"]), f"{field}.function.name")
        ids.add(call_id)
    return ids


def _check_name(name: str, field: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(f"`{field}` must be 1 to 64 of a-z, A-Z, 0-9, _ and -.", param=field)
