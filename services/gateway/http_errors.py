"""Failures in OpenAI's shape: status, headers and body of one error; the in-band frame of a stream. Pure."""

from __future__ import annotations

import math

import msgspec
from starlette.types import Scope

from services.common.errors import Internal, MillraceError
from services.common.lifecycle import new_ulid

_DULL_STATUS = 500
Headers = list[tuple[bytes, bytes]]


def refusal_id(scope: Scope) -> str:
    """The id of a request for which nothing was begun: the same one whoever tells of it."""
    return str(scope.setdefault("state", {}).setdefault("refusal_id", new_ulid()))


def refusal(error: MillraceError, request_id: str) -> tuple[Headers, bytes]:
    """Headers and body of an answer that is only an error."""
    body = error_body(error, request_id)
    own = [(b"x-request-id", request_id.encode()), (b"content-length", str(len(body)).encode())]
    return [*error_headers(error), *own], body


def error_body(error: MillraceError, request_id: str = "") -> bytes:
    """`{"error": {message, type, param, code, request_id}}`; faults of our own say nothing beside the id."""
    row = error.row
    message = error.message
    if row.http_status == _DULL_STATUS:
        message = "The server had an error while processing this request."
    fields: dict[str, object] = {"message": message, "type": row.openai_type, "param": error.param, "code": row.reason}
    if request_id:
        fields["request_id"] = request_id
    return msgspec.json.encode({"error": fields})


def error_headers(error: MillraceError) -> list[tuple[bytes, bytes]]:
    """`Retry-After` in whole seconds where waiting helps, and the reason."""
    headers = [(b"content-type", b"application/json"), (b"x-millrace-reason", error.row.reason.encode())]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    elif error.row.http_status in (429, 503) and error.row.retry.value in ("after_delay", "automatic"):
        headers.append((b"retry-after", b"1"))
    if error.row.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def as_millrace(error: Exception) -> MillraceError:
    """The error itself when it is ours, else Internal."""
    return error if isinstance(error, MillraceError) else Internal("Internal error.")
