"""The compiled CPU kernels as typed calls: pack a matrix, run a step, give logits, choose tokens.

Owns the foreign-function boundary: struct layouts, lifetimes, return codes. Callers keep shapes right.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from services.worker.kernels.cpu_build import InstructionSet, KernelUnavailableError, build, instruction_sets
from services.worker.kernels.huge_pages import Arena

ABI = 2
LANES = 16
GROUP = 32
FORMAT_F32, FORMAT_Q4, FORMAT_Q8 = 0, 1, 2
PACK_F32, PACK_Q8_FROM_F32, PACK_Q4_0, PACK_Q4_1, PACK_Q8_0 = range(5)
_PACK_FORMATS = (FORMAT_F32, FORMAT_Q8, FORMAT_Q4, FORMAT_Q4, FORMAT_Q8)
_GROUP_BYTES = {FORMAT_F32: GROUP * LANES * 4, FORMAT_Q4: 320, FORMAT_Q8: 544}


class LinearStruct(ctypes.Structure):
    """`Linear` of linear.h."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("panels", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
    )


class ModelStruct(ctypes.Structure):
    """`ModelDescription` of model.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "hidden",
                "intermediate",
                "layers",
                "heads",
                "kv_heads",
                "head_dim",
                "vocabulary",
                "embedding_format",
            )
        ),
        ("norm_eps", ctypes.c_float),
        ("has_bias", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "cosines", "sines", "linears", "norms", "biases")),
    )


class CacheStruct(ctypes.Structure):
    """`Cache` of attention.h; strides in values."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_size_t) for name in ("block_stride", "layer_stride", "value_offset", "head_stride")),
        *((name, ctypes.c_int32) for name in ("block_size", "head_dim", "half")),
    )


class StepStruct(ctypes.Structure):
    """`StepDescription` of model.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tokens", "requests", "table_width", "selected")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "query_starts", "tables", "selection")),
        ("cache", CacheStruct),
        ("output", ctypes.c_void_p),
    )


DRAW_DTYPE = np.dtype(
    [
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("key", "<u8"),
        ("top_k", "<i4"),
        ("reserved", "<i4"),
    ]
)


@dataclasses.dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in panels; `data` owns the bytes."""

    format: int
    outputs: int
    inputs: int
    data: torch.Tensor

    def struct(self) -> LinearStruct:
        panels = -(-self.outputs // LANES)
        return LinearStruct(self.format, self.outputs, self.inputs, panels, self.data.data_ptr())


class CpuKernels:
    """A loaded library and its threads. Calls block with the interpreter lock released; one caller at a time."""

    def __init__(self, library: Path, level: InstructionSet, threads: int) -> None:
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise KernelUnavailableError(f"the compiled kernels cannot be loaded: {error}") from None
        self.level = level
        _declare(self._library)
        if self._library.mr_abi() != ABI:
            raise KernelUnavailableError("the compiled kernels have another interface")
        self.threads = threads
        self._pool = self._library.mr_pool_new(threads)
        if not self._pool:
            raise KernelUnavailableError(f"{threads} kernel threads could not be started")
        self._arena = Arena()

    def close(self) -> None:
        """Stop the threads; no call may follow."""
        if self._pool:
            self._library.mr_pool_free(self._pool)
            self._pool = None

    def pack(self, kind: int, source: np.ndarray, outputs: int, inputs: int) -> PackedMatrix:
        """Matrix (outputs, inputs) in panels. `source` is contiguous float32, or the rows of GGUF blocks of `kind`."""
        layout = _PACK_FORMATS[kind]
        if inputs % (1 if layout == FORMAT_F32 else GROUP):
            raise ValueError(f"{inputs} inputs are not whole groups of {GROUP}")
        panels = -(-outputs // LANES)
        size = panels * (inputs * LANES * 4 if layout == FORMAT_F32 else inputs // GROUP * _GROUP_BYTES[layout])
        data = self._arena.take(size)
        self._library.mr_pack(kind, source.ctypes.data, outputs, inputs, data.data_ptr())
        return PackedMatrix(layout, outputs, inputs, data)

    def new_model(self, description: ModelStruct) -> int:
        """Handle of a model; everything `description` points to must outlive it."""
        handle: int | None = self._library.mr_model_new(ctypes.byref(description))
        if not handle:
            raise MemoryError("no memory for the model")
        return handle

    def free_model(self, handle: int) -> None:
        self._library.mr_model_free(handle)

    def hidden(self, handle: int, step: StepStruct) -> None:
        """Run the transformer over one step; raises MemoryError when scratch memory cannot be had."""
        _checked(self._library.mr_hidden(handle, self._pool, ctypes.byref(step)))

    def calibrate(self, handle: int, step: StepStruct) -> None:
        """Choose from this step which inputs each quantised product keeps in float. Before the first real step."""
        _checked(self._library.mr_calibrate(handle, ctypes.byref(step)))

    def logits(self, handle: int, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """`hidden` (rows, width) and `out` (rows, vocab), both contiguous float32."""
        _checked(self._library.mr_logits(handle, self._pool, hidden.data_ptr(), len(hidden), out.data_ptr()))

    def choose(self, logits: torch.Tensor, draws: np.ndarray) -> Sequence[int]:
        """Token id a row of contiguous `logits` (rows, vocab), -1 for none; `draws` (rows,) of DRAW_DTYPE."""
        out = np.empty(len(draws), dtype=np.int32)
        rows, count = logits.shape
        _checked(
            self._library.mr_choose(self._pool, logits.data_ptr(), rows, count, draws.ctypes.data, out.ctypes.data)
        )
        ids: list[int] = out.tolist()
        return ids


def load_kernels(cache_dir: Path, threads: int, levels: Sequence[InstructionSet] | None = None) -> CpuKernels:
    """Kernels for the best level this CPU runs (or of `levels`); compiles at first use, seconds. Raises
    KernelUnavailableError."""
    usable = instruction_sets() if levels is None else levels
    if not usable:
        raise KernelUnavailableError("this CPU lacks AVX2, FMA or F16C")
    return CpuKernels(build(usable[0], cache_dir), usable[0], threads)


def _checked(code: int) -> None:
    if code:
        raise MemoryError("a CPU kernel ran out of memory")


def _declare(library: ctypes.CDLL) -> None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "mr_abi": (integer, ()),
        "mr_pool_new": (pointer, (integer,)),
        "mr_pool_free": (None, (pointer,)),
        "mr_model_new": (pointer, (pointer,)),
        "mr_model_free": (None, (pointer,)),
        "mr_hidden": (integer, (pointer, pointer, pointer)),
        "mr_calibrate": (integer, (pointer, pointer)),
        "mr_logits": (integer, (pointer, pointer, pointer, integer, pointer)),
        "mr_choose": (integer, (pointer, pointer, integer, integer, pointer, pointer)),
        "mr_pack": (None, (integer, pointer, integer, integer, pointer)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
