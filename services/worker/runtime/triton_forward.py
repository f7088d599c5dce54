"""The transformer and the chooser over Triton kernels and the device's own matrix products.

Owns weights on the device. The residual stream is float32. Not batch-invariant: matrix products and the parts of a
context change with the batch. Called by the runner; on a CPU only in Triton's interpreter, which is for tests.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.kernels.gated import gated
from services.worker.kernels.paged_attention import AttentionShape, context_parts, paged_attention
from services.worker.kernels.rms_norm import add_rms_norm
from services.worker.kernels.rotary_kv import HeadNorms, RotaryTables, rotary_kv
from services.worker.kernels.sampling import choose_tokens
from services.worker.models.decoder import DecoderTensors, LayerTensors
from services.worker.models.model_config import Activation
from services.worker.models.rope import rope_tables
from services.worker.models.tensors import FloatArray
from services.worker.runtime.choosing import Draw
from services.worker.runtime.device_step import DeviceStep, pack, step_size, unpack
from services.worker.runtime.forward import StepInputs
from services.worker.runtime.graphs import DecodeGraphs
from services.worker.runtime.kv_store import KVStore
from services.worker.runtime.products import PlainProduct, Product, ProductMaker

# Programs that the interpreter pretends to run at once.
_INTERPRETED_PROCESSORS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """Products in their precision, norms in float32."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    head_norms: HeadNorms | None
    attention_out_norm: torch.Tensor | None
    feed_forward_out_norm: torch.Tensor | None


