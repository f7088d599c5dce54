"""The transformer in plain torch float32: the reference that every other way of computing is tested against.

Owns dequantised weights. Not batch-invariant (matrix sizes change torch's summation order). Called by the runner.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.models.decoder import DecoderTensors, LayerTensors
from services.worker.models.model_config import Activation, ModelConfig
from services.worker.models.rope import rope_tables
from services.worker.runtime.forward import StepInputs
from services.worker.runtime.kv_store import KVStore

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: functools.partial(F.gelu, approximate="tanh"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_out_norm: torch.Tensor | None
    feed_forward_out_norm: torch.Tensor | None


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
        self._rope = rope_tables(config.rope, max_model_len)
        sliding = config.sliding_window
        self._local_rope = self._rope if sliding is None else rope_tables(sliding.rope, max_model_len)
        self._activation = _ACTIVATIONS[config.activation]
        self.weight_bytes = config.parameter_count * 4

    @property
    def deterministic(self) -> bool:
        return False

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs, store: KVStore) -> torch.Tensor:
        """See `Forward`."""
        positions = torch.from_numpy(inputs.positions).long()
        blocks, offsets = _slots(inputs, store.block_size)
        turns = [table[positions, None] for table in self._rope]
        local_turns = [table[positions, None] for table in self._local_rope]
        x = self._embedding[torch.from_numpy(inputs.token_ids).long()] * self._config.embedding_scale
        for index, layer in enumerate(self._layers):
            window = self._window(index)
            query, key, value = self._project(layer, x, *(turns if window is None else local_turns))
            store.keys(index)[blocks, :, :, offsets] = key.to(store.data.dtype)
            store.values(index)[blocks, :, offsets] = value.to(store.data.dtype)
            attended = F.linear(self._attend(query, inputs, store, index, window), layer.output)
            x = x + self._normed(attended, layer.attention_out_norm)
            gate, up = F.linear(_rms_norm(x, layer.post_norm, self._config), layer.gate_up).chunk(2, dim=-1)
            down = F.linear(self._activation(gate) * up, layer.down)
            x = x + self._normed(down, layer.feed_forward_out_norm)
        return _rms_norm(x[torch.from_numpy(inputs.selected).long()], self._norm, self._config)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        return F.linear(hidden, self._head)

    def _window(self, layer: int) -> int | None:
        sliding = self._config.sliding_window
        return sliding.tokens if sliding is not None and sliding.covers(layer) else None

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else _rms_norm(x, weight, self._config)

    def _project(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self._config
        mixed = F.linear(_rms_norm(x, layer.input_norm, config), layer.qkv, layer.qkv_bias)
        ends = (config.query_width, config.query_width + config.kv_width)
        parts = mixed[:, : ends[0]], mixed[:, ends[0] : ends[1]], mixed[:, ends[1] :]
        query, key, value = (part.reshape(len(x), -1, config.head_dim) for part in parts)
        query, key = self._normed(query, layer.query_norm), self._normed(key, layer.key_norm)
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value

    def _attend(
        self, query: torch.Tensor, inputs: StepInputs, store: KVStore, layer: int, window: int | None
    ) -> torch.Tensor:
        config = self._config
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        group = config.head_count // config.kv_head_count
        keys, values = store.keys(layer), store.values(layer)
        parts = []
        for row, (start, end) in enumerate(zip(inputs.query_starts[:-1], inputs.query_starts[1:], strict=True)):
            length = int(inputs.positions[end - 1]) + 1
            blocks = torch.from_numpy(inputs.block_tables[row, : -(-length // store.block_size)]).long()
            key = keys[blocks].permute(1, 2, 0, 3).flatten(2)[:, :, :length].float()
            value = values[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()
            q = query[start:end].view(end - start, config.kv_head_count, group, config.head_dim).permute(1, 2, 0, 3)
            scores = q @ key[:, None] * scale
            limits = torch.from_numpy(inputs.positions[start:end]).long()
            unseen = torch.arange(length) > limits[:, None]
            if window is not None:
                unseen |= torch.arange(length) <= limits[:, None] - window
            weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
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
        query_norm=joined(layer.query_norm),
        key_norm=joined(layer.key_norm),
        attention_out_norm=joined(layer.attention_out_norm),
        feed_forward_out_norm=joined(layer.feed_forward_out_norm),
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
