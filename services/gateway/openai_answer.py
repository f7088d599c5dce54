"""Shapes answers as the OpenAI API has them: whole objects and stream chunks of both endpoints. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec
from millrace.common.v1 import common_pb2

from services.gateway.chat_template import JsonValue
from services.gateway.detokenizer import Detokenizer
from services.gateway.generation import Generation, ValidRequest
from services.gateway.text_stream import TextDelta, TextToken
from services.gateway.tokenizer import Tokenizer
from services.gateway.tool_calls import ToolCallDelta

Json = dict[str, JsonValue]

# SDK enums know no `budget`: it is `length` with `millrace.stop_reason`.
_FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_BUDGET: "length",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerFacts:
    """What every object of one answer repeats."""

    generation: Generation
    created: int

    @property
    def request_id(self) -> str:
        return self.generation.request_id

    @property
    def request(self) -> ValidRequest:
        """As it runs: certain from the first event on."""
        return self.generation.request

    @property
    def model(self) -> str:
        return self.request.model.card.model.model

    def millrace(self, stop_reason: str | None = None) -> Json:
        """Our own part of an answer."""
        own: Json = {
            "request_id": self.request_id,
            "version": self.request.model.card.model.version,
            "manifest_digest": self.request.model.card.model.manifest_digest.hex(),
            "seed": self.request.sampling.seed % (1 << 64),
        }
        return own | ({"stop_reason": stop_reason} if stop_reason else {})

    @property
    def fingerprint(self) -> str:
        ref = self.request.model.card.model
        return f"mr_{ref.version}_{ref.manifest_digest.hex()[:12]}"


@dataclasses.dataclass(slots=True)
class Usage:
    """Running counts of one answer, from token ids."""

    prompt: int
    choices: list[int]
    cached: int = 0
    reasoning: dict[int, int] = dataclasses.field(default_factory=dict)

    def as_json(self) -> Json:
        completion = sum(self.choices)
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": completion,
            "total_tokens": self.prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": sum(self.reasoning.values())},
        }


DONE = b"data: [DONE]\n\n"


def data_event(chunk: Json) -> bytes:
    """An SSE event without a name."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


class Shape(Protocol):
    """One endpoint's way to say things. `done` is the event after the last chunk, empty for none."""

    done: ClassVar[bytes]

    def event(self, chunk: Json) -> bytes:
        """The SSE event of a chunk."""
        ...

    def opening(self, choice: int) -> list[Json]:
        """Chunks before the first text of a choice."""
        ...

    def chunks(self, delta: TextDelta) -> list[Json]:
        """Chunks of one delta, the finish included."""
        ...

    def closing(self, usage: Usage, *, include_usage: bool) -> list[Json]:
        """Chunks after the last finish."""
        ...

    def whole(self, deltas: Sequence[Sequence[TextDelta]], usage: Usage) -> Json:
        """The answer of a request that does not stream; deltas by choice."""
        ...


