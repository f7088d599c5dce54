"""A structured-output constraint → the source that llguidance compiles, and the limits that it compiles under.

Shared so that the gateway validates exactly what the worker runs. Pure; imported by those two only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

# Longest run of white space between two JSON tokens: without a bound a model can emit spaces to its length limit.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,16}"
# Of llguidance's LLParserLimits, whose defaults suit one trusted user. Fuel bounds what a compile or a step costs;
# a running matcher takes about 2 kB a lexer state.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class GrammarError(Exception):
    """This grammar cannot be used, or allows nothing here. One clause that never quotes the grammar."""


def grammar_source(kind: str, text: str, choices: Sequence[str]) -> str:
    """`kind` is json_schema, json_object, regex, choice or lark. Raises GrammarError for what is not well-formed."""
    if kind == "json_object":
        return _schema_source({"type": "object"})
    if kind == "json_schema":
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            raise GrammarError("the schema is not JSON") from None
        return _schema_source({} if schema is True else schema)
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "choice":
        # One expression, so that a choice that begins another does not end it; escaped, so that all of it is text.
        return str(LLMatcher.grammar_from_regex("|".join("".join(map(_escaped, choice)) for choice in choices)))
    if kind == "lark":
        # Wrapped: a bare text that begins with a brace would be read as llguidance's own JSON.
        return json.dumps({"grammars": [{"lark_grammar": text}]})
    raise GrammarError("there is no such kind of grammar")


def _schema_source(schema: object) -> str:
    if not isinstance(schema, dict):
        raise GrammarError("a schema is a JSON object")
    return str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITE_SPACE}))


def _escaped(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
