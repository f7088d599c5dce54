"""A bounded reader of the GGUF container: header, metadata and tensor table, each checked before it is believed.

Owns no meaning of keys or tensors (see `gguf_loader`). The tensors stay in the mapped file.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path

import gguf
import numpy as np

from services.worker.models.errors import ModelLoadError
from services.worker.models.tensors import GGMLType, StoredTensor

MAX_METADATA = 4096
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_LENGTH = 1 << 22
MAX_DIMENSION = 1 << 31
HEADER_BYTES = 24

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9

MetadataValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFFile:
    """Metadata by key and tensors by stored name; the tensors view the mapped file."""

    metadata: dict[str, MetadataValue]
    tensors: dict[str, StoredTensor]
    size: int


def read_gguf(path: Path) -> GGUFFile:
    """Map and check `path`; blocks on disk for the header only. Raises ModelLoadError and nothing else."""
    try:
        size = path.stat().st_size
        if size < HEADER_BYTES:
            raise ModelLoadError(f"{path.name} is not a GGUF file: it has {size} bytes")
        with path.open("rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelLoadError(f"there is no model file {path}") from None
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror}") from None
    try:
        return _Reader(mapped, size).read()
    except ModelLoadError as error:
        raise ModelLoadError(f"{path.name} is corrupt or unsupported: {error}") from None


class _Reader:
    """A cursor over the mapped bytes; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self._size = size
        self._at = 0

    def read(self) -> GGUFFile:
        if self._bytes(4) != b"GGUF":
            raise ModelLoadError("it does not start with the GGUF magic")
        version = self._scalar(4)
        if version not in (2, 3):
            raise ModelLoadError(f"GGUF version {version} is not supported")
        tensor_count = self._count("tensor count", MAX_TENSORS)
        metadata_count = self._count("metadata count", MAX_METADATA)
        metadata: dict[str, MetadataValue] = {}
        for _ in range(metadata_count):
            key = self._string(MAX_KEY_BYTES)
            if key in metadata:
                raise ModelLoadError(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(int(self._scalar(4)))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise ModelLoadError(f"the alignment {alignment!r} is not a power of two from 8 to 65536")
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        base = -(-self._at // alignment) * alignment
        return GGUFFile(metadata, self._tensors(entries, base, alignment), self._size)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(MAX_KEY_BYTES)
        dimensions = int(self._scalar(4))
        if not 1 <= dimensions <= 4:
            raise ModelLoadError(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._count(f"dimension of tensor {name!r}", MAX_DIMENSION, 1) for _ in range(dimensions))
        return name, shape, int(self._scalar(4)), int(self._scalar(10))

    def _tensors(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], base: int, alignment: int
    ) -> dict[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        view = np.frombuffer(self._data, dtype=np.uint8)
        for name, dimensions, encoding_id, offset in entries:
            if name in tensors:
                raise ModelLoadError(f"tensor {name!r} appears twice")
            try:
                encoding = GGMLType(encoding_id)
                block, block_bytes = gguf.GGML_QUANT_SIZES[encoding]
            except (ValueError, KeyError):
                raise ModelLoadError(f"tensor {name!r} has unknown encoding {encoding_id}") from None
            if dimensions[0] % block:
                raise ModelLoadError(f"rows of tensor {name!r} are not whole {encoding.name} blocks")
            rows = math.prod(dimensions[1:])
            row_bytes = dimensions[0] // block * block_bytes
            start = base + offset
            if offset % alignment:
                raise ModelLoadError(f"tensor {name!r} is not aligned to {alignment} bytes")
            if start + rows * row_bytes > self._size:
                raise ModelLoadError(f"tensor {name!r} ends past the end of the file")
            data = view[start : start + rows * row_bytes].reshape(rows, row_bytes)
            tensors[name] = StoredTensor(name, tuple(reversed(dimensions)), encoding, data)
        return tensors

    def _value(self, kind: int) -> MetadataValue:
        if kind == _STRING:
            return self._string(MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array()
        return self._scalar(kind)

    def _array(self) -> MetadataValue:
        kind = int(self._scalar(4))
        length = self._count("array length", MAX_ARRAY_LENGTH)
        if kind == _STRING:
            if length * 8 > self._size - self._at:
                raise ModelLoadError("an array of strings ends past the end of the file")
            return [self._string(MAX_STRING_BYTES) for _ in range(length)]
        if kind not in _SCALARS:
            raise ModelLoadError(f"an array of metadata type {kind} is not supported")
        layout = _SCALARS[kind]
        raw = self._bytes(layout.size * length)
        return list(struct.unpack(f"<{length}{layout.format[-1]}", raw))

    def _scalar(self, kind: int) -> int | float | bool:
        layout = _SCALARS.get(kind)
        if layout is None:
            raise ModelLoadError(f"metadata type {kind} is not supported")
        value: int | float | bool = layout.unpack(self._bytes(layout.size))[0]
        return value

    def _count(self, what: str, limit: int, least: int = 0) -> int:
        value = int(self._scalar(10))
        if not least <= value <= limit:
            raise ModelLoadError(f"the {what} is {value}, outside {least} to {limit}")
        return value

    def _string(self, limit: int) -> str:
        length = int(self._scalar(10))
        if length > limit:
            raise ModelLoadError(f"a string of {length} bytes is longer than {limit}")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError("a string is not UTF-8") from None

    def _bytes(self, length: int) -> bytes:
        end = self._at + length
        if end > self._size:
            raise ModelLoadError("it ends in the middle of its header")
        raw = self._data[self._at : end]
        self._at = end
        return raw
