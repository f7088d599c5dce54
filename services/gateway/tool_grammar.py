"""Tool rules → the grammar that makes the model keep them, in llguidance's Lark. Pure; called by the validator."""

from __future__ import annotations

import dataclasses
import json

from millrace.common.v1 import common_pb2

from services.common.errors import InvalidRequest
from services.gateway.chat_template import JsonValue
from services.gateway.request_draft import ChatPrompt, GrammarDraft, RequestDraft
from services.gateway.tools import CALL_CLOSE, CALL_OPEN, NO_TOOLS, ToolRules


def with_tool_grammar(draft: RequestDraft) -> RequestDraft:
    """The draft, held to its tool rules where they need it. The tools are already checked.

    Raises InvalidRequest when the request constrains its answer in another way too.
    """
    rules = draft.prompt.tools if isinstance(draft.prompt, ChatPrompt) else NO_TOOLS
    grammar = _grammar(rules)
    other = draft.sampling.grammar
    if other is not None and rules.active:
        message = f"`tools` and `{other.field}` exclude each other, unless `tool_choice` is `none`."
        raise InvalidRequest(message, param=other.field)
    if grammar is None:
        return draft
    return dataclasses.replace(draft, sampling=dataclasses.replace(draft.sampling, grammar=grammar))


def _grammar(rules: ToolRules) -> GrammarDraft | None:
    """`required` and a named tool hold every call to its schema; under `auto` only `strict` tools ask for that."""
    if rules.forced:
        calls = "call" if rules.single else 'call ("\\n" call)*'
        return _lark("tool_choice", [f"start: {calls}", _call(CALL_OPEN + "\n")], rules)
    strict = next((at for at, tool in enumerate(rules.tools) if tool.strict), None)
    if strict is None or not rules.active:
        return None
    # Text runs free up to the marker of a call, and from there on the schema holds.
    lines = [
        "start: (until_call call)* REST",
        f'until_call[suffix="{CALL_OPEN}"]: /(.|\\n)*/',
        f"REST: /(.|\\n)*/ & ~/(.|\\n)*{CALL_OPEN}(.|\\n)*/",
        _call("\n"),
    ]
    return _lark(f"tools[{strict}].function.strict", lines, rules)


def _call(opening: str) -> str:
    return f"call: {json.dumps(opening)} tool {json.dumps(chr(10) + CALL_CLOSE)}"


def _lark(field: str, lines: list[str], rules: ToolRules) -> GrammarDraft:
    offered = rules.callable_tools
    lines.append("tool: " + " | ".join(f"tool_{at}" for at in range(len(offered))))
    for at, tool in enumerate(offered):
        head = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
        lines.append(f'tool_{at}: {head} arguments_{at} "}}"')
        own = dict(tool.parameters or {}) if rules.forced or tool.strict else {}
        # No free whitespace: a model could write it for ever.
        schema: dict[str, JsonValue] = {"type": "object", **own, "x-guidance": {"whitespace_flexible": False}}
        lines.append(f"arguments_{at}: %json {json.dumps(schema)}")
    return GrammarDraft(common_pb2.GRAMMAR_KIND_LARK, field, "\n".join(lines) + "\n")
