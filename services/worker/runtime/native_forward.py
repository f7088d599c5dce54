"""The transformer and the chooser over the compiled CPU kernels: one foreign call a step.

Owns packed weights and the structs that point to them. Same bits for a token in any batch and chunking.
Precision: float32 throughout, or int8 arithmetic on weights kept in four or eight bits by groups of 32.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.worker.kernels import cpu
from services.worker.models.decoder import DecoderTensors
from services.worker.models.model_config import ModelConfig
from services.worker.models.rope import rope_tables
from services.worker.models.tensors import FloatArray, GGMLType, StoredTensor
from services.worker.runtime.choosing import Draw
from services.worker.runtime.forward import StepInputs
from services.worker.runtime.kv_store import KVStore

BLOCK_SIZES = (16, 32, 64)
_PACKED_AS_STORED = {GGMLType.Q4_0: cpu.PACK_Q4_0, GGMLType.Q4_1: cpu.PACK_Q4_1, GGMLType.Q8_0: cpu.PACK_Q8_0}


def unsupported(config: ModelConfig, block_size: int, kv_dtype: torch.dtype) -> str | None:
    """Why the compiled kernels cannot run this shape, or None."""
    if config.head_dim % 32 or config.head_dim > 256:
        return f"a head size of {config.head_dim} is not a multiple of 32 up to 256"
    if config.hidden_size % cpu.GROUP or config.intermediate_size % cpu.GROUP:
        return f"widths {config.hidden_size} and {config.intermediate_size} are not multiples of {cpu.GROUP}"
    if block_size not in BLOCK_SIZES:
        return f"a block size of {block_size} is not one of {', '.join(map(str, BLOCK_SIZES))}"
    if kv_dtype not in (torch.float32, torch.float16):
        return "the KV cache is neither float32 nor float16"
    return None


class NativeForward:
    """See `Forward`. `quantised` keeps weights as stored where they have four or eight bits, else rounds to eight."""

    def __init__(
        self, kernels: cpu.CpuKernels, tensors: DecoderTensors, *, max_model_len: int, quantised: bool
    ) -> None:
        config = tensors.config
        self._kernels = kernels
        self._config = config
        self._quantised = quantised
        self._matrices = [
            self._packed(matrix, matrix.rows)
            for layer in tensors.layers
            for matrix in (layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down)
        ]
        self._matrices.append(self._packed(tensors.lm_head, config.vocab_size))
        self._norms = [norm for layer in tensors.layers for norm in (layer.input_norm, layer.post_norm)]
        self._norm = tensors.norm
        self._biases = _biases(tensors)
        self._cosines, self._sines = (table.contiguous() for table in rope_tables(config.rope, max_model_len))
        stored = tensors.embedding.encoding is GGMLType.Q8_0
        self._embedding = tensors.embedding.data if stored else tensors.embedding.float32()
        self._handle = kernels.new_model(self._description(cpu.FORMAT_Q8 if stored else cpu.FORMAT_F32))
        self._finalizer = weakref.finalize(self, kernels.free_model, self._handle)
        packed = sum(matrix.data.numel() for matrix in self._matrices)
        self.weight_bytes = packed + (0 if stored else self._embedding.nbytes)

    @property
    def deterministic(self) -> bool:
        return True

    def calibrate(self, token_ids: Sequence[int]) -> None:
        """Choose by a sample text which inputs the quantised products keep in float; without it they keep none."""
        config = self._config
        count = len(token_ids)
        store = KVStore(
            num_blocks=-(-count // BLOCK_SIZES[0]),
            layers=config.layer_count,
            kv_heads=config.kv_head_count,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZES[0],
            dtype=torch.float32,
        )
        everything = np.arange(count, dtype=np.int32)
        inputs = StepInputs(
            token_ids=np.array(token_ids, dtype=np.int32),
            positions=everything,
            query_starts=np.array([0, count], dtype=np.int32),
            block_tables=np.arange(store.num_blocks, dtype=np.int32)[None],
            selected=everything,
        )
        self._step(inputs, store, self._kernels.calibrate)

    def hidden(self, inputs: StepInputs, store: KVStore) -> torch.Tensor:
        """See `Forward`."""
        return self._step(inputs, store, self._kernels.hidden)

    def _step(self, inputs: StepInputs, store: KVStore, run: Callable[[int, cpu.StepStruct], None]) -> torch.Tensor:
        out = torch.empty((len(inputs.selected), self._config.hidden_size), dtype=torch.float32)
        tables = np.ascontiguousarray(inputs.block_tables)
        data = store.data
        part = data.stride(3)
        step = cpu.StepStruct(
            tokens=len(inputs.token_ids),
            requests=len(inputs.query_starts) - 1,
            table_width=tables.shape[1],
            selected=len(inputs.selected),
            token_ids=inputs.token_ids.ctypes.data,
            positions=inputs.positions.ctypes.data,
            query_starts=inputs.query_starts.ctypes.data,
            tables=tables.ctypes.data,
            selection=inputs.selected.ctypes.data,
            cache=cpu.CacheStruct(
                data=data.data_ptr(),
                block_stride=data.stride(0),
                layer_stride=data.stride(1),
                value_offset=data.stride(2),
                head_stride=part,
                block_size=store.block_size,
                head_dim=store.head_dim,
                half=int(data.dtype is torch.float16),
            ),
            output=out.data_ptr(),
        )
        run(self._handle, step)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        rows = hidden.contiguous()
        out = torch.empty((len(rows), self._config.vocab_size), dtype=torch.float32)
        self._kernels.logits(self._handle, rows, out)
        return out

    def _packed(self, matrix: StoredTensor, outputs: int) -> cpu.PackedMatrix:
        columns = matrix.columns
        if not self._quantised:
            return self._kernels.pack(cpu.PACK_F32, matrix.float32(), outputs, columns)
        kind = _PACKED_AS_STORED.get(matrix.encoding)
        if kind is not None:
            return self._kernels.pack(kind, np.ascontiguousarray(matrix.data), outputs, columns)
        return self._kernels.pack(cpu.PACK_Q8_FROM_F32, matrix.float32(), outputs, columns)

    def _description(self, embedding_format: int) -> cpu.ModelStruct:
        config = self._config
        structs = [matrix.struct() for matrix in self._matrices]
        self._linears = (cpu.LinearStruct * len(structs))(*structs)
        self._norm_pointers = (ctypes.c_void_p * len(self._norms))(*(norm.ctypes.data for norm in self._norms))
        return cpu.ModelStruct(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            layers=config.layer_count,
            heads=config.head_count,
            kv_heads=config.kv_head_count,
            head_dim=config.head_dim,
            vocabulary=config.vocab_size,
            embedding_format=embedding_format,
            norm_eps=config.norm_eps,
            has_bias=int(self._biases is not None),
            embedding=self._embedding.ctypes.data,
            norm=self._norm.ctypes.data,
            cosines=self._cosines.data_ptr(),
            sines=self._sines.data_ptr(),
            linears=ctypes.addressof(self._linears),
            norms=ctypes.addressof(self._norm_pointers),
            biases=None if self._biases is None else self._biases.ctypes.data,
        )


class NativeChooser:
    """See `Chooser`."""

    def __init__(self, kernels: cpu.CpuKernels) -> None:
        self._kernels = kernels

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
        """See `Chooser`."""
        rows = [(d.temperature, d.top_p, d.min_p, d.noise_key, d.top_k, 0) for d in draws]
        table = np.array(rows, dtype=cpu.DRAW_DTYPE)
        return [token if token >= 0 else None for token in self._kernels.choose(logits.contiguous(), table)]


def _biases(tensors: DecoderTensors) -> FloatArray | None:
    rows = [
        part
        for layer in tensors.layers
        for part in (layer.query_bias, layer.key_bias, layer.value_bias)
        if part is not None
    ]
    return np.concatenate(rows) if rows else None
