"""Shapes answers as `/v1/responses` has them: the object, and the numbered events of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from millrace.common.v1 import common_pb2

from services.gateway.openai_answer import AnswerFacts, Json, Usage
from services.gateway.responses_types import ResponsesRequest
from services.gateway.text_stream import TextDelta

_INCOMPLETE = frozenset({common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_BUDGET})


class ResponsesShape:
    """One answer. `document` is the finished object, once there is one."""

    done: ClassVar[bytes] = b""

    def __init__(self, facts: AnswerFacts, body: ResponsesRequest) -> None:
        self._facts = facts
        self._body = body
        self._number = 0
        self._text = ""
        self._finish: int = common_pb2.FINISH_REASON_UNSPECIFIED
        self.document: Json | None = None

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._text

    def event(self, chunk: Json) -> bytes:
        """An SSE event with its name."""
        return b"event: %b\ndata: %b\n\n" % (str(chunk["type"]).encode(), msgspec.json.encode(chunk))

    def opening(self, choice: int) -> list[Json]:
        """The response, its only item and its only part begin."""
        begun = self._object("in_progress", [], None)
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=choice, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **self._place, part=_part("")),
        ]

    def chunks(self, delta: TextDelta) -> list[Json]:
        """New text, and the end of part and item."""
        made: list[Json] = []
        self._text += delta.text
        if delta.text:
            made.append(self._event("response.output_text.delta", **self._place, delta=delta.text, logprobs=[]))
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            part, item = _part(self._text), self._item(self._status, [_part(self._text)])
            made.append(self._event("response.output_text.done", **self._place, text=self._text, logprobs=[]))
            made.append(self._event("response.content_part.done", **self._place, part=part))
            made.append(self._event("response.output_item.done", output_index=0, item=item))
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

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish in _INCOMPLETE else "completed"

    @property
    def _place(self) -> Json:
        return {"item_id": f"msg_{self._facts.request_id}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}  # type: ignore[dict-item]

    def _item(self, status: str, content: list[Json]) -> Json:
        item = {"id": f"msg_{self._facts.request_id}", "type": "message", "status": status, "role": "assistant"}
        return {**item, "content": list(content)}

    def _finished(self, usage: Usage) -> Json:
        counts = usage.as_json()
        return self._object(
            self._status,
            [self._item(self._status, [_part(self._text)])],
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
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
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
