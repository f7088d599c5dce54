"""Translates between the wire (protobuf) and the engine's values, both ways, and checks what comes in.

Owns no state and does no I/O. Called by the service (Submit) and by the request table (frames).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from google.protobuf import duration_pb2, timestamp_pb2
from millrace.common.v1 import admission_pb2, common_pb2
from millrace.worker.v1 import worker_service_pb2

from services.worker.engine.outputs import TokenLogprobs
from services.worker.engine.request import (
    Choice,
    EngineRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    PriorityClass,
    SamplingParams,
    fresh_choices,
)

MAX_CHOICES = 8
MAX_ID_CHARS = 128
SEED_MASK = 0xFFFF_FFFF_FFFF_FFFF

_FINISH_REASONS: dict[FinishReason, common_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.EXPIRED: common_pb2.FINISH_REASON_EXPIRED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_PRIORITIES: dict[common_pb2.PriorityClass.ValueType, PriorityClass] = {
    common_pb2.PRIORITY_CLASS_INTERACTIVE: PriorityClass.INTERACTIVE,
    common_pb2.PRIORITY_CLASS_BATCH: PriorityClass.BATCH,
}
_GRAMMARS: dict[int, GrammarKind] = {
    common_pb2.GRAMMAR_KIND_JSON_SCHEMA: GrammarKind.JSON_SCHEMA,
    common_pb2.GRAMMAR_KIND_JSON_OBJECT: GrammarKind.JSON_OBJECT,
    common_pb2.GRAMMAR_KIND_REGEX: GrammarKind.REGEX,
    common_pb2.GRAMMAR_KIND_CHOICE: GrammarKind.CHOICE,
    common_pb2.GRAMMAR_KIND_LARK: GrammarKind.LARK,
}


class WireError(Exception):
    """A message breaks a rule that its sender should have enforced. The text names the field, never content."""


def finish_reason(reason: FinishReason) -> common_pb2.FinishReason.ValueType:
    """The wire's name of an engine finish reason."""
    return _FINISH_REASONS[reason]


def priority_class(value: common_pb2.PriorityClass.ValueType) -> PriorityClass:
    """Raises WireError for UNSPECIFIED and unknown values."""
    if value not in _PRIORITIES:
        raise WireError("priority_class is not set")
    return _PRIORITIES[value]


def priority_class_message(value: PriorityClass) -> common_pb2.PriorityClass.ValueType:
    """The wire's name of a class."""
    return next(message for message, known in _PRIORITIES.items() if known is value)


def position_logprobs(value: TokenLogprobs) -> common_pb2.PositionLogprobs:
    """One position on the wire; the alternatives keep their order."""
    message = common_pb2.PositionLogprobs()
    message.token.token_id = value.token_id
    message.token.logprob = value.logprob
    for token_id, logprob in value.top:
        message.top.add(token_id=token_id, logprob=logprob)
    return message


def sampling_params(message: common_pb2.SamplingParams, *, vocab_size: int) -> SamplingParams:
    """The engine's sampling parameters. Raises WireError naming the first field outside its range."""
    _check_ranges(message)
    ids = [*message.stop_token_ids, *(bias.token_id for bias in message.logit_bias)]
    _check_vocabulary("stop_token_ids or logit_bias", ids, vocab_size)
    for word in message.bad_words:
        _check_vocabulary("bad_words", word.token_ids, vocab_size)
        _require(len(word.token_ids) > 0, "bad_words")
    return SamplingParams(
        max_tokens=message.max_token_count,
        seed=message.seed & SEED_MASK,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        min_tokens=message.min_token_count,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in message.logit_bias),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        logprob_count=message.logprob_count if message.HasField("logprob_count") else None,
        prompt_logprob_count=message.prompt_logprob_count if message.HasField("prompt_logprob_count") else None,
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
        embed=message.embed,
    )


def engine_request(
    entry: admission_pb2.AdmissionEntry, *, epoch: int, vocab_size: int, deadline: float | None
) -> EngineRequest:
    """The engine's request for one attempt. `deadline` is on the engine's clock.

    With prefixes, exactly the listed choices run, each after its prefix; choices not listed have ended.
    Raises WireError.
    """
    request_id(entry.request_id)
    _require(epoch > 0, "epoch")
    _require(len(entry.token_ids) > 0, "token_ids")
    _check_vocabulary("token_ids", entry.token_ids, vocab_size)
    return EngineRequest(
        request_id=entry.request_id,
        epoch=epoch,
        prompt_token_ids=np.array(entry.token_ids, dtype=np.int32),
        sampling=sampling_params(entry.sampling, vocab_size=vocab_size),
        choices=_choices(entry, vocab_size),
        tenant=entry.tenant,
        weight=weight(entry.weight),
        priority_class=priority_class(entry.priority_class),
        cache_salt=entry.cache_salt,
        deadline=deadline,
    )


