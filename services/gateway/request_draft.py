"""A request as either door understood it, before any check of values: one form for HTTP and gRPC. Values only.

None is "not given". Field names are those of the OpenAI API, which is how errors name them; a prompt knows its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from millrace.common.v1 import common_pb2

from services.gateway.chat_template import JsonValue
from services.gateway.tools import NO_TOOLS, ToolRules

# A header, and gRPC metadata: requests of one session go to one version of a model while its routes stay.
SESSION = "x-millrace-session"


@dataclasses.dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's template; content is already one string each, arguments of calls are as sent."""

    messages: tuple[Mapping[str, JsonValue], ...]
    template_settings: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)
    tools: ToolRules = NO_TOOLS
    reasoning_effort: str | None = None
    field: str = "messages"


@dataclasses.dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text; control tokens in it are text."""

    text: str
    field: str = "prompt"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as given; not yet checked against the vocabulary."""

    token_ids: tuple[int, ...]
    field: str = "prompt"


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarDraft:
    """A structured-output constraint; `field` is where it came from."""

    kind: common_pb2.GrammarKind.ValueType
    field: str
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDraft:
    """Sampling fields as sent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarDraft | None = None
    embed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestDraft:
    """A whole request as sent."""

    model: str
    prompt: Prompt
    sampling: SamplingDraft
    user: str = ""
    session: str = ""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    priority_class: common_pb2.PriorityClass.ValueType = common_pb2.PRIORITY_CLASS_INTERACTIVE
    resume_policy: common_pb2.ResumePolicy.ValueType = common_pb2.RESUME_POLICY_RESUME
    timeout_s: float | None = None
    echo: bool = False
