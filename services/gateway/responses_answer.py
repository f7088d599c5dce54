"""Shapes answers as `/v1/responses` has them: the object, and the numbered events of a stream. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

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
    """One item of the output: a message, or a call where `call_id` is set. `text` is what came of it."""

    item_id: str
    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""

    def as_json(self, status: str) -> Json:
        """The item as it stands; a message without a part where it has just begun."""
        if self.call_id:
            head: Json = {"id": self.item_id, "type": "function_call", "status": status, "call_id": self.call_id}
            return {**head, "name": self.name, "arguments": self.text}
        parts: list[JsonValue] = [] if status == "in_progress" else [_part(self.text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": parts}


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
        calls = [TurnCall(item.call_id, item.name, item.text) for item in self._items if item.call_id]
        return Turn("assistant", "".join(item.text for item in self._items if not item.call_id), calls)

    def event(self, chunk: Json) -> bytes:
        """An SSE event with its name."""
        return b"event: %b\ndata: %b\n\n" % (str(chunk["type"]).encode(), msgspec.json.encode(chunk))

    def opening(self, choice: int) -> list[Json]:
        """The response begins, with its message unless it may turn out to be a call."""
        begun = self._object("in_progress", [], None)
        made = [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]
        return made if self._facts.request.tools.active else made + self._begin_message()

    def chunks(self, delta: TextDelta) -> list[Json]:
        """New text and calls, and the end of what is open."""
        made: list[Json] = []
        if delta.text:
            if self._open is None or self._open.call_id:
                made += self._end("completed") + self._begin_message()
            made += self._add(delta.text, "response.output_text.delta", logprobs=[])
        for call in delta.calls:
            if call.name:
                made += self._end("completed")
                made += self._begin(_Item(f"fc_{call.call_id}", len(self._items), call.call_id, call.name))
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
        name = f"msg_{self._facts.request_id}" + (f"_{index}" if index else "")
        made = self._begin(_Item(name, index))
        return [*made, self._event("response.content_part.added", **self._place(part=True), part=_part(""))]

    def _begin(self, item: _Item) -> list[Json]:
        self._items.append(item)
        self._open = item
        return [self._event("response.output_item.added", output_index=item.index, item=item.as_json("in_progress"))]

    def _add(self, text: str, kind: str, **fields: object) -> list[Json]:
        item = self._items[-1]
        item.text += text
        return [self._event(kind, **self._place(part=not item.call_id), delta=text, **fields)]

    def _end(self, status: str) -> list[Json]:
        item, self._open = self._open, None
        if item is None:
            return []
        done = {"output_index": item.index, "item": item.as_json(status)}
        if item.call_id:
            place = {**self._place(), "name": item.name, "arguments": item.text}
            return [
                self._event("response.function_call_arguments.done", **place),
                self._event("response.output_item.done", **done),
            ]
        place = self._place(part=True)
        return [
            self._event("response.output_text.done", **place, text=item.text, logprobs=[]),
            self._event("response.content_part.done", **place, part=_part(item.text)),
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
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
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


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _tool(tool: FunctionTool) -> Json:
    parameters: JsonValue = decode_raw(tool.parameters, "tools") if len(bytes(tool.parameters)) else None
    described: Json = {"type": "function", "name": tool.name, "description": tool.description}
    return {**described, "parameters": parameters, "strict": tool.strict is True}


def _tool_choice(body: ResponsesRequest) -> JsonValue:
    sent = body.tool_choice
    if isinstance(sent, NamedFunctionTool):
        return {"type": sent.type, "name": sent.name}
    return sent or "auto"
