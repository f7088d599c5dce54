"""The grammars that hold a model to its tools: what they let through is what the parser reads, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.common.errors import InvalidRequest
from services.gateway.request_draft import ChatPrompt, GrammarDraft, RequestDraft, SamplingDraft
from services.gateway.tool_calls import ToolCallParser
from services.gateway.tool_grammar import with_tool_grammar
from services.gateway.tools import Tool, ToolChoice, ToolRules

BYTES = LLTokenizer("byte")
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "enum": ["Rom", "Oslo"]}},
}
TOOLS = (Tool("get_weather", parameters=CITY), Tool("no-args"))
FORCED = {"choice": ToolChoice.REQUIRED}
NAMED = {"choice": ToolChoice.NAMED, "named": "get_weather"}
STRICT = {"tools": (Tool("get_weather", parameters=CITY, strict=True), Tool("no-args"))}


def grammar(**rules: Any) -> GrammarDraft:
    prompt = ChatPrompt((), tools=ToolRules(**{"tools": TOOLS, **rules}))
    made = with_tool_grammar(RequestDraft(model="m", prompt=prompt, sampling=SamplingDraft())).sampling.grammar
    assert made is not None
    return made


def takes(draft: GrammarDraft, text: str) -> bool:
    """Whether the whole text is an answer."""
    source = json.dumps({"grammars": [{"lark_grammar": draft.text}]})
    matcher = LLMatcher(BYTES, source)
    assert not matcher.get_error(), matcher.get_error()
    raw = list(text.encode())
    return bool(matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting())


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ROM = call("get_weather", '{"city":"Rom","days":3}')


@pytest.mark.parametrize(
    ("rules", "text", "taken"),
    [
        (FORCED, ROM, True),
        (FORCED, ROM + "\n" + call("no-args", "{}"), True),
        (FORCED, "Hello", False),
        (FORCED, "", False),
        (FORCED, ROM + " and text", False),
        (FORCED, call("get_weather", '{"city":"Paris"}'), False),
        (FORCED, call("get_weather", '{"days":3}'), False),
        # No white space that a model could write for ever.
        (FORCED, call("get_weather", '{"city": \n\n"Rom"}'), False),
        (FORCED, call("rm", "{}"), False),
        ({**FORCED, "parallel": False}, ROM, True),
        ({**FORCED, "parallel": False}, ROM + "\n" + ROM, False),
        (NAMED, ROM, True),
        (NAMED, ROM + "\n" + ROM, False),
        (NAMED, call("no-args", "{}"), False),
        (STRICT, "Just <text>, <tool_ no call.\n", True),
        (STRICT, "", True),
        (STRICT, "Let me see.\n" + ROM + "\n" + ROM, True),
        (STRICT, call("get_weather", '{"city":"Paris"}'), False),
        (STRICT, call("no-args", '{"any":1}'), True),
        (STRICT, "<tool_call>oops", False),
    ],
)
def test_what_a_grammar_lets_through(rules: dict[str, Any], text: str, taken: bool) -> None:
    assert takes(grammar(**rules), text) is taken


def test_what_a_grammar_lets_through_is_read_as_calls() -> None:
    parser = ToolCallParser({"get_weather", "no-args"}, str)

    calls = parser.feed(ROM + "\n" + call("no-args", "{}")).calls

    assert [(c.name, c.arguments) for c in calls] == [("get_weather", '{"city":"Rom","days":3}'), ("no-args", "{}")]
    assert parser.finish().content == ""


def test_as_many_tools_as_there_may_be_fit_in_one_grammar() -> None:
    many = tuple(Tool(f"tool_{i}", parameters=CITY) for i in range(128))

    assert takes(grammar(tools=many, **FORCED), call("tool_127", '{"city":"Oslo"}'))


def test_a_name_that_begins_another_is_no_other() -> None:
    rules = {"tools": (Tool("a"), Tool("ab")), **FORCED}

    assert takes(grammar(**rules), call("ab", "{}"))
    assert not takes(grammar(**rules), call("abc", "{}"))


def test_the_field_that_asked_for_the_grammar_is_named() -> None:
    assert grammar(**FORCED).field == grammar(**NAMED).field == "tool_choice"
    assert grammar(**STRICT).field == "tools[0].function.strict"


def test_free_choice_has_no_grammar_and_another_constraint_excludes_tools() -> None:
    free = RequestDraft(model="m", prompt=ChatPrompt((), tools=ToolRules(TOOLS)), sampling=SamplingDraft())
    other = GrammarDraft(1, "response_format")
    both = RequestDraft(model="m", prompt=free.prompt, sampling=SamplingDraft(grammar=other))
    none = ChatPrompt((), tools=ToolRules(TOOLS, ToolChoice.NONE))

    assert with_tool_grammar(free) == free
    with pytest.raises(InvalidRequest):
        with_tool_grammar(both)
    kept = with_tool_grammar(RequestDraft(model="m", prompt=none, sampling=SamplingDraft(grammar=other)))
    assert kept.sampling.grammar == other
