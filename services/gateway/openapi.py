"""`GET /openapi.json`: the HTTP API described from the types that parse it. Pure; made once, called by the HTTP door.

A test holds the list of operations against the routes of the application.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from services.gateway.answer_types import ChatCompletion, Completion, ErrorAnswer
from services.gateway.api_types import (
    CancelAnswer,
    DetokenizeAnswer,
    DetokenizeRequest,
    EmbeddingAnswer,
    EmbeddingRequest,
    ModelList,
    ModelObject,
    TokenizeAnswer,
    TokenizeRequest,
)
from services.gateway.batch_types import Batch, BatchBody, BatchList, FileDeleted, FileList, FileObject, FileUpload
from services.gateway.chat_template import JsonValue
from services.gateway.openai_draft import served_values
from services.gateway.openai_types import ChatRequest, CompletionRequest
from services.gateway.responses_types import SERVED, ResponsesRequest

Json = dict[str, Any]
_SCHEMAS = "#/components/schemas/{name}"
_TEXT: Json = {"text/plain": {"schema": {"type": "string"}}}

_EVENT: Json = {
    "type": "object",
    "description": "One event of the stream: `data` is a chunk as JSON, an error as JSON, or `[DONE]` at the end.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path: `answer`, and events where it `streams`; plain text with neither.

    `takes` and `gives` are the media types of body and answer, `query` the names of optional parameters.
    """

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    body: type | None = None
    answer: type | None = None
    streams: bool = False
    public: bool = False
    takes: str = "application/json"
    gives: str = "application/json"
    query: tuple[str, ...] = ()


OPERATIONS = (
    Operation("get", "/healthz", "The process answers.", public=True),
    Operation("get", "/readyz", "New work is taken; 503 while not.", public=True),
    Operation("get", "/metrics", "Prometheus metrics; for peers on this machine, 404 for others.", public=True),
    Operation("get", "/openapi.json", "This description.", answer=dict),
    Operation("get", "/v1/models", "Models that the key may use.", answer=ModelList),
    Operation("get", "/v1/models/{model}", "One model.", answer=ModelObject),
    Operation("post", "/v1/chat/completions", "An answer to messages.", ChatRequest, ChatCompletion, streams=True),
    Operation("post", "/v1/completions", "A continuation of a text.", CompletionRequest, Completion, streams=True),
    Operation("post", "/v1/responses", "An answer whose turns are kept.", ResponsesRequest, dict, streams=True),
    Operation("get", "/v1/responses/{id}", "A response that is kept.", answer=dict),
    Operation("delete", "/v1/responses/{id}", "Forget a response.", answer=dict),
    Operation("post", "/v1/responses/{id}/cancel", "Stop a response that runs.", answer=dict),
    Operation("post", "/v1/files", "Keep a file.", FileUpload, FileObject, takes="multipart/form-data"),
    Operation("get", "/v1/files", "Files, newest first.", answer=FileList, query=("after", "limit", "purpose")),
    Operation("get", "/v1/files/{id}", "A file's facts.", answer=FileObject),
    Operation("delete", "/v1/files/{id}", "Forget a file.", answer=FileDeleted),
    Operation("get", "/v1/files/{id}/content", "A file's bytes.", answer=bytes, gives="application/octet-stream"),
    Operation("post", "/v1/batches", "Run the requests of a file.", BatchBody, Batch),
    Operation("get", "/v1/batches", "Batches, newest first.", answer=BatchList, query=("after", "limit")),
    Operation("get", "/v1/batches/{id}", "A batch.", answer=Batch),
    Operation("post", "/v1/batches/{id}/cancel", "Start no more lines of a batch.", answer=Batch),
    Operation("get", "/v1/streams/{request_id}", "A resumable stream, again or further.", streams=True),
    Operation("post", "/v1/embeddings", "A vector for each input.", EmbeddingRequest, EmbeddingAnswer),
    Operation("post", "/v1/requests/{id}/cancel", "Stop a request of the key's tenant.", answer=CancelAnswer),
    Operation("post", "/tokenize", "The ids that a request would have.", TokenizeRequest, TokenizeAnswer),
    Operation("post", "/detokenize", "The text of ids.", DetokenizeRequest, DetokenizeAnswer),
)


@functools.cache
def document() -> bytes:
    """The OpenAPI 3.1 description as JSON."""
    types = {kind for each in OPERATIONS for kind in (each.body, each.answer) if kind is not None}
    ordered = sorted(types | {ErrorAnswer}, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_SCHEMAS)
    for kind in (ChatRequest, CompletionRequest):
        _describe_raw(components[kind.__name__]["properties"], served_values)
    _describe_raw(components[ResponsesRequest.__name__]["properties"], SERVED.get)
    by_type = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Json] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, by_type)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Millrace", "version": "1", "description": "The OpenAI API, and what vLLM adds to it."},
            "security": [{"key": []}],
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
                "responses": {"Error": _error(by_type[ErrorAnswer])},
            },
        }
    )


def _operation(each: Operation, by_type: dict[type, Json]) -> Json:
    good: Json = {} if each.answer is None else {each.gives: {"schema": by_type[each.answer]}}
    if each.streams:
        good["text/event-stream"] = {"schema": _EVENT}
    described: Json = {
        "summary": each.summary,
        "responses": {
            "200": {"description": "Done.", "content": good or _TEXT},
            "default": {"$ref": "#/components/responses/Error"},
        },
    }
    names = [part[1:-1] for part in each.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in each.query]
    if parameters:
        described["parameters"] = parameters
    if each.body is not None:
        content = {each.takes: {"schema": by_type[each.body]}}
        described["requestBody"] = {"required": True, "content": content}
    if each.public:
        described["security"] = []
    if not good:
        # Health answers in plain text, also where it is bad.
        described["responses"]["503"] = {"description": "Not now.", "content": _TEXT}
    return described


def _describe_raw(properties: dict[str, Json], served_values: Callable[[str], tuple[JsonValue, ...] | None]) -> None:
    """Say of fields that are known by name which of their values are served, null for none."""
    for name, schema in properties.items():
        values = served_values(name)
        if schema == {} and values is not None:
            schema["enum"] = [*values, None]


def _error(schema: Json) -> Json:
    seconds = {"description": "Seconds to wait, where waiting helps.", "schema": {"type": "integer"}}
    return {
        "description": "An error in OpenAI's shape.",
        "headers": {"Retry-After": seconds},
        "content": {"application/json": {"schema": schema}},
    }
