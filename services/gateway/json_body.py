"""Bytes of a request body → a typed value, with every refusal a 400 that names the field. Pure."""

from __future__ import annotations

import json
import math
import re
from typing import TypeVar

import msgspec

from services.common.errors import InvalidRequest, PayloadTooLarge
from services.gateway.chat_template import JsonValue
from services.gateway.limits import Limits

# An unterminated string reaches to the end, and nothing backtracks: linear for any body.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_AT = re.compile(r" - at `(\$[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")

BodyT = TypeVar("BodyT")


def decode_body(body: bytes, body_type: type[BodyT], limits: Limits) -> BodyT:
    """Parse strictly. Raises PayloadTooLarge, or InvalidRequest for bad JSON, depth, type, range, unknown field."""
    if len(body) > limits.body_bytes:
        raise PayloadTooLarge(f"The body is larger than {limits.body_bytes} bytes.")
    if is_deeper_than(body, limits.json_depth):
        raise InvalidRequest(f"The JSON body is nested deeper than {limits.json_depth} levels.")
    try:
        return msgspec.json.decode(body, type=body_type, strict=True)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _syntax_error(body, str(error)) from None


def decode_raw(raw: msgspec.Raw, field: str) -> JsonValue:
    """The value of a field that was kept as it came. Raises InvalidRequest, as for a number out of range."""
    try:
        value: JsonValue = msgspec.json.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        reason = _AT.sub("", str(error))
        raise InvalidRequest(f"`{field}` is not valid: {reason}.", param=field) from None
    return value


def is_deeper_than(body: bytes, depth: int) -> bool:
    """Whether arrays and objects nest deeper than `depth`, in time linear in the body, without parsing it."""
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    left = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS).translate(_BRACKETS)
    for _ in range(depth):
        fewer = left.replace(b"[]", b"")
        if len(fewer) == len(left):
            break
        left = fewer
    # Each pass took the innermost level away; what is still open is deeper, or the body is malformed.
    return b"[]" in left or left.count(b"[") > depth


def _type_error(text: str) -> InvalidRequest:
    at = _AT.search(text)
    path = at[1].removeprefix("$").removeprefix(".") if at else ""
    reason = _AT.sub("", text)
    if unknown := _UNKNOWN.search(text):
        param = f"{path}.{unknown[1]}" if path else unknown[1]
        return InvalidRequest(f"`{param}` is not a known field.", param=param)
    if missing := _MISSING.search(text):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"`{param}` is required.", param=param)
    if not path:
        return InvalidRequest(f"The body is not what is expected: {reason}.")
    return InvalidRequest(f"`{path}` is not valid: {reason}.", param=path)


def _syntax_error(body: bytes, reason: str) -> InvalidRequest:
    try:
        field = _not_finite(json.loads(body), "")
    except (ValueError, RecursionError):
        field = None
    if field is not None:
        return InvalidRequest(f"`{field}` must be a finite number.", param=field)
    return InvalidRequest(f"The body is not valid JSON: {reason}.")


def _not_finite(value: object, path: str) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return path
    inner: list[tuple[str, object]] = []
    if isinstance(value, dict):
        inner = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    return next((found for name, item in inner if (found := _not_finite(item, name)) is not None), None)
