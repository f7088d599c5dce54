"""The description of the HTTP API: complete, and what the door does, tried by schemathesis on every operation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CheckFunction
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from services.gateway.app import Edge
from services.gateway.generation import ValidRequest
from services.gateway.openapi import OPERATIONS, document
from tests.helpers.echo_generation import AsgiClient, FakeGenerator, Step, front, one_by_one, tokens

STOP = 1
KEY = {"Authorization": "Bearer secret"}
CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def client(store_dir: Path | None = None) -> AsgiClient:
    def script(request: ValidRequest) -> list[Step]:
        if request.sampling.embed:
            return [tokens([], finish=STOP)]
        choices = range(request.sampling.choice_count)
        return [event for choice in choices for event in one_by_one([104, 105], choice=choice)]

    generator = FakeGenerator(script)
    generator.embedding_of = lambda _request: bytes(16)
    return front(generator, store_dir=store_dir)


def routes(asked: AsgiClient) -> set[tuple[str, str]]:
    edge = asked.app
    assert isinstance(edge, Edge)
    found = set()
    for route in edge._app.routes:  # type: ignore[attr-defined]
        assert isinstance(route, Route)
        methods = (route.methods or {"GET"}) - {"HEAD"}
        found |= {(method.lower(), route.path.replace(":path}", "}")) for method in methods}
    return found


def test_every_route_is_described_and_nothing_else() -> None:
    assert {(each.method, each.path) for each in OPERATIONS} == routes(client())


async def test_the_description_is_served_to_those_with_a_key() -> None:
    asked = client()

    assert (await asked.ask("GET", "/openapi.json", headers=[])).status == 401
    answer = await asked.ask("GET", "/openapi.json")

    assert answer.status == 200
    assert answer.json() == json.loads(document())


def test_each_operation_says_its_key_its_errors_and_its_body() -> None:
    described = json.loads(document())

    assert described["security"] == [{"key": []}]
    for each in OPERATIONS:
        operation = described["paths"][each.path][each.method]
        assert operation.get("security", ["key"]) == ([] if each.public else ["key"])
        assert operation["responses"]["default"] == {"$ref": "#/components/responses/Error"}
        assert ("requestBody" in operation) == (each.body is not None)
    chat = described["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert {"model", "messages"} == set(chat["required"])


# What most bodies hold, so that not every try ends at a refusal.
LIKELY: dict[str, Any] = {
    "model": {"enum": ["tiny", "tiny@v1"]},
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string", "minLength": 1}},
            "required": ["role", "content"],
            "additionalProperties": False,
        },
    },
    "prompt": {"type": "string", "minLength": 1},
    "input": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 200}},
    "stream": {"type": "boolean"},
    "echo": {"type": "boolean"},
    "n": {"type": "integer", "minimum": 1, "maximum": 8},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 64},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "encoding_format": {"enum": ["float", "base64"]},
}


def likely(described: dict[str, Any]) -> dict[str, Any]:
    """The same operations with bodies of those fields alone."""
    for name, schema in described["components"]["schemas"].items():
        if name.endswith("Request"):
            known = {field: LIKELY[field] for field in schema["properties"] if field in LIKELY}
            text = "messages" if name == "ChatRequest" else "prompt"
            if name == "TokenizeRequest":
                del known["messages"]
            if name == "ResponsesRequest":
                known["input"] = {"type": "string", "minLength": 1}
                del known["prompt"]
            schema["properties"] = known
            schema["required"] = [field for field in known if field in (text, *schema["required"])]
    return described


SCHEMAS: dict[str, Any] = {
    "described": schemathesis.openapi.from_dict(json.loads(document())),
    "likely": schemathesis.openapi.from_dict(likely(json.loads(document()))),
}
BODIES = [(each.method, each.path) for each in OPERATIONS if each.body is not None]
LIKELY_BODIES = [
    (each.method, each.path) for each in OPERATIONS if each.body is not None and each.body.__name__.endswith("Request")
]
# A stream to come back to is looked up in Redis, which this door has not.
OTHERS = [(each.method, each.path) for each in OPERATIONS if each.body is None and not each.public and not each.streams]


@pytest.mark.parametrize(
    ("kind", "method", "path"),
    [*(("described", *each) for each in (*BODIES, *OTHERS)), *(("likely", *each) for each in LIKELY_BODIES)],
)
def test_no_input_that_the_description_allows_breaks_the_door_or_its_word(
    kind: str, method: str, path: str, tmp_path: Path
) -> None:
    operations = [found.ok() for found in SCHEMAS[kind].get_all_operations() if isinstance(found, Ok)]
    (operation,) = (each for each in operations if (each.method, each.path) == (method, path))
    app = client(tmp_path).app
    seen: set[int] = set()

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def tried(case: Any) -> None:
        response = case.call(app=app, headers=KEY)
        case.validate_response(response, checks=CHECKS)
        seen.add(response.status_code)

    tried()

    assert kind == "described" or 200 in seen
