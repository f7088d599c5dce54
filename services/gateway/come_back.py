"""What a client sends so that it can come back: `Idempotency-Key`, `X-Millrace-Resume`, `Last-Event-ID`. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable

import msgspec
from google.protobuf.message import Message

from services.common.errors import InvalidRequest, Unsupported

KEY_BYTES = 255
_GENERATE = b"/millrace.gateway.v1.GatewayService/Generate"
_EVENT_ID = re.compile(r"([0-9A-Z]{26}):(\d{1,9})")


@dataclasses.dataclass(frozen=True, slots=True)
class EventId:
    """An event that the client has: number `number` of the stream of `request_id`."""

    request_id: str
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class ComeBack:
    """A request that may be repeated. `key` is the key's digest or "", `body` that of method, path and parsed body."""

    key: str
    body: str
    last_event: EventId | None
    authorization: str


def parse_come_back(headers: Iterable[tuple[bytes, bytes]], path: str, raw: bytes, *, stream: bool) -> ComeBack | None:
    """None when the client asked for nothing of it. `raw` is valid JSON. Raises InvalidRequest."""
    sent = list(headers)
    key = _key_digest(sent)
    resume = _one(sent, b"x-millrace-resume")
    if resume not in (None, b"0", b"1"):
        raise InvalidRequest("`X-Millrace-Resume` must be 0 or 1.", param="x-millrace-resume")
    if key is None and resume == b"1" and not stream:
        message = "`X-Millrace-Resume` needs `stream: true`; a whole answer is kept for an `Idempotency-Key`."
        raise InvalidRequest(message, param="x-millrace-resume")
    last_event = parse_last_event(sent)
    if last_event is not None and (key is None or not stream):
        # Else a client that only wants the rest would begin a new generation.
        message = "`Last-Event-ID` needs a stream and its `Idempotency-Key`; without one, ask `/v1/streams`."
        raise InvalidRequest(message, param="last-event-id")
    if key is None and resume != b"1":
        return None
    # Order of fields and white space do not matter; every value does, `stream` included.
    canonical = msgspec.json.encode(msgspec.json.decode(raw), order="sorted")
    body = hashlib.sha256(path.encode() + b"\0" + canonical).hexdigest()
    return ComeBack(key or "", body, last_event, _authorization(sent))


def parse_call(metadata: Iterable[tuple[str, str | bytes]], request: Message) -> ComeBack | None:
    """As `parse_come_back`, of a gRPC generation.

    Raises InvalidRequest, Unsupported for what is of HTTP streams only.
    """
    sent = [(name.encode(), value.encode("latin-1")) for name, value in metadata if isinstance(value, str)]
    for name in (b"x-millrace-resume", b"last-event-id"):
        if _one(sent, name) is not None:
            raise Unsupported(f"`{name.decode()}` is served over HTTP only.", param=name.decode())
    key = _key_digest(sent)
    if key is None:
        return None
    body = hashlib.sha256(_GENERATE + b"\0" + request.SerializeToString(deterministic=True)).hexdigest()
    return ComeBack(key, body, None, _authorization(sent))


def refuse_key(sent: Iterable[tuple[str | bytes, str | bytes]]) -> None:
    """For what is not run once for a key: raises Unsupported where one was sent."""
    if any(name in ("idempotency-key", b"idempotency-key") for name, _ in sent):
        raise Unsupported("`Idempotency-Key` is not served here: it is for answers.", param="idempotency-key")


def parse_last_event(headers: Iterable[tuple[bytes, bytes]]) -> EventId | None:
    """The `Last-Event-ID` header. Raises InvalidRequest."""
    sent = _one(list(headers), b"last-event-id")
    if not sent:
        return None
    found = _EVENT_ID.fullmatch(sent.decode("latin-1"))
    if found is None:
        raise InvalidRequest("`Last-Event-ID` is not an id of one of our events.", param="last-event-id")
    return EventId(found[1], int(found[2]))


def _key_digest(headers: list[tuple[bytes, bytes]]) -> str | None:
    key = _one(headers, b"idempotency-key")
    if key is not None and not 0 < len(key) <= KEY_BYTES:
        raise InvalidRequest(f"`Idempotency-Key` has 1 to {KEY_BYTES} bytes.", param="idempotency-key")
    return None if key is None else hashlib.sha256(key).hexdigest()


def _authorization(headers: list[tuple[bytes, bytes]]) -> str:
    return (_one(headers, b"authorization") or b"").decode("latin-1")


def _one(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    values = [value for sent, value in headers if sent == name]
    if len(values) > 1:
        raise InvalidRequest(f"`{name.decode()}` was sent more than once.", param=name.decode())
    return values[0] if values else None
