"""Shows tools, calls and results to a model: by its own chat template, or in words where the template knows no tools.

Which of the two is found once a template, by rendering a probe. The words are the Hermes form, which tool_calls reads.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from services.common.errors import InvalidRequest
from services.gateway.chat_template import ChatTemplate, JsonValue, guarded_variables
from services.gateway.request_draft import ChatPrompt
from services.gateway.template_renderer import TemplateRenderer
from services.gateway.tools import CALL_CLOSE, CALL_OPEN, Tool, ToolChoice, ToolRules

Message = dict[str, JsonValue]

_PROBE, _RESULT = "probe_tool_name", "probe tool result"
_USER: Message = {"role": "user", "content": "Hello"}
_PROBE_CALL: JsonValue = {"id": "probe1234", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
_PREAMBLE = """\
You can call functions. Their signatures, in JSON:
<tools>
{tools}
</tools>
To call a function, write one JSON object with its name and its arguments between these tags, and nothing after it:
{open}
{{"name": "<function name>", "arguments": {{<arguments>}}}}
{close}"""


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template can show by itself."""

    tools: bool
    system: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """Messages and tools in the form that a template gets."""

    messages: Sequence[Message]
    tools: list[JsonValue] | None


class ToolPrompts:
    """Knows the traits of each template that met a tool."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        self._renderer = renderer
        self._traits: dict[ChatTemplate, TemplateTraits] = {}

    async def shown(self, template: ChatTemplate, prompt: ChatPrompt) -> Shown:
        """What to render. Raises InvalidRequest when nothing can show it."""
        messages = [dict(message) for message in prompt.messages]
        if not prompt.tools.active and not any(_speaks_of_tools(message) for message in messages):
            return Shown(messages, None)
        traits = await self.traits(template)
        offered = prompt.tools.tools if prompt.tools.active else ()
        if traits.tools:
            return Shown([_parsed(message) for message in messages], [tool.as_json() for tool in offered] or None)
        told = _in_words(messages)
        return Shown(_instructed(told, _preamble(prompt.tools), traits) if offered else told, None)

    async def traits(self, template: ChatTemplate) -> TemplateTraits:
        """Found by rendering, once a template."""
        known = self._traits.get(template)
        if known is None:
            offered = await self._render(template, [_USER], [Tool(_PROBE).as_json()])
            spoken: list[Message] = [
                _USER,
                {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
                {"role": "tool", "content": _RESULT, "tool_call_id": "probe1234", "name": _PROBE},
            ]
            called = await self._render(template, spoken, None)
            system = await self._render(template, [{"role": "system", "content": _PROBE}, _USER], None)
            known = TemplateTraits(_PROBE in offered and _PROBE in called and _RESULT in called, _PROBE in system)
            self._traits[template] = known
        return known

    async def _render(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[JsonValue] | None
    ) -> str:
        guarded = guarded_variables(template, messages, tools=tools, special_texts=(), allowed={})
        try:
            return await self._renderer.render(template, guarded)
        except InvalidRequest:
            return ""


def _speaks_of_tools(message: Message) -> bool:
    return message["role"] == "tool" or "tool_calls" in message


def _functions(message: Message) -> list[dict[str, JsonValue]]:
    calls = message.get("tool_calls")
    made = []
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(function := call["function"], dict):
            made.append(function)
    return made


def _arguments(function: Mapping[str, JsonValue]) -> JsonValue:
    """As templates want them: parsed. What is no JSON object stays the text it is."""
    text = str(function["arguments"])
    try:
        parsed: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _parsed(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    parsed: list[JsonValue] = [
        {**call, "function": {**function, "arguments": _arguments(function)}}
        for call, function in zip(calls, _functions(message), strict=True)
        if isinstance(call, dict)
    ]
    return {**message, "tool_calls": parsed}


def _in_words(messages: Sequence[Message]) -> list[Message]:
    """Calls become text of the assistant; results that follow each other one message of the user."""
    told: list[Message] = []
    in_results = False
    for message in messages:
        if message["role"] != "tool":
            in_results = False
            told.append(_call_in_words(message) if "tool_calls" in message else message)
            continue
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if in_results:
            told[-1] = {"role": "user", "content": f"{told[-1]['content']}\n{result}"}
        else:
            told.append({"role": "user", "content": result})
        in_results = True
    return told


def _call_in_words(message: Message) -> Message:
    calls = [
        json.dumps({"name": function["name"], "arguments": _arguments(function)}, ensure_ascii=False)
        for function in _functions(message)
    ]
    parts = [str(message["content"])] if message["content"] else []
    parts += [f"{CALL_OPEN}\n{call}\n{CALL_CLOSE}" for call in calls]
    return {"role": "assistant", "content": "\n".join(parts)}


def _preamble(rules: ToolRules) -> str:
    tools = "\n".join(json.dumps(tool.as_json(), ensure_ascii=False) for tool in rules.tools)
    text = _PREAMBLE.format(tools=tools, open=CALL_OPEN, close=CALL_CLOSE)
    if rules.choice is ToolChoice.NAMED:
        return f"{text}\nCall the function `{rules.named}` now."
    if rules.choice is ToolChoice.REQUIRED:
        return f"{text}\nYou must call a function now."
    return text if rules.parallel else f"{text}\nCall at most one function."


def _instructed(messages: list[Message], preamble: str, traits: TemplateTraits) -> list[Message]:
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{preamble}"}, *messages[1:]]
    if traits.system:
        return [{"role": "system", "content": preamble}, *messages]
    return [{**first, "content": f"{preamble}\n\n{first['content']}"}, *messages[1:]]
