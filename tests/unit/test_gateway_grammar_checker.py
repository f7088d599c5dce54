"""Structured-output constraints at the edge: each limit at its value and one past it, refusals name the field."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from millrace.common.v1 import common_pb2

from services.common.errors import InvalidRequest, MillraceError, Unsupported
from services.gateway.grammar_checker import GrammarChecker
from services.gateway.limits import Limits
from services.gateway.request_draft import GrammarDraft
from tests.helpers.echo_generation import FakeGenerator, front, one_by_one, served

LIMITS = Limits()
SCHEMA = common_pb2.GRAMMAR_KIND_JSON_SCHEMA
REGEX = common_pb2.GRAMMAR_KIND_REGEX
CHOICE = common_pb2.GRAMMAR_KIND_CHOICE
LARK = common_pb2.GRAMMAR_KIND_LARK
CATASTROPHIC = [
    "(a+)+$",
    "(a|aa)+$",
    "(a|a?)+$",
    "(.*a){20}",
    "(x+x+)+y",
    "([a-zA-Z]+)*$",
    "(.*)*=.*",
    r"^(([a-z])+.)+[A-Z]([a-z])+$",
    "(a{1,100}){1,100}",
    "((a{1,100}){1,100}){1,100}",
    ".*a.{64}",
    "(.*a.{20}){5}",
    "(a?){200}a{200}",
    ".*.*.*.*.*.*.*=.*",
    "(" * 200 + "a" + ")" * 200,
]


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    await made.close()


async def refusal(checker: GrammarChecker, kind: int, sent: object = "", *choices: str) -> str | None:
    """Why the grammar is refused; None when it is taken."""
    text = sent if isinstance(sent, str) else json.dumps(sent)
    draft = GrammarDraft(common_pb2.GrammarKind.ValueType(kind), "the_field", text, choices)
    found: list[MillraceError] = []
    try:
        await checker.check("acme", draft, LIMITS)
    except (InvalidRequest, Unsupported) as error:
        found.append(error)
    assert all(error.param == "the_field" and len(str(error)) < 400 for error in found)
    return str(found[0]) if found else None


def nested(depth: int) -> dict[str, Any]:
    return {} if depth == 1 else {"type": "array", "items": nested(depth - 1)}


def chained(depth: int) -> dict[str, Any]:
    """References count as levels: the root is one, then each definition."""
    names = [f"d{index}" for index in range(depth - 1)]
    links = {name: {"$ref": f"#/$defs/{after}"} for name, after in itertools.pairwise(names)}
    return {"$defs": {**links, names[-1]: {"type": "null"}}, "$ref": f"#/$defs/{names[0]}"}


def wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "null"} for index in range(count - 1)}}


def padded(size: int) -> str:
    start = '{"type": "null", "description": "'
    return start + "x" * (size - len(start) - 2) + '"}'


EDGES: list[tuple[int, object, object]] = [
    (SCHEMA, nested(16), nested(17)),
    (SCHEMA, chained(16), chained(17)),
    (SCHEMA, wide(512), wide(513)),
    (SCHEMA, {"anyOf": [{"const": i} for i in range(32)]}, {"anyOf": [{"const": i} for i in range(33)]}),
    (SCHEMA, {"enum": list(range(512))}, {"enum": list(range(513))}),
    (SCHEMA, {"type": "string", "pattern": "a" * 512}, {"type": "string", "pattern": "a" * 513}),
    (SCHEMA, {"patternProperties": {"a" * 512: {}}}, {"patternProperties": {"a" * 513: {}}}),
    (SCHEMA, padded(65_536), padded(65_537)),
    (REGEX, "a" * 512, "a" * 513),
    (REGEX, "é" * 256, "é" * 256 + "x"),
    (REGEX, "a", ""),
    (LARK, 'start: "a"\n' + "\n".join(f'r{i}: "b"' for i in range(511)), "#\n" * 512),
    (LARK, 'start: "a"', " "),
]
REFUSED: list[object] = [
    "",
    "{",
    "3",
    "[]",
    "false",
    {"type": "zork"},
    {"enum": []},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "format": "zork"},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "null"}},
    {"if": {}, "then": {}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"$ref": "#"},
    {"$ref": "#/$defs/gone"},
    {"$ref": "#name"},
    {"$ref": "http://169.254.169.254/latest"},
    {"$ref": "file:///etc/passwd"},
    {"$ref": 7},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    {"properties": {"a": {"$id": "http://x", "type": "null"}}},
    {"x-guidance": {"lenient": True}, "not": {}},
    {"items": {"x-guidance": {"whitespace_flexible": False}}},
    {"$dynamicRef": "#a"},
    {"allOf": [{"type": "string", "pattern": f"a.*{i}.*c"} for i in range(32)]},
]
TAKEN: list[object] = [
    True,
    {},
    {"type": "object", "properties": {"x-guidance": {"type": "null"}, "$ref": {"type": "null"}}},
    {"$defs": {"a/b~c": {"type": "null"}}, "items": {"$ref": "#/$defs/a~1b~0c"}},
    {"$defs": {"a": {"type": "null"}}, "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(200)}},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "http://x/y", "title": "T", "type": "null"},
    {"enum": ["decision", None, 1.5, {"a": []}]},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
]


async def test_a_limit_holds_at_its_value_and_not_one_past_it(checker: GrammarChecker) -> None:
    for kind, good, bad in EDGES:
        assert await refusal(checker, kind, good) is None, good
        assert await refusal(checker, kind, bad) is not None, bad


async def test_choices_are_one_to_512_and_none_is_empty(checker: GrammarChecker) -> None:
    assert await refusal(checker, CHOICE, "", *map(str, range(512))) is None
    assert await refusal(checker, CHOICE, "", *map(str, range(513))) is not None
    assert await refusal(checker, CHOICE, "") is not None
    assert await refusal(checker, CHOICE, "", "a", "") is not None


async def test_a_schema_that_is_invalid_or_not_supported_is_refused(checker: GrammarChecker) -> None:
    for schema in REFUSED:
        assert await refusal(checker, SCHEMA, schema) is not None, schema


async def test_what_generators_of_schemas_write_is_taken(checker: GrammarChecker) -> None:
    for schema in TAKEN:
        assert await refusal(checker, SCHEMA, schema) is None, schema


async def test_a_schema_5000_deep_is_refused(checker: GrammarChecker) -> None:
    assert "deeper" in str(await refusal(checker, SCHEMA, '{"items":' * 5_000 + "{}" + "}" * 5_000))


async def test_a_pattern_that_ruins_backtracking_engines_is_harmless(checker: GrammarChecker) -> None:
    # Taken or refused, and by the compiler, not by the end of its CPU time.
    for pattern in CATASTROPHIC:
        assert "too much" not in str(await refusal(checker, REGEX, pattern)), pattern
        assert "too much" not in str(await refusal(checker, SCHEMA, {"type": "string", "pattern": pattern})), pattern


async def test_a_regex_that_matches_nothing_is_refused(checker: GrammarChecker) -> None:
    assert "matches nothing" in str(await refusal(checker, REGEX, r"[^\x00-\u{10ffff}]"))


async def test_what_would_kill_or_stop_the_compiler_is_refused_and_the_next_is_served(checker: GrammarChecker) -> None:
    crash = "start: r0\n" + "".join(f'r{i}: (("x" (r{i + 1}?)+)*)?\n' for i in range(500)) + 'r500: "a"'
    for _ in range(2):
        assert "too much" in str(await refusal(checker, LARK, crash))
        assert await refusal(checker, LARK, 'start: "a"') is None


async def test_lark_cannot_be_llguidances_own_json(checker: GrammarChecker) -> None:
    assert await refusal(checker, LARK, '{"grammars": [{"json_schema": {}}]}') is not None


@pytest.mark.parametrize("kind", [0, 99])
async def test_an_unknown_kind_is_refused(checker: GrammarChecker, kind: int) -> None:
    with pytest.raises(InvalidRequest, match="kind"):
        await checker.check("acme", GrammarDraft(common_pb2.GrammarKind.ValueType(kind), "grammar"), LIMITS)


GUIDED = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "zork"}}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_json": '{"type": "zork"}'}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start"}, "guided_grammar"),
    ({"structured_outputs": {"json": {"type": "zork"}}}, "structured_outputs.json"),
]


async def test_a_bad_grammar_is_a_400_that_names_its_field() -> None:
    generator = FakeGenerator(one_by_one([65]))
    model = served()
    model.card.structured_output = True
    client = front(generator, model)

    for sent, param in GUIDED[1:]:
        answer = await client.complete(**sent)
        assert (answer.status, answer.error["param"]) == (400, param)
    assert generator.requests == []


async def test_a_model_without_structured_output_refuses_it() -> None:
    generator = FakeGenerator(one_by_one([65]))
    client = front(generator, served())

    for sent, param in GUIDED:
        answer = await client.complete(**sent)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert "not supported by this model" in answer.error["message"]
    assert generator.requests == []


async def test_a_good_grammar_travels_with_the_request() -> None:
    generator = FakeGenerator(one_by_one([65]))
    model = served()
    model.card.structured_output = True

    answer = await front(generator, model).complete(guided_choice=["yes", "no"])

    assert answer.status == 200
    ((_, request),) = generator.requests
    assert list(request.sampling.grammar.choices) == ["yes", "no"]
