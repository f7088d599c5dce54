"""The transformer in plain torch float32: the reference that every other way of computing is tested against.

Owns dequantised weights. Not batch-invariant (matrix sizes change torch's summation order). Called by the runner.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.models.decoder import DecoderTensors, LayerTensors
from services.worker.models.model_config import ModelConfig
from services.worker.models.rope import rope_tables
from services.worker.runtime.forward import StepInputs
from services.worker.runtime.kv_store import KVStore


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class TorchForward:
    """See `Forward`."""

    def __init__(self, tensors: DecoderTensors, *, max_model_len: int) -> None:
        config = tensors.config
        self._config = config
        self._embedding = torch.from_numpy(tensors.embedding.float32())
        tied = tensors.lm_head is tensors.embedding
        head = self._embedding if tied else torch.from_numpy(tensors.lm_head.float32())
        self._head = head[: config.vocab_size]
        self._norm = torch.from_numpy(tensors.norm)
        self._layers = [_layer(layer) for layer in tensors.layers]
        self._cos, self._sin = rope_tables(config.rope, max_model_len)
        self.weight_bytes = config.parameter_count * 4

    @property
    def deterministic(self) -> bool:
        return False

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs, store: KVStore) -> torch.Tensor:
        """See `Forward`."""
        positions = torch.from_numpy(inputs.positions).long()
        blocks, offsets = _slots(inputs, store.block_size)
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        x = self._embedding[torch.from_numpy(inputs.token_ids).long()]
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, x, cos, sin)
            store.keys(index)[blocks, :, :, offsets] = key.to(store.data.dtype)
            store.values(index)[blocks, :, offsets] = value.to(store.data.dtype)
            attended = self._attend(query, inputs, store, index)
            x = x + F.linear(attended, layer.output)
            gate, up = F.linear(_rms_norm(x, layer.post_norm, self._config), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return _rms_norm(x[torch.from_numpy(inputs.selected).long()], self._norm, self._config)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        return F.linear(hidden, self._head)

    def _project(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self._config
        mixed = F.linear(_rms_norm(x, layer.input_norm, config), layer.qkv, layer.qkv_bias)
        ends = (config.query_width, config.query_width + config.kv_width)
        parts = mixed[:, : ends[0]], mixed[:, ends[0] : ends[1]], mixed[:, ends[1] :]
        query, key, value = (part.reshape(len(x), -1, config.head_dim) for part in parts)
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value

    def _attend(self, query: torch.Tensor, inputs: StepInputs, store: KVStore, layer: int) -> torch.Tensor:
        config = self._config
        group = config.head_count // config.kv_head_count
        keys, values = store.keys(layer), store.values(layer)
        parts = []
        for row, (start, end) in enumerate(zip(inputs.query_starts[:-1], inputs.query_starts[1:], strict=True)):
            length = int(inputs.positions[end - 1]) + 1
            blocks = torch.from_numpy(inputs.block_tables[row, : -(-length // store.block_size)]).long()
            key = keys[blocks].permute(1, 2, 0, 3).flatten(2)[:, :, :length].float()
            value = values[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()
            q = query[start:end].view(end - start, config.kv_head_count, group, config.head_dim).permute(1, 2, 0, 3)
            scores = q @ key[:, None] * config.head_dim**-0.5
            limits = torch.from_numpy(inputs.positions[start:end]).long()
            future = torch.arange(length) > limits[:, None]
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            parts.append((weights @ value[:, None]).permute(2, 0, 1, 3).flatten(1))
        return torch.cat(parts)


def _layer(layer: LayerTensors) -> _Layer:
    def joined(*parts: np.ndarray | None) -> torch.Tensor | None:
        present = [part for part in parts if part is not None]
        return torch.from_numpy(np.concatenate(present)) if present else None

    qkv = joined(layer.query.float32(), layer.key.float32(), layer.value.float32())
    gate_up = joined(layer.gate.float32(), layer.up.float32())
    if qkv is None or gate_up is None:
        raise ValueError("a layer has no projections")
    return _Layer(
        input_norm=torch.from_numpy(layer.input_norm),
        post_norm=torch.from_numpy(layer.post_norm),
        qkv=qkv,
        qkv_bias=joined(layer.query_bias, layer.key_bias, layer.value_bias),
        output=torch.from_numpy(layer.output.float32()),
        gate_up=gate_up,
        down=torch.from_numpy(layer.down.float32()),
    )


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_eps))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _slots(inputs: StepInputs, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.repeat(np.arange(len(inputs.query_starts) - 1), np.diff(inputs.query_starts))
    blocks = inputs.block_tables[rows, inputs.positions // block_size]
    return torch.from_numpy(blocks).long(), torch.from_numpy(inputs.positions % block_size).long()
