"""Fields that are known but served with few values only: any other value is refused by name, never ignored."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

import msgspec

from services.common.errors import Unsupported
from services.gateway.chat_template import JsonValue
from services.gateway.json_body import decode_raw


@functools.cache
def _raw_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type is msgspec.Raw)


def refuse_raw(
    body: msgspec.Struct, path: str, only: Mapping[str, tuple[JsonValue, ...]], skip: Collection[str] = ()
) -> None:
    """Each field of type Raw has one of its values in `only`, or is null or absent. Raises Unsupported."""
    for name in _raw_fields(type(body)):
        value = getattr(body, name)
        if len(bytes(value)) == 0 or name in skip:
            continue
        field = f"{path}{name}"
        sent = decode_raw(value, field)
        # True == 1 in Python, but not on the wire.
        if sent is None or any(sent == good and type(sent) is type(good) for good in only.get(name, ())):
            continue
        raise Unsupported(f"`{field}` is not supported with this value.", param=field)
