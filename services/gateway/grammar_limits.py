"""Limits of a structured-output constraint that need no compiler: sizes, shape of a schema, where references go.

Pure; raises with the field named. Called by the grammar checker before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from millrace.common.v1 import common_pb2

from services.common.errors import InvalidRequest, Unsupported
from services.gateway.chat_template import JsonValue
from services.gateway.json_body import decode_raw, is_deeper_than
from services.gateway.limits import Limits
from services.gateway.request_draft import GrammarDraft

# Where a schema holds other schemas; all else in it is data.
_ONE = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_MANY = frozenset({"allOf", "anyOf", "oneOf", "items", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
# `x-guidance` would change how the schema is compiled; the others change where `#` points.
_REFUSED = frozenset({"x-guidance", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"})


def check_grammar_limits(grammar: GrammarDraft, limits: Limits) -> None:
    """Raises InvalidRequest or Unsupported for what is outside the limits."""
    field = grammar.field
    size = len(grammar.text.encode("utf-8", "surrogatepass")) + sum(len(c.encode()) for c in grammar.choices)
    if size > limits.schema_bytes:
        raise InvalidRequest(f"`{field}` takes at most {limits.schema_bytes} bytes.", param=field)
    kind = grammar.kind
    if kind == common_pb2.GRAMMAR_KIND_JSON_SCHEMA:
        _SchemaWalk(grammar, limits).check()
    elif kind == common_pb2.GRAMMAR_KIND_REGEX:
        _check_pattern(grammar.text, field, limits)
    elif kind == common_pb2.GRAMMAR_KIND_CHOICE:
        if not 0 < len(grammar.choices) <= limits.schema_enum or not all(grammar.choices):
            raise InvalidRequest(f"`{field}` takes 1 to {limits.schema_enum} choices, none empty.", param=field)
    elif kind == common_pb2.GRAMMAR_KIND_LARK:
        # A rule is a line at least: what recurses through rules is bounded by their number.
        if not grammar.text.strip() or len(grammar.text.split("\n")) > limits.schema_nodes:
            raise InvalidRequest(f"`{field}` takes 1 to {limits.schema_nodes} lines.", param=field)
    elif kind != common_pb2.GRAMMAR_KIND_JSON_OBJECT:
        raise InvalidRequest(f"`{field}.kind` is not a kind of grammar.", param=f"{field}.kind")


def _check_pattern(pattern: str, field: str, limits: Limits) -> None:
    if not 0 < len(pattern.encode("utf-8", "surrogatepass")) <= limits.pattern_bytes:
        raise InvalidRequest(f"A pattern in `{field}` has 1 to {limits.pattern_bytes} bytes.", param=field)


class _SchemaWalk:
    """One pass over a schema. A reference counts as a level, so depth bounds this recursion too."""

    def __init__(self, grammar: GrammarDraft, limits: Limits) -> None:
        self._field = grammar.field
        self._limits = limits
        raw = grammar.text.encode("utf-8", "surrogatepass")
        if is_deeper_than(raw, 4 * limits.schema_depth):
            raise self._too_deep()
        self._root = decode_raw(msgspec.Raw(raw), self._field)
        # Found at most once each, however many references lead there.
        self._nodes: set[int] = set()
        # Levels below each reference; None while it is being followed.
        self._heights: dict[str, int | None] = {}

    def check(self) -> None:
        """Raises InvalidRequest or Unsupported."""
        if self._root is not True and not isinstance(self._root, dict):
            raise InvalidRequest(f"`{self._field}` must be a JSON schema: an object.", param=self._field)
        self._height(self._root, 1)

    def _height(self, schema: JsonValue, depth: int) -> int:
        """Levels of `schema`, which is at `depth`, itself included."""
        limits = self._limits
        self._nodes.add(id(schema))
        if depth > limits.schema_depth:
            raise self._too_deep()
        if len(self._nodes) > limits.schema_nodes:
            raise InvalidRequest(f"`{self._field}` has more than {limits.schema_nodes} schemas.", param=self._field)
        if not isinstance(schema, dict):
            return 1
        self._check_keywords(schema, depth)
        below = max((self._height(part, depth + 1) for part in self._parts(schema)), default=0)
        reference = schema.get("$ref")
        if reference is not None:
            below = max(below, self._followed(reference, depth + 1))
        return 1 + below

    def _check_keywords(self, schema: dict[str, JsonValue], depth: int) -> None:
        refused = sorted(_REFUSED & schema.keys()) + (["$id"] if "$id" in schema and depth > 1 else [])
        if refused:
            raise Unsupported(f"`{refused[0]}` in `{self._field}` is not supported.", param=self._field)
        values = schema.get("enum")
        if isinstance(values, list) and len(values) > self._limits.schema_enum:
            message = f"An enum in `{self._field}` takes at most {self._limits.schema_enum} values."
            raise InvalidRequest(message, param=self._field)
        patterns = schema.get("patternProperties")
        for pattern in [schema.get("pattern"), *(patterns if isinstance(patterns, dict) else ())]:
            if isinstance(pattern, str):
                _check_pattern(pattern, self._field, self._limits)

    def _parts(self, schema: dict[str, JsonValue]) -> Iterator[JsonValue]:
        for name, value in schema.items():
            if name in _MANY and isinstance(value, list):
                if len(value) > self._limits.schema_branches:
                    message = f"`{name}` in `{self._field}` takes at most {self._limits.schema_branches} schemas."
                    raise InvalidRequest(message, param=self._field)
                yield from value
            elif name in _NAMED and isinstance(value, dict):
                yield from value.values()
            elif name in _ONE:
                yield value

    def _followed(self, reference: JsonValue, depth: int) -> int:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            message = f"A `$ref` in `{self._field}` must be of the form `#/…`, inside the schema."
            raise Unsupported(message, param=self._field)
        if reference not in self._heights:
            self._heights[reference] = None
            self._heights[reference] = self._height(self._target(reference), depth)
        height = self._heights[reference]
        if height is None:
            raise Unsupported(f"`{self._field}` refers to itself; recursion is not supported.", param=self._field)
        if depth + height - 1 > self._limits.schema_depth:
            raise self._too_deep()
        return height

    def _target(self, reference: str) -> JsonValue:
        at = self._root
        for step in reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, dict) and name in at:
                at = at[name]
            elif isinstance(at, list) and name.isascii() and name.isdigit() and int(name) < len(at):
                at = at[int(name)]
            else:
                raise InvalidRequest(f"A `$ref` in `{self._field}` points nowhere.", param=self._field)
        return at

    def _too_deep(self) -> InvalidRequest:
        message = f"`{self._field}` is nested deeper than {self._limits.schema_depth} schemas."
        return InvalidRequest(message, param=self._field)
