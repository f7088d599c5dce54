"""The record format of the outbox: length and CRC-32 (both unsigned 32-bit little-endian), then the payload."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

MAX_PAYLOAD_BYTES = 1_048_576
_HEADER = struct.Struct("<II")


def pack_record(payload: bytes) -> bytes:
    """One record. Raises ValueError for a payload above the limit."""
    if not 0 < len(payload) <= MAX_PAYLOAD_BYTES:
        raise ValueError("outbox payload size is outside its range")
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Payloads up to the first torn or damaged record; the file then stands at the start of that record."""
    while True:
        start = file.tell()
        header = file.read(_HEADER.size)
        if len(header) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            payload = file.read(length) if 0 < length <= MAX_PAYLOAD_BYTES else b""
            if len(payload) == length and length and zlib.crc32(payload) == checksum:
                yield payload
                continue
        file.seek(start)
        return
