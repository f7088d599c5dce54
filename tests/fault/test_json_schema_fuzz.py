"""Five hundred generated schemas: every complete answer validates, and the rest say that they were cut."""

from __future__ import annotations

import collections
import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from millrace.common.v1 import common_pb2

from services.common.errors import InvalidRequest, Unsupported
from services.gateway.grammar_checker import GrammarChecker
from services.gateway.limits import Limits
from services.gateway.request_draft import GrammarDraft
from services.worker.engine.request import FinishReason, GrammarKind, RequestKey, SamplingParams
from tests.helpers.grammar_model import closing_bias, compiled, text_of, tiny_model
from tests.helpers.model import ModelRig

pytestmark = [pytest.mark.fault, pytest.mark.timeout(1_500)]

SEED = 20_260_101
COUNT = 500
PATTERNS = ("^[a-z]+$", "^[A-Z]{2}[0-9]{1,3}$", "a|b", "[0-9]", "^(x|yz)*$", r"^\d{4}-\d{2}$", "^[^,]{1,4}$")
FORMATS = ("date", "email", "ipv4", "uuid")
# The calendar of `date` is no regular language: a 31st of February has the format's shape.
CHECKED = jsonschema.FormatChecker(formats=("email", "ipv4", "uuid"))
TEXTS = ("", "a", 'say "hi"', "back\\slash", "line\nbreak", "ключ", "😀", "/", "a b")
NUMBERS = (0, -1, 7, 1.5, -0.25, 10**12)


class Schemas:
    """Makes schemas of what the documentation says is supported."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._leaves: tuple[Callable[[], dict[str, Any]], ...] = (
            self._string,
            self._integer,
            self._number,
            self._constant,
            lambda: {"type": self._random.choice(["boolean", "null", ["boolean", "null"], ["integer", "string"]])},
        )

    def make(self) -> dict[str, Any]:
        """One schema, sometimes with a definition that it refers to."""
        schema = self._schema(0)
        if self._random.random() < 0.3:
            inner = self._schema(2)
            return {
                "$defs": {"inner": inner},
                "type": "object",
                "properties": {"first": {"$ref": "#/$defs/inner"}, "then": schema, "last": {"$ref": "#/$defs/inner"}},
                "required": self._some(["first", "then", "last"]),
                "additionalProperties": False,
            }
        return schema

    def _schema(self, depth: int) -> dict[str, Any]:
        if depth < 3 and self._random.random() < 0.75 - 0.15 * depth:
            return self._random.choice((self._object, self._object, self._array, self._any_of))(depth)
        return self._random.choice(self._leaves)()

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(["a", "b", "name", "größe", "x y", 'q"', "$ref_", "7"], self._random.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._schema(depth + 1) for name in names}}
        if self._random.random() < 0.8:
            schema["required"] = self._some(names)
        extra = self._random.choice(({}, {"additionalProperties": False}, {"additionalProperties": False}, None))
        return schema | ({"additionalProperties": self._random.choice(self._leaves)()} if extra is None else extra)

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._random.randint(0, 2)
        schema: dict[str, Any] = {"type": "array", "items": self._schema(depth + 1), "minItems": low}
        schema["maxItems"] = low + self._random.randint(0, 3)
        if self._random.random() < 0.25:
            schema["prefixItems"] = [self._schema(depth + 1) for _ in range(self._random.randint(1, 2))]
        return schema

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._schema(depth + 1) for _ in range(self._random.randint(1, 4))]}

    def _string(self) -> dict[str, Any]:
        low = self._random.randint(0, 4)
        return self._random.choice(
            (
                {"type": "string", "maxLength": 6},
                {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 8)},
                {"type": "string", "pattern": self._random.choice(PATTERNS)},
                {"type": "string", "format": self._random.choice(FORMATS)},
                {"type": "string"},
            )
        )

    def _integer(self) -> dict[str, Any]:
        low = self._random.randint(-1_000, 1_000)
        return self._random.choice(
            (
                {"type": "integer"},
                {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 5_000)},
                {"type": "integer", "exclusiveMinimum": low},
                {"type": "integer", "multipleOf": self._random.choice([2, 5, 10]), "minimum": 0, "maximum": 1_000},
            )
        )

    def _number(self) -> dict[str, Any]:
        low = self._random.randint(-50, 50) / 4
        return self._random.choice(
            (
                {"type": "number"},
                {"type": "number", "minimum": low, "maximum": low + self._random.randint(1, 40) / 8},
                {"type": "number", "exclusiveMaximum": low},
            )
        )

    def _constant(self) -> dict[str, Any]:
        values = [*TEXTS, *NUMBERS, None, True, [1, "a"], {"k": [None]}]
        if self._random.random() < 0.4:
            return {"const": self._random.choice(values)}
        return {"enum": self._random.sample(values, self._random.randint(1, 6))}

    def _some(self, names: list[str]) -> list[str]:
        return self._random.sample(names, self._random.randint(0, len(names)))


async def test_every_answer_to_500_generated_schemas_validates_or_says_that_it_was_cut() -> None:
    schemas = Schemas(SEED)
    sent = [schemas.make() for _ in range(COUNT)]
    taken, refused = await judged_at_the_edge(sent)
    rig = ModelRig(model=tiny_model(), num_blocks=2_048, max_num_seqs=32)
    for index in taken:
        grammar = compiled(GrammarKind.JSON_SCHEMA, json.dumps(sent[index]))
        sampling = SamplingParams(
            max_tokens=120, seed=index, temperature=0.9, top_k=50, grammar=grammar, logit_bias=closing_bias(6.0)
        )
        rig.add(str(index), [1, 100 + index], sampling=sampling)
    rig.run(limit=50_000)

    wrong, ends = [], collections.Counter[str]()
    for index in taken:
        end = rig.outputs[RequestKey(str(index), 0, 1)][-1]
        ends[str(end.finish_reason)] += 1
        problem = problem_of(rig, index, sent[index], end.finish_reason)
        if problem is not None:
            wrong.append((problem, sent[index]))
    print(f"seed {SEED}: {COUNT} schemas, {len(taken)} taken, ends {dict(ends)}, refused {dict(refused)}")
    assert wrong == []
    assert len(taken) >= 0.9 * COUNT
    assert ends[str(FinishReason.STOP)] >= 0.7 * len(taken)


async def judged_at_the_edge(sent: list[dict[str, Any]]) -> tuple[list[int], collections.Counter[str]]:
    """Which schemas the gateway takes, and why it refuses the others."""
    checker = GrammarChecker()
    taken: list[int] = []
    refused = collections.Counter[str]()
    for index, schema in enumerate(sent):
        draft = GrammarDraft(common_pb2.GRAMMAR_KIND_JSON_SCHEMA, "guided_json", json.dumps(schema))
        try:
            await checker.check("acme", draft, Limits())
            taken.append(index)
        except (InvalidRequest, Unsupported) as error:
            refused[str(error)] += 1
    await checker.close()
    return taken, refused


def problem_of(rig: ModelRig, index: int, schema: dict[str, Any], end: FinishReason | None) -> str | None:
    """What is wrong with an answer; None when it keeps the promise."""
    text = text_of(rig, str(index))
    if any(len(run) > 16 for run in re.findall(r"[ \n\t\r]+", re.sub(r'"(?:[^"\\]|\\.)*"?', "x", text))):
        return f"white space without end in {text!r}"
    if end is FinishReason.LENGTH:
        return None
    if end is not FinishReason.STOP:
        return f"ended by {end}"
    try:
        jsonschema.Draft202012Validator(schema, format_checker=CHECKED).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error)[:200]} in {text!r}"
    return None
