"""Named tensors as a file stores them, whatever the format: shape, encoding, and the bytes still on disk.

Owns the way from stored bytes to float32. Called by the loaders (which make them) and the families (which use them).
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import gguf
import numpy as np
import numpy.typing as npt

from services.worker.models.errors import ModelLoadError

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]
GGMLType = gguf.GGMLQuantizationType

PLAIN_TYPES: dict[GGMLType, str] = {GGMLType.F32: "<f4", GGMLType.F16: "<f2"}


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, (rows, columns) or (columns,), row-major as in torch.

    `data` is (rows, row_bytes) uint8, a view of the mapped file; each row holds whole quantisation blocks.
    """

    name: str
    shape: tuple[int, ...]
    encoding: GGMLType
    data: npt.NDArray[np.uint8]

    @property
    def rows(self) -> int:
        return int(self.data.shape[0])

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def take_rows(self, index: IndexArray) -> StoredTensor:
        """The same tensor with its rows in the order of `index`; copies."""
        return dataclasses.replace(self, data=np.ascontiguousarray(self.data[index]))

    def float32(self) -> FloatArray:
        """Values as float32 in `shape`; always a fresh array. Raises ModelLoadError for values that are not finite."""
        plain = PLAIN_TYPES.get(self.encoding)
        if plain is not None:
            stored = np.frombuffer(np.ascontiguousarray(self.data), dtype=plain)
        else:
            stored = gguf.dequantize(np.ascontiguousarray(self.data), self.encoding)
        values: FloatArray = stored.astype(np.float32).reshape(self.shape)
        if not np.isfinite(values).all():
            raise ModelLoadError(f"tensor {self.name} holds values that are not finite numbers")
        return values


class TensorSource(Protocol):
    """Tensors by canonical name (`layers.3.q_proj.weight`), each taken at most once."""

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor of that name; raises ModelLoadError when it is missing or has another shape."""
        ...

    def has(self, name: str) -> bool: ...

    def finish(self) -> None:
        """Raise ModelLoadError naming tensors that nobody took."""
        ...


class NamedTensors:
    """A TensorSource over a dict; remembers what was taken."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"the model has no tensor {name}")
        if tensor.shape != shape:
            raise ModelLoadError(f"tensor {name} has shape {tensor.shape}, expected {shape}")
        self._taken.add(name)
        return tensor

    def finish(self) -> None:
        extra = sorted(set(self._tensors) - self._taken)
        if extra:
            shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            raise ModelLoadError(f"the model has tensors that its family does not use: {shown}")
