"""Text → content and tool calls: both forms, however the text is cut, and what becomes of what is no clean JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tool_calls import ToolCallParser

NAMES = frozenset({"get_weather", "add", "no-args"})
PARIS = '{"city": "Paris"}'


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Reader:
    """A client: puts the increments together and checks their form."""

    def __init__(self) -> None:
        self.parser = ToolCallParser(NAMES, lambda index: f"id{index}")
        self.content = ""
        self.calls: list[list[str]] = []

    def read(self, *pieces: str) -> Reader:
        for parsed in [*map(self.parser.feed, pieces), self.parser.finish()]:
            self.content += parsed.content
            for delta in parsed.calls:
                if delta.name:
                    assert (delta.index, delta.call_id) == (len(self.calls), f"id{delta.index}")
                    self.calls.append([delta.name, ""])
                else:
                    assert not delta.call_id
                self.calls[delta.index][1] += delta.arguments
        return self

    @property
    def result(self) -> tuple[str, list[tuple[str, str]]]:
        return self.content, [(name, arguments) for name, arguments in self.calls]


CASES = {
    "plain words": ("Hello <b>you</b>, 1 < 2.", ("Hello <b>you</b>, 1 < 2.", [])),
    "one call": (hermes("get_weather", PARIS), ("", [("get_weather", PARIS)])),
    "content around": (
        f"Let me look.\n\n{hermes('get_weather', PARIS)}\nDone.",
        ("Let me look.\nDone.", [("get_weather", PARIS)]),
    ),
    "two calls": (
        hermes("get_weather", PARIS) + "\n" + hermes("add", '{"a": 1, "b": [2, {"c": 3}]}') + "\n",
        ("", [("get_weather", PARIS), ("add", '{"a": 1, "b": [2, {"c": 3}]}')]),
    ),
    "no space": (
        '<tool_call>{"name":"add","arguments":{}}</tool_call><tool_call>{"name":"add","arguments":{"a":1}}</tool_call>',
        ("", [("add", "{}"), ("add", '{"a":1}')]),
    ),
    "braces and markers in strings": (
        hermes("get_weather", r'{"city": "a}]\"</tool_call>{ \\"}'),
        ("", [("get_weather", r'{"city": "a}]\"</tool_call>{ \\"}')]),
    ),
    "arguments first": (
        '<tool_call>\n{"arguments": {"city": "Zürich"}, "name": "get_weather"}\n</tool_call>',
        ("", [("get_weather", '{"city": "Zürich"}')]),
    ),
    "arguments encoded twice": (
        hermes("get_weather", json.dumps(PARIS)),
        ("", [("get_weather", PARIS)]),
    ),
    "no arguments": ('<tool_call>{"name": "no-args"}</tool_call>', ("", [("no-args", "{}")])),
    "null arguments": (hermes("no-args", "null"), ("", [("no-args", "{}")])),
    "more keys after the arguments": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": "x", "more": {"b": "}"}}</tool_call>ok',
        ("ok", [("add", '{"a": 1}')]),
    ),
    "no closing marker": (
        f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}\nAnd more.',
        ("And more.", [("get_weather", PARIS)]),
    ),
    "a brace too many": (
        f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}}}\n</tool_call>',
        ("", [("get_weather", PARIS)]),
    ),
    "a brace too few": (
        f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}\n</tool_call>!',
        ("!", [("get_weather", PARIS)]),
    ),
    "plain object": (
        f' {{"name": "get_weather", "parameters": {PARIS}}} ',
        ("", [("get_weather", PARIS)]),
    ),
    "plain array": (
        f'[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "add", "arguments": {{"a": 1}}}}]\n',
        ("", [("get_weather", PARIS), ("add", '{"a": 1}')]),
    ),
    "plain object with type first": (
        f'{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}',
        ("", [("get_weather", PARIS)]),
    ),
    # What never becomes a call is content, as it was written.
    "an unknown tool": (hermes("rm", "{}"), (hermes("rm", "{}"), [])),
    "an unknown plain tool": ('{"name": "rm", "arguments": {}}', ('{"name": "rm", "arguments": {}}', [])),
    "other JSON": ('{"title": "x", "name": "add"}', ('{"title": "x", "name": "add"}', [])),
    "an array of numbers": ("[1, 2, 3]", ("[1, 2, 3]", [])),
    "a call's object later in the text": (
        f'It is {{"name": "get_weather", "arguments": {PARIS}}}',
        (f'It is {{"name": "get_weather", "arguments": {PARIS}}}', []),
    ),
    "no JSON between the markers": (
        "a \n<tool_call>add(1, 2)</tool_call>",
        ("a \n<tool_call>add(1, 2)</tool_call>", []),
    ),
    "arguments of another kind": (hermes("add", "[1]"), (hermes("add", "[1]"), [])),
    "cut before the head": ('x <tool_call>{"name": "add", "argu', ('x <tool_call>{"name": "add", "argu', [])),
    "cut inside a marker": ("x <tool_c", ("x <tool_c", [])),
    "whitespace only": (" \n ", (" \n ", [])),
    "nothing": ("", ("", [])),
    # What breaks after its head is a call with raw arguments.
    "cut inside the arguments": ('<tool_call>{"name": "add", "arguments": {"a": [1', ("", [("add", '{"a": [1')])),
    "arguments that break": (
        '<tool_call>{"name": "add", "arguments": {"a": 1] oops}}</tool_call> more',
        (" more", [("add", '{"a": 1] oops}}')]),
    ),
    "plain arguments that break": (
        '{"name": "add", "arguments": {"a": @1}} and so on',
        ("", [("add", '{"a": @1}} and so on')]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_read_by_the_written_rule_whole_and_character_by_character(name: str) -> None:
    text, expected = CASES[name]

    assert Reader().read(text).result == expected
    assert Reader().read(*text).result == expected


_TEXT = st.text(alphabet='<tool_ca>/{}[]":, \n\\name1é', max_size=12)
_CALL = st.builds(
    hermes,
    st.sampled_from(sorted(NAMES)),
    st.dictionaries(st.text(max_size=6), st.text(max_size=8) | st.integers() | st.none(), max_size=3).map(json.dumps),
)


@given(st.lists(_TEXT | _CALL | st.sampled_from(["<tool_call>", "</tool_call>"]), max_size=5).map("".join), st.data())
def test_how_text_is_cut_changes_nothing_and_nothing_is_invented(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    reader = Reader().read(*pieces)

    assert reader.result == Reader().read(text).result
    assert reader.parser.held_count == 0 or reader.calls
    if not reader.calls:
        assert reader.content == text
    for name, _ in reader.calls:
        assert name in NAMES


def test_arguments_stream_and_a_marker_that_may_begin_is_held_back() -> None:
    parser = ToolCallParser(NAMES, str)

    assert parser.feed("Hi <too").content == "Hi"
    assert parser.held_count == 5
    assert parser.feed("th").content == " <tooth"
    assert parser.feed('<tool_call>{"name": "add", "arguments": ').calls == ()
    first = parser.feed('{"a": ').calls
    assert [(d.index, d.call_id, d.name, d.arguments) for d in first] == [(0, "0", "add", '{"a": ')]
    second = parser.feed("12").calls
    assert [(d.index, d.call_id, d.name, d.arguments) for d in second] == [(0, "", "", "12")]
    assert (parser.call_count, parser.finished_calls) == (1, 0)
    parser.feed("}")
    assert (parser.call_count, parser.finished_calls) == (1, 1)
