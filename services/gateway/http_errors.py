"""Failures in OpenAI's shape: status, headers and body of one error; the in-band frame of a stream. Pure."""

from __future__ import annotations

import math

import msgspec

from services.common.errors import Internal, MillraceError

_DULL_STATUS = 500


def error_body(error: MillraceError, request_id: str = "") -> bytes:
    """`{"error": {message, type, param, code}}`; faults of our own carry the request id and nothing else."""
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