class ChatShape:
    """`/v1/chat/completions`."""

    done: ClassVar[bytes] = DONE
    event = staticmethod(data_event)

    def __init__(self, facts: AnswerFacts) -> None:
        self._facts = facts

    @functools.cached_property
    def _chunk_head(self) -> Json:
        return self._head("chat.completion.chunk")

    def opening(self, choice: int) -> list[Json]:
        chunk = self._chunk(choice, {"role": "assistant", "content": ""})
        return [chunk | {"millrace": self._facts.millrace()}]

    def chunks(self, delta: TextDelta) -> list[Json]:
        made: list[Json] = []
        logprobs = self._facts.request.sampling.HasField("logprob_count")
        said = _said(delta)
        if said or (delta.tokens and logprobs):
            made.append(self._chunk(delta.choice, said or {"content": ""}, self._logprobs(delta.tokens)))
        if delta.finish_reason is not None:
            finish = self._chunk(delta.choice, {}, None, _FINISH[delta.finish_reason])
            made.append(finish | _budget(self._facts, delta))
        return made

    def closing(self, usage: Usage, *, include_usage: bool) -> list[Json]:
        return [self._chunk_head | {"choices": [], "usage": usage.as_json()}] if include_usage else []

    def whole(self, deltas: Sequence[Sequence[TextDelta]], usage: Usage) -> Json:
        choices: list[JsonValue] = []
        for index, parts in enumerate(deltas):
            message = _message(parts)
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs([t for d in parts for t in d.tokens]),
                    "finish_reason": _finish_of(parts),
                }
            )
        head = self._head("chat.completion")
        own = self._facts.millrace(_stop_reason(deltas[0]))
        return head | {"choices": choices, "usage": usage.as_json(), "millrace": own}

    def _chunk(self, choice: int, delta: Json, logprobs: JsonValue = None, finish: str | None = None) -> Json:
        return self._chunk_head | {
            "choices": [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
        }

    def _head(self, kind: str) -> Json:
        facts = self._facts
        return {
            "id": f"chatcmpl-{facts.request_id}",
            "object": kind,
            "created": facts.created,
            "model": facts.model,
            "system_fingerprint": facts.fingerprint,
        }

    def _logprobs(self, tokens: Sequence[TextToken]) -> JsonValue:
        if not self._facts.request.sampling.HasField("logprob_count"):
            return None
        tokenizer = self._facts.request.model.tokenizer
        content: list[JsonValue] = [
            _alternative(tokenizer, t.logprobs.token)
            | {"top_logprobs": [_alternative(tokenizer, top) for top in t.logprobs.top]}
            for t in tokens
            if t.logprobs is not None
        ]
        return {"content": content, "refusal": None}


class CompletionShape:
    """`/v1/completions`."""

    done: ClassVar[bytes] = DONE
    event = staticmethod(data_event)

    def __init__(self, facts: AnswerFacts) -> None:
        self._facts = facts

    @functools.cached_property
    def _echoed(self) -> str:
        request = self._facts.request
        return request.model.tokenizer.decode(request.prompt_token_ids) if request.echo else ""

    @functools.cached_property
    def _head(self) -> Json:
        facts = self._facts
        return {
            "id": f"cmpl-{facts.request_id}",
            "object": "text_completion",
            "created": facts.created,
            "model": facts.model,
            "system_fingerprint": facts.fingerprint,
        }

    def opening(self, choice: int) -> list[Json]:
        if not self._facts.request.echo:
            return []
        return [self._chunk(choice, self._echoed, None)]

    def chunks(self, delta: TextDelta) -> list[Json]:
        logprobs = self._facts.request.sampling.HasField("logprob_count")
        has_values = logprobs and bool(delta.tokens or delta.prompt_logprobs)
        if not delta.text and not has_values and delta.finish_reason is None:
            return []
        finish = None if delta.finish_reason is None else _FINISH[delta.finish_reason]
        chunk = self._chunk(delta.choice, delta.text, self._logprobs(delta.prompt_logprobs, delta.tokens), finish)
        return [chunk | _budget(self._facts, delta)]

    def closing(self, usage: Usage, *, include_usage: bool) -> list[Json]:
        return [self._head | {"choices": [], "usage": usage.as_json()}] if include_usage else []

    def whole(self, deltas: Sequence[Sequence[TextDelta]], usage: Usage) -> Json:
        choices: list[JsonValue] = []
        prompt = next((d.prompt_logprobs for d in deltas[0] if d.prompt_logprobs), ())
        for index, parts in enumerate(deltas):
            logprobs = self._logprobs(prompt, [t for d in parts for t in d.tokens])
            text = self._echoed + "".join(d.text for d in parts)
            choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": _finish_of(parts)})
        own = self._facts.millrace(_stop_reason(deltas[0]))
        return self._head | {"choices": choices, "usage": usage.as_json(), "millrace": own}

    def _chunk(self, choice: int, text: str, logprobs: JsonValue, finish: str | None = None) -> Json:
        body: Json = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._head | {"choices": [body]}

    def _logprobs(self, prompt: Sequence[common_pb2.PositionLogprobs], tokens: Sequence[TextToken]) -> JsonValue:
        """One entry a token, offsets into the text; of an echoed prompt too, whose first has no value."""
        request = self._facts.request
        if not request.sampling.HasField("logprob_count"):
            return None
        tokenizer = request.model.tokenizer
        names: list[JsonValue] = []
        values: list[JsonValue] = []
        tops: list[JsonValue] = []
        offsets: list[JsonValue] = []
        at = 0
        echoed = Detokenizer()
        for token_id, position in zip(request.prompt_token_ids, prompt, strict=False) if request.echo else ():
            first = not names
            names.append(_token_text(tokenizer, token_id))
            values.append(None if first else _value(position.token.logprob))
            tops.append(None if first else _top(tokenizer, position))
            offsets.append(at)
            at += len(echoed.feed(tokenizer.visible_bytes(token_id)))
        for token in tokens:
            if token.logprobs is not None:
                names.append(_token_text(tokenizer, token.token_id))
                values.append(_value(token.logprobs.token.logprob))
                tops.append(_top(tokenizer, token.logprobs))
                offsets.append(len(self._echoed) + token.start)
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _said(delta: TextDelta) -> Json:
    """`delta` of a chunk."""
    said: Json = {}
    if delta.reasoning:
        said["reasoning_content"] = delta.reasoning
    if delta.text:
        said["content"] = delta.text
    if delta.calls:
        calls: list[JsonValue] = []
        for call in delta.calls:
            head: Json = {"id": call.call_id, "type": "function"} if call.name else {}
            function: Json = {"name": call.name} if call.name else {}
            calls.append({"index": call.index, **head, "function": {**function, "arguments": call.arguments}})
        said["tool_calls"] = calls
    return said


def _message(parts: Sequence[TextDelta]) -> Json:
    """`message` of a whole answer. Content is null where there are only calls."""
    content = "".join(part.text for part in parts)
    calls: dict[int, ToolCallDelta] = {}
    for call in (call for part in parts for call in part.calls):
        known = calls.get(call.index)
        calls[call.index] = (
            call if known is None else dataclasses.replace(known, arguments=known.arguments + call.arguments)
        )
    message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    if reasoning := "".join(part.reasoning for part in parts):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls.values()
        ]
    return message


def _value(logprob: float) -> float:
    """JSON has no infinity; -9999 is what the API writes for it."""
    return max(logprob, -9999.0)


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _alternative(tokenizer: Tokenizer, sent: common_pb2.Logprob) -> Json:
    raw = tokenizer.token_bytes(sent.token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _value(sent.logprob), "bytes": list(raw)}


def _top(tokenizer: Tokenizer, position: common_pb2.PositionLogprobs) -> Json:
    sent = [*position.top] or [position.token]
    return {_token_text(tokenizer, top.token_id): _value(top.logprob) for top in sent}


def _finish_of(parts: Sequence[TextDelta]) -> str | None:
    reason = parts[-1].finish_reason if parts else None
    return None if reason is None else _FINISH[reason]


def _stop_reason(parts: Sequence[TextDelta]) -> str | None:
    return "budget" if parts and parts[-1].finish_reason == common_pb2.FINISH_REASON_BUDGET else None


def _budget(facts: AnswerFacts, delta: TextDelta) -> Json:
    stop_reason = _stop_reason([delta])
    return {} if stop_reason is None else {"millrace": facts.millrace(stop_reason)}