def request_id(text: str) -> str:
    """Raises WireError unless the id is of a sound length."""
    _require(0 < len(text) <= MAX_ID_CHARS, "request_id")
    return text


def weight(value: float) -> float:
    """A tenant's share, 1 where none is set. Raises WireError."""
    _require(math.isfinite(value) and value >= 0, "weight")
    return value if value > 0 else 1.0


def seconds_of(duration: duration_pb2.Duration) -> float:
    """A Duration as seconds."""
    return duration.seconds + duration.nanos / 1e9


def duration_of(seconds: float) -> duration_pb2.Duration:
    """Seconds as a Duration, rounded down to the nanosecond."""
    whole = math.floor(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def timestamp_of(unix_seconds: float) -> timestamp_pb2.Timestamp:
    """Unix seconds as a Timestamp, rounded down to the nanosecond."""
    whole = math.floor(unix_seconds)
    return timestamp_pb2.Timestamp(seconds=whole, nanos=int((unix_seconds - whole) * 1e9))


def token_usage(prompt: int, cached: int, completion: int) -> common_pb2.TokenUsage:
    """Counts of one request or choice."""
    return common_pb2.TokenUsage(
        prompt_token_count=prompt, cached_token_count=min(cached, prompt), completion_token_count=completion
    )


def failed_event(
    request_id: str, *, attempt: int, epoch: int, reason: str, detail: str, retryable: bool
) -> worker_service_pb2.Event:
    """An event that ends an attempt."""
    event = worker_service_pb2.Event(request_id=request_id, attempt=attempt, epoch=epoch)
    event.failed.reason = reason
    event.failed.detail = detail
    event.failed.retryable = retryable
    return event


def _choices(entry: admission_pb2.AdmissionEntry, vocab_size: int) -> tuple[Choice, ...]:
    count = entry.sampling.choice_count
    if not entry.prefix:
        return fresh_choices(count)
    indices = [prefix.choice for prefix in entry.prefix]
    _require(len(set(indices)) == len(indices), "prefix")
    _require(all(0 <= index < count for index in indices), "prefix")
    for prefix in entry.prefix:
        _check_vocabulary("prefix", prefix.token_ids, vocab_size)
        _require(len(prefix.token_ids) < entry.sampling.max_token_count, "prefix")
    return tuple(Choice(prefix.choice, np.array(prefix.token_ids, dtype=np.int32)) for prefix in entry.prefix)


def _grammar(message: common_pb2.Grammar) -> Grammar:
    _require(message.kind in _GRAMMARS, "grammar.kind")
    return Grammar(_GRAMMARS[message.kind], message.text, tuple(message.choices))


def _check_ranges(message: common_pb2.SamplingParams) -> None:
    # Each line states what is allowed, so that NaN is refused too.
    _require(0 <= message.temperature < math.inf, "temperature")
    _require(0 <= message.top_p <= 1, "top_p")
    _require(message.top_k >= 0, "top_k")
    _require(0 <= message.min_p <= 1, "min_p")
    _require(1 <= message.choice_count <= MAX_CHOICES, "choice_count")
    _require(message.max_token_count >= 1, "max_token_count")
    _require(0 <= message.min_token_count <= message.max_token_count, "min_token_count")
    _require(0 < message.repetition_penalty < math.inf, "repetition_penalty")
    _require(math.isfinite(message.frequency_penalty), "frequency_penalty")
    _require(math.isfinite(message.presence_penalty), "presence_penalty")
    _require(all(math.isfinite(bias.bias) for bias in message.logit_bias), "logit_bias")
    _require(0 <= message.logprob_count <= 1024, "logprob_count")
    _require(0 <= message.prompt_logprob_count <= 1024, "prompt_logprob_count")
    _require(not message.embed or message.choice_count == message.max_token_count == 1, "embed")


def _check_vocabulary(field: str, ids: Sequence[int] | Iterable[int], vocab_size: int) -> None:
    _require(max(ids, default=0) < vocab_size, field)


def _require(allowed: bool, field: str) -> None:
    if not allowed:
        raise WireError(f"{field} is outside its range")
