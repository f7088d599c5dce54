"""The tensors of a decoder-only transformer by their part in it, still in the file's encoding.

Values only; made by a family, used by every way of computing (torch, compiled CPU kernels).
"""

from __future__ import annotations

import dataclasses

from services.worker.models.model_config import ModelConfig
from services.worker.models.tensors import FloatArray, StoredTensor


@dataclasses.dataclass(frozen=True, slots=True)
class LayerTensors:
    """One block. Matrices are (outputs, inputs).

    Biases are absent unless the config says `qkv_bias`, the last four norms unless it says `extra_norms`:
    `query_norm` and `key_norm` (head_dim,), the others (hidden,).
    """

    input_norm: FloatArray
    post_norm: FloatArray
    query: StoredTensor
    key: StoredTensor
    value: StoredTensor
    output: StoredTensor
    gate: StoredTensor
    up: StoredTensor
    down: StoredTensor
    query_bias: FloatArray | None = None
    key_bias: FloatArray | None = None
    value_bias: FloatArray | None = None
    query_norm: FloatArray | None = None
    key_norm: FloatArray | None = None
    attention_out_norm: FloatArray | None = None
    feed_forward_out_norm: FloatArray | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderTensors:
    """The whole model; `lm_head` is `embedding` itself when they are tied."""

    config: ModelConfig
    embedding: StoredTensor
    layers: tuple[LayerTensors, ...]
    norm: FloatArray
    lm_head: StoredTensor
