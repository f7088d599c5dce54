"""The options of limits that tenants and keys share, and how limits are shown."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

import typer
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_service_pb2 as pb

_Cap = Literal["prompt_token_count", "output_token_count", "choice_count", "tool_count"]
_NANOS = 1_000_000_000
# Name of a limit → field of the message.
_COUNTS = {
    "requests_per_minute": "requests_per_minute",
    "tokens_per_minute": "tokens_per_minute",
    "input_tokens_per_minute": "input_tokens_per_minute",
    "output_tokens_per_minute": "output_tokens_per_minute",
    "concurrent_requests": "concurrent_request_count",
    "queued_requests": "queued_request_count",
    "worker_slots": "worker_slot_count",
    "worker_blocks": "worker_block_count",
    "budget_tokens": "budget_token_count",
    "daily_budget_tokens": "daily_budget_token_count",
    "monthly_budget_tokens": "monthly_budget_token_count",
}
# Fields of a length cap, in the order of its text.
_CAPS: tuple[_Cap, ...] = ("prompt_token_count", "output_token_count", "choice_count", "tool_count")
_MONEY = {"daily_budget": "daily_budget_nanos", "monthly_budget": "monthly_budget_nanos"}

LimitOption = Annotated[
    list[str] | None,
    typer.Option("--limit", help=f"name=value; repeat it. Names: {', '.join((*_COUNTS, *_MONEY))}. Days are UTC."),
]
LengthCapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--length-cap",
        help="model=prompt:output:n:tools, the most of one request, lengths in tokens; `*` for all other models. Leave "
        "out what has no cap; repeat the option.",
    ),
]
BatchOnlyOption = Annotated[bool, typer.Option("--batch-only", help="Run every request in the class batch.")]


def limits_of(texts: Sequence[str] | None, length_caps: Sequence[str] | None, *, batch_only: bool) -> pb.Limits:
    """The message that the options describe. Raises typer.BadParameter."""
    limits = pb.Limits()
    if batch_only:
        limits.priority_ceiling = common_pb2.PRIORITY_CLASS_BATCH
    for text in texts or ():
        name, _, value = text.partition("=")
        if name in _COUNTS:
            setattr(limits, _COUNTS[name], _count(text, value))
        elif name in _MONEY:
            setattr(limits, _MONEY[name], _nanos(text, value))
        else:
            raise typer.BadParameter(f"{name} is no limit; there are {', '.join((*_COUNTS, *_MONEY))}.")
    for text in length_caps or ():
        model, _, numbers = text.rpartition("=")
        sizes = numbers.split(":")
        if not model or not 2 <= len(sizes) <= len(_CAPS) or not all(size.isdecimal() or not size for size in sizes):
            raise typer.BadParameter(f"{text}: expected model=prompt:output:n:tools, such as '*=4096:512' or 'm=::1'.")
        given = {name: int(size) for name, size in zip(_CAPS, sizes, strict=False) if size}
        limits.length_caps[model].CopyFrom(pb.LengthCap(**given))
    return limits


def shown(limits: pb.Limits) -> str:
    """The limits that are set, one a line."""
    names = {field: name for name, field in (_COUNTS | _MONEY).items()}
    lines = [f"{names.get(f.name, f.name)}={_value(f.name, value)}" for f, value in limits.ListFields()]
    return "\n".join(lines) or "none"


def _count(text: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise typer.BadParameter(f"{text}: expected a whole number of at least 1.")
    return int(value)


def _nanos(text: str, value: str) -> int:
    try:
        nanos = Decimal(value) * _NANOS
    except InvalidOperation:
        nanos = Decimal(0)
    if not nanos.is_finite() or nanos < 1:
        raise typer.BadParameter(f"{text}: expected an amount such as 12.50.")
    return int(nanos)


def _value(name: str, value: Any) -> str:
    if name.endswith("nanos"):
        return f"{Decimal(value) / _NANOS:f}"
    if name == "priority_ceiling":
        return common_pb2.PriorityClass.Name(value).removeprefix("PRIORITY_CLASS_").lower()
    if name == "length_caps":
        return ", ".join(f"{model}={_cap(cap)}" for model, cap in sorted(value.items()))
    return str(value)


def _cap(cap: pb.LengthCap) -> str:
    sizes = [str(getattr(cap, name)) if cap.HasField(name) else "" for name in _CAPS]
    while len(sizes) > 2 and not sizes[-1]:
        sizes.pop()
    return ":".join(sizes)
