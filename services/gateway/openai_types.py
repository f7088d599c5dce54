"""Bodies of the OpenAI API as strict types: what clients may send. Meaning is given in openai_draft.

None is absent. A field of type Raw is known but has only the values that openai_draft lists.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# A field that was not sent is an empty Raw.
ABSENT: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """One part of a message; only text is served."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT
    video_url: msgspec.Raw = ABSENT
    file: msgspec.Raw = ABSENT
    cache_control: msgspec.Raw = ABSENT


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`function` of a call that comes back; `arguments` is what the model wrote, JSON or not."""

    name: str
    arguments: str


class SentToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """One call of an assistant message. Clients that put a stream together send `index` too."""

    id: str
    function: CalledFunction
    type: str = "function"
    index: int | None = None


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True):
    """`function` of a tool."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = ABSENT
    strict: bool | None = None


class ToolSpec(msgspec.Struct, forbid_unknown_fields=True):
    """One of `tools`."""

    type: str
    function: FunctionSpec


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`function` of a `tool_choice`."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` that names a tool."""

    type: str
    function: NamedFunction


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message. The Raw fields come back from SDKs that replay an answer; they may be null or empty."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: msgspec.Raw = ABSENT
    tool_calls: list[SentToolCall] | None = None
    function_call: msgspec.Raw = ABSENT
    annotations: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = ABSENT
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`."""

    json: msgspec.Raw = ABSENT
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class TemplateSettings(msgspec.Struct, forbid_unknown_fields=True):
    """`chat_template_kwargs`: the allow-list of what a client may tell a template."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class MillraceOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`millrace`: what no other API has."""

    resume: Literal["resume", "fail"] | None = None
    timeout_s: float | None = None


class GenerationBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both endpoints know."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    priority: Literal["interactive", "batch"] | None = None
    response_format: ResponseFormat | None = None
    guided_json: msgspec.Raw = ABSENT
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    millrace: MillraceOptions | None = None
    best_of: msgspec.Raw = ABSENT
    use_beam_search: msgspec.Raw = ABSENT
    length_penalty: msgspec.Raw = ABSENT
    early_stopping: msgspec.Raw = ABSENT
    skip_special_tokens: msgspec.Raw = ABSENT
    spaces_between_special_tokens: msgspec.Raw = ABSENT
    include_stop_str_in_output: msgspec.Raw = ABSENT
    truncate_prompt_tokens: msgspec.Raw = ABSENT
    prompt_logprobs: msgspec.Raw = ABSENT
    add_special_tokens: msgspec.Raw = ABSENT
    guided_decoding_backend: msgspec.Raw = ABSENT
    guided_whitespace_pattern: msgspec.Raw = ABSENT
    logits_processors: msgspec.Raw = ABSENT
    return_tokens_as_token_ids: msgspec.Raw = ABSENT
    return_token_ids: msgspec.Raw = ABSENT
    allowed_token_ids: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT
    cache_salt: msgspec.Raw = ABSENT
    request_id: msgspec.Raw = ABSENT
    store: msgspec.Raw = ABSENT
    service_tier: msgspec.Raw = ABSENT
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class ChatRequest(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: TemplateSettings | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    modalities: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    prediction: msgspec.Raw = ABSENT
    reasoning_effort: str | None = None
    verbosity: msgspec.Raw = ABSENT
    web_search_options: msgspec.Raw = ABSENT
    echo: msgspec.Raw = ABSENT
    add_generation_prompt: msgspec.Raw = ABSENT
    continue_final_message: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    mm_processor_kwargs: msgspec.Raw = ABSENT


class CompletionRequest(GenerationBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: msgspec.Raw = ABSENT
    prompt_embeds: msgspec.Raw = ABSENT