class TritonForward:
    """See `Forward`."""

    def __init__(
        self,
        tensors: DecoderTensors,
        *,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        product: ProductMaker = PlainProduct,
    ) -> None:
        """`dtype` is that of embedding, head and rows; `product` makes what a layer multiplies by."""
        config = tensors.config
        self._config = config
        self._device = device
        self._dtype = dtype
        self._max_model_len = max_model_len
        self._embedding = self._matrix(tensors.embedding.float32())
        tied = tensors.lm_head is tensors.embedding
        head = self._embedding if tied else self._matrix(tensors.lm_head.float32())
        self._head = head[: config.vocab_size]
        self._norm = self._norm_of(tensors.norm)
        self._layers = [self._layer(layer, product) for layer in tensors.layers]
        self._rope = RotaryTables(*(table.to(device) for table in rope_tables(config.rope, max_model_len)))
        self._local_rope = self._rope
        if config.sliding_window is not None:
            local = rope_tables(config.sliding_window.rope, max_model_len)
            self._local_rope = RotaryTables(*(table.to(device) for table in local))
        products = [part for each in self._layers for part in (each.qkv, each.output, each.gate_up, each.down)]
        self.weight_bytes = self._embedding.nbytes + (0 if tied else head.nbytes)
        self.weight_bytes += sum(part.weight_bytes for part in products)
        self.processors = _INTERPRETED_PROCESSORS
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._graphs: DecodeGraphs | None = None

    @property
    def deterministic(self) -> bool:
        return False

    @torch.inference_mode()
    def capture(self, store: KVStore, *, max_requests: int) -> None:
        """Record decoding steps over `store` as CUDA graphs, for batches up to `max_requests`; blocks for seconds."""
        width = -(-self._max_model_len // store.block_size)
        self._graphs = DecodeGraphs(
            lambda step: self._run(step, store), store, max_requests=max_requests, table_width=width
        )

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs, store: KVStore) -> torch.Tensor:
        """See `Forward`."""
        if self._graphs is not None and self._graphs.fits(inputs, store):
            normed = self._graphs.replay(inputs)
        else:
            size = step_size(inputs, self._config.head_count // self._config.kv_head_count)
            packed = torch.from_numpy(pack(inputs, size, store.block_size)).to(self._device)
            normed = self._run(unpack(packed, size), store)
        return normed[torch.from_numpy(inputs.selected).long().to(self._device)]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        return F.linear(hidden, self._head).float()

    def _run(self, step: DeviceStep, store: KVStore) -> torch.Tensor:
        """Normed rows (T, hidden) of every token of the step, in the products' dtype."""
        config, layers = self._config, self._layers
        x = F.embedding(step.token_ids, self._embedding).float() * config.embedding_scale
        normed = torch.empty(x.shape, dtype=self._dtype, device=self._device)
        add_rms_norm(x, None, layers[0].input_norm, normed, eps=config.norm_eps)
        for index, layer in enumerate(layers):
            sliding = config.sliding_window
            window = sliding.tokens if sliding is not None and sliding.covers(index) else None
            attended = self._attend(step, store, index, layer.qkv(normed), window)
            delta = layer.output(attended)
            add_rms_norm(x, delta, layer.post_norm, normed, eps=config.norm_eps, delta_weight=layer.attention_out_norm)
            opened = gated(layer.gate_up(normed), is_gelu=config.activation is Activation.GELU_TANH)
            is_last = index + 1 == len(layers)
            add_rms_norm(
                x,
                layer.down(opened),
                self._norm if is_last else layers[index + 1].input_norm,
                normed,
                eps=config.norm_eps,
                delta_weight=layer.feed_forward_out_norm,
            )
        return normed

    def _attend(
        self, step: DeviceStep, store: KVStore, index: int, mixed: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        config = self._config
        keys, values = store.keys(index), store.values(index)
        rope = self._rope if window is None else self._local_rope
        query = rotary_kv(mixed, keys, values, step.places, rope, norms=self._layers[index].head_norms)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        tiles = len(step.batch.tiles.requests)
        parts = context_parts(tiles, config.kv_head_count, multiprocessors=self.processors)
        return paged_attention(query, keys, values, step.batch, AttentionShape(scale, window, parts)).flatten(1)

    def _matrix(self, *parts: FloatArray) -> torch.Tensor:
        """Rows of all parts, one after the other; converted before they are sent."""
        return torch.cat([torch.from_numpy(part).to(self._dtype) for part in parts]).to(self._device)

    def _norm_of(self, weight: FloatArray) -> torch.Tensor:
        return torch.from_numpy(weight).to(self._device)

    def _layer(self, layer: LayerTensors, product: ProductMaker) -> _Layer:
        biases = [part for part in (layer.query_bias, layer.key_bias, layer.value_bias) if part is not None]
        norms = [part for part in (layer.query_norm, layer.key_norm) if part is not None]
        outer = layer.attention_out_norm, layer.feed_forward_out_norm
        attention_out, feed_forward_out = (None if part is None else self._norm_of(part) for part in outer)
        return _Layer(
            input_norm=self._norm_of(layer.input_norm),
            post_norm=self._norm_of(layer.post_norm),
            qkv=product(
                self._matrix(layer.query.float32(), layer.key.float32(), layer.value.float32()),
                self._matrix(*biases) if biases else None,
            ),
            # A tenth of the weights, and most of what rounding all of them costs (docs/gpu.md).
            output=PlainProduct(self._matrix(layer.output.float32()), None),
            gate_up=product(self._matrix(layer.gate.float32(), layer.up.float32()), None),
            down=product(self._matrix(layer.down.float32()), None),
            head_norms=HeadNorms(self._norm_of(np.stack(norms)), self._config.norm_eps) if norms else None,
            attention_out_norm=attention_out,
            feed_forward_out_norm=feed_forward_out,
        )


class TritonChooser:
    """See `Chooser`. Takes logits where they lie; waits for the device."""

    def choose(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
        """See `Chooser`."""
        rows = torch.tensor([_draw_row(draw) for draw in draws], dtype=torch.float64).to(logits.device)
        return [token if token >= 0 else None for token in choose_tokens(logits, rows).tolist()]


def _draw_row(draw: Draw) -> tuple[float, ...]:
    """In the order of `sampling.DRAW_COLUMNS`."""
    least = math.log(draw.min_p) if draw.min_p > 0.0 else -math.inf
    return draw.temperature, draw.top_p, least, draw.top_k, draw.noise_key & 0xFFFFFFFF, draw.noise_key >> 32
