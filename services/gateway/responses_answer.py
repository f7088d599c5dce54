"""Shapes answers as `/v1/responses` has them: the object, and the numbered events of a stream. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec
from millrace.common.v1 import common_pb2

from services.gateway.chat_template import JsonValue
from services.gateway.json_body import decode_raw
from services.gateway.openai_answer import AnswerFacts, Json, Usage
from services.gateway.responses_types import FunctionTool, NamedFunctionTool, ResponsesRequest, Turn, TurnCall
from services.gateway.text_stream import TextDelta

_INCOMPLETE = frozenset({common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_BUDGET})


@dataclasses.dataclass(slots=True)
class _Item:
    """One item of the output. `text` is what came of it; `call_id` and `name` are a call's."""

    kind: Literal["message", "function_call", "reasoning"]
    item_id: str
    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""

    def as_json(self, status: str) -> Json:
        """The item as it stands; one of text is without a part where it has just begun."""
        head: Json = {"id": self.item_id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        parts: list[JsonValue] = [] if status == "in_progress" else [self.part()]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": parts}
        return {**head, "role": "assistant", "content": parts}

    def part(self) -> Json:
        """Its one part of text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class ResponsesShape:
    """One answer, item after item: one is open at a time. `document` is the finished object, once there is one."""

    done: ClassVar[bytes] = b""

    def __init__(self, facts: AnswerFacts, body: ResponsesRequest) -> None:
        self._facts = facts
        self._body = body
        self._number = 0
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._finish: int = common_pb2.FINISH_REASON_UNSPECIFIED
        self.document: Json | None = None

    @property
    def turn(self) -> Turn:
        """The answer so far, as the conversation keeps it."""
        calls = [TurnCall(item.call_id, item.name, item.text) for item in self._items if item.kind == "function_call"]
        said = {kind: "".join(i.text for i in self._items if i.kind == kind) for kind in ("message", "reasoning")}
        return Turn("assistant", said["message"], calls, reasoning=said["reasoning"] or None)

    def event(self, chunk: Json) -> bytes:
        """An SSE event with its name."""
        return b"event: %b\ndata: %b\n\n" % (str(chunk["type"]).encode(), msgspec.json.encode(chunk))

    def opening(self, choice: int) -> list[Json]:
        """The response begins, with its message unless it may turn out to be a call or to begin with reasoning."""
        begun = self._object("in_progress", [], None)
        made = [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]
        request = self._facts.request
        return made if request.tools.active or request.reasoning is not None else made + self._begin_message()

    def chunks(self, delta: TextDelta) -> list[Json]:
        """New reasoning, text and calls, and the end of what is open."""
        made: list[Json] = []
        if delta.reasoning:
            if self._open is None or self._open.kind != "reasoning":
                made += self._end("completed")
                index = len(self._items)
                made += self._begin(_Item("reasoning", f"rs_{self._facts.request_id}" + _numbered(index), index))
            made += self._add(delta.reasoning, "response.reasoning_text.delta")
        if delta.text:
            if self._open is None or self._open.kind != "message":
                made += self._end("completed") + self._begin_message()
            made += self._add(delta.text, "response.output_text.delta", logprobs=[])
        for call in delta.calls:
            if call.name:
                made += self._end("completed")
                item = _Item("function_call", f"fc_{call.call_id}", len(self._items), call.call_id, call.name)
                made += self._begin(item)
            if call.arguments:
                made += self._add(call.arguments, "response.function_call_arguments.delta")
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            if not self._items:
                made += self._begin_message()
            made += self._end(self._status)
        return made

    def closing(self, usage: Usage, *, include_usage: bool) -> list[Json]:
        """The whole response; it always tells the usage."""
        self.document = self._finished(usage)
        return [self._event(f"response.{self._status}", response=self.document)]

    def whole(self, deltas: Sequence[Sequence[TextDelta]], usage: Usage) -> Json:
        """The answer of a request that does not stream."""
        for delta in deltas[0]:
            self.chunks(delta)
        self.document = self._finished(usage)
        return self.document

    def _begin_message(self) -> list[Json]:
        index = len(self._items)
        return self._begin(_Item("message", f"msg_{self._facts.request_id}" + _numbered(index), index))

    def _begin(self, item: _Item) -> list[Json]:
        self._items.append(item)
        self._open = item
        made = [self._event("response.output_item.added", output_index=item.index, item=item.as_json("in_progress"))]
        if item.kind == "function_call":
            return made
        return [*made, self._event("response.content_part.added", **self._place(part=True), part=item.part())]

    def _add(self, text: str, kind: str, **fields: object) -> list[Json]:
        item = self._items[-1]
        item.text += text
        return [self._event(kind, **self._place(part=item.kind != "function_call"), delta=text, **fields)]

    def _end(self, status: str) -> list[Json]:
        item, self._open = self._open, None
        if item is None:
            return []
        done = {"output_index": item.index, "item": item.as_json(status)}
        if item.kind == "function_call":
            place = {**self._place(), "name": item.name, "arguments": item.text}
            return [
                self._event("response.function_call_arguments.done", **place),
                self._event("response.output_item.done", **done),
            ]
        place = self._place(part=True)
        told = (
            self._event("response.reasoning_text.done", **place, text=item.text)
            if item.kind == "reasoning"
            else self._event("response.output_text.done", **place, text=item.text, logprobs=[])
        )
        return [
            told,
            self._event("response.content_part.done", **place, part=item.part()),
            self._event("response.output_item.done", **done),
        ]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish in _INCOMPLETE else "completed"

    def _place(self, *, part: bool = False) -> Json:
        item = self._items[-1]
        place: Json = {"item_id": item.item_id, "output_index": item.index}
        return {**place, "content_index": 0} if part else place

    def _event(self, kind: str, **fields: object) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}  # type: ignore[dict-item]

    def _finished(self, usage: Usage) -> Json:
        counts = usage.as_json()
        return self._object(
            self._status,
            [item.as_json(self._status if item is self._items[-1] else "completed") for item in self._items],
            {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            },
        )

    def _object(self, status: str, output: list[Json], usage: Json | None) -> Json:
        body, sampling = self._body, self._facts.request.sampling
        return {
            "id": response_id(self._facts.request_id),
            "object": "response",
            "created_at": self._facts.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": dict(body.metadata or {}),
            "model": self._facts.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": _format(body)},
            "tool_choice": _tool_choice(body),
            "tools": [_tool(tool) for tool in body.tools or ()],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
            "millrace": self._facts.millrace("budget" if self._finish == common_pb2.FINISH_REASON_BUDGET else None),
        }


def response_id(request_id: str) -> str:
    """Name of the response that a request made."""
    return f"resp_{request_id}"


def _numbered(index: int) -> str:
    return f"_{index}" if index else ""


def _format(body: ResponsesRequest) -> Json:
    sent = None if body.text is None else body.text.format
    if sent is None or sent.type != "json_schema":
        return {"type": "text" if sent is None else sent.type}
    named: Json = {"type": sent.type, "name": sent.name, "description": sent.description, "strict": sent.strict is True}
    return {**named, "schema": decode_raw(sent.schema, "text.format.schema")}


def _tool(tool: FunctionTool) -> Json:
    parameters: JsonValue = decode_raw(tool.parameters, "tools") if len(bytes(tool.parameters)) else None
    described: Json = {"type": "function", "name": tool.name, "description": tool.description}
    return {**described, "parameters": parameters, "strict": tool.strict is True}


def _tool_choice(body: ResponsesRequest) -> JsonValue:
    sent = body.tool_choice
    if isinstance(sent, NamedFunctionTool):
        return {"type": sent.type, "name": sent.name}
    return sent or "auto"
