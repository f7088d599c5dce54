"""What goes in and comes out, as plain values; and their protobuf forms."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb

Prompt = str | Sequence[int] | Sequence["Message"]
_CHOICES = {
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. `arguments` is the text it wrote: JSON, unless the model got it wrong."""

    id: str
    name: str
    arguments: str


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. A `tool` message answers the call `tool_call_id`."""

    role: str
    content: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON Schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to answer. None leaves the server's default. `tool_choice` is auto, none, required or a tool's name."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    choices: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    batch: bool = False
    user: str = ""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    json_schema: Mapping[str, Any] | None = None
    tools: Sequence[Tool] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """More of one choice. `finish_reason` is stop, length, tool_calls or budget, on its last delta only."""

    choice: int
    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    tool_calls: tuple[pb.ToolCallDelta, ...]
    finish_reason: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer; cached are part of the prompt, reasoning is part of the completion."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int


@dataclasses.dataclass(slots=True)
class Choice:
    """One whole choice."""

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    request_id: str
    model: str
    version: str
    seed: int
    choices: list[Choice]
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def message(self) -> Message:
        """The first choice, as the message to go on with."""
        first = self.choices[0]
        return Message("assistant", first.text, tool_calls=tuple(first.tool_calls), reasoning=first.reasoning)


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """What one name gives now; `id` is that name: `name@version`, `name`, or one with a route."""

    id: str
    name: str
    version: str
    max_model_len: int
    owner: str
    capabilities: tuple[str, ...] = ()
    deterministic: bool = False


def model_of(sent: pb.Model) -> Model:
    """A model as listed."""
    return Model(
        sent.id,
        sent.model.model,
        sent.model.version,
        sent.max_model_len,
        sent.owner,
        tuple(sent.capabilities),
        sent.deterministic,
    )


def generate_request(model: str, prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """The request on the wire. Raises ValueError for an empty prompt."""
    request = pb.GenerateRequest(
        model=model,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        choice_count=options.choices,
        max_token_count=options.max_tokens,
        min_token_count=options.min_tokens,
        ignore_eos=options.ignore_eos,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        priority_class=common_pb2.PRIORITY_CLASS_BATCH if options.batch else common_pb2.PRIORITY_CLASS_INTERACTIVE,
        user=options.user,
        metadata=options.metadata,
    )
    if options.json_schema is not None:
        request.grammar.kind = common_pb2.GRAMMAR_KIND_JSON_SCHEMA
        request.grammar.text = json.dumps(options.json_schema)
    messages = [item for item in prompt if isinstance(item, Message)]
    if isinstance(prompt, str):
        request.prompt = prompt
    elif messages:
        request.chat.CopyFrom(_chat(messages, options))
    else:
        ids = [item for item in prompt if isinstance(item, int)]
        if not ids:
            raise ValueError("The prompt is empty.")
        request.prompt_token_ids.token_ids.extend(ids)
    return request


def _chat(messages: Sequence[Message], options: Options) -> pb.ChatInput:
    named = options.tool_choice not in _CHOICES
    return pb.ChatInput(
        messages=[
            pb.ChatMessage(
                role=message.role,
                content=message.content,
                name=message.name,
                tool_calls=[pb.ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in message.tool_calls],
                tool_call_id=message.tool_call_id,
                reasoning=message.reasoning,
            )
            for message in messages
        ],
        tools=[
            pb.Tool(
                name=tool.name,
                description=tool.description,
                parameters="" if tool.parameters is None else json.dumps(tool.parameters),
                strict=tool.strict,
            )
            for tool in options.tools
        ],
        tool_choice=pb.TOOL_CHOICE_MODE_NAMED if named else _CHOICES[options.tool_choice],
        tool_choice_name=options.tool_choice if named else "",
        parallel_tool_calls=options.parallel_tool_calls,
        reasoning_effort=options.reasoning_effort,
    )


class AnotherRun(Exception):
    """What comes now is not the answer that had begun."""


class Gathered:
    """Puts an answer together from what comes. Of a run that is told again, what is known is left out."""

    def __init__(self) -> None:
        self._told = 0
        self._known = 0
        self.request_id = ""
        self.accepted: pb.GenerateAccepted | None = None
        self.choices: dict[int, Choice] = {}
        self.usage: Usage | None = None

    @property
    def began(self) -> bool:
        """Part of the answer has come."""
        return bool(self.choices)

    def told_again(self) -> None:
        """The request is sent once more: its responses come from the first on."""
        self._told = 0

    def take(self, response: pb.GenerateResponse) -> Delta | None:
        """The delta in a response, if there is a new one. Raises AnotherRun where an answer had begun."""
        if response.request_id != self.request_id:
            if self.began:
                raise AnotherRun
            self.request_id, self._known = response.request_id, 0
        self._told += 1
        if self._told <= self._known:
            return None
        self._known = self._told
        kind = response.WhichOneof("event")
        if kind == "accepted":
            self.accepted = response.accepted
        elif kind == "completed":
            used = response.completed.usage
            self.usage = Usage(
                used.prompt_token_count,
                used.cached_token_count,
                used.completion_token_count,
                used.reasoning_token_count,
            )
        return self._delta(response.delta) if kind == "delta" else None

    def answer(self) -> Answer:
        """The whole answer. Raises RuntimeError when its stream was not read to the end."""
        if self.accepted is None or self.usage is None:
            raise RuntimeError("The stream was not read to its end.")
        choices = [self.choices[index] for index in sorted(self.choices)]
        model = self.accepted.model
        return Answer(self.request_id, model.model, model.version, self.accepted.seed, choices, self.usage)

    def _delta(self, sent: pb.GenerateDelta) -> Delta:
        choice = self.choices.setdefault(sent.choice, Choice())
        choice.text += sent.text
        choice.reasoning += sent.reasoning
        choice.token_ids += sent.token_ids
        for call in sent.tool_calls:
            if call.index == len(choice.tool_calls):
                choice.tool_calls.append(ToolCall(call.id, call.name, call.arguments))
            else:
                known = choice.tool_calls[call.index]
                choice.tool_calls[call.index] = dataclasses.replace(known, arguments=known.arguments + call.arguments)
        if sent.finish_reason:
            name = common_pb2.FinishReason.Name(sent.finish_reason)
            choice.finish_reason = name.removeprefix("FINISH_REASON_").lower()
        return Delta(
            sent.choice,
            sent.text,
            sent.reasoning,
            tuple(sent.token_ids),
            tuple(sent.tool_calls),
            choice.finish_reason if sent.finish_reason else None,
        )
