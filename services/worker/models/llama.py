"""The Llama family (Llama, SmolLM2, Mistral): which tensors make a block, and their shapes."""

from __future__ import annotations

from services.worker.models.decoder import DecoderTensors, LayerTensors
from services.worker.models.model_config import ModelConfig
from services.worker.models.tensors import FloatArray, TensorSource


def llama_tensors(config: ModelConfig, source: TensorSource) -> DecoderTensors:
    """Take every tensor of the family; raises ModelLoadError for a missing, misshapen or unused one."""
    embedding = source.take("embed.weight", (config.embedding_rows, config.hidden_size))
    layers = tuple(_layer(config, source, f"layers.{index}.") for index in range(config.layer_count))
    norm = source.take("norm.weight", (config.hidden_size,)).float32()
    lm_head = embedding
    if not config.tied_embeddings:
        lm_head = source.take("lm_head.weight", (config.embedding_rows, config.hidden_size))
    source.finish()
    return DecoderTensors(config, embedding, layers, norm, lm_head)


def _layer(config: ModelConfig, source: TensorSource, prefix: str) -> LayerTensors:
    hidden, wide = config.hidden_size, config.intermediate_size

    def bias(name: str, width: int) -> FloatArray | None:
        return source.take(f"{prefix}{name}.bias", (width,)).float32() if config.qkv_bias else None

    def extra_norm(name: str, width: int) -> FloatArray | None:
        return source.take(f"{prefix}{name}.weight", (width,)).float32() if config.extra_norms else None

    return LayerTensors(
        input_norm=source.take(prefix + "input_norm.weight", (hidden,)).float32(),
        post_norm=source.take(prefix + "post_norm.weight", (hidden,)).float32(),
        query=source.take(prefix + "q_proj.weight", (config.query_width, hidden)),
        key=source.take(prefix + "k_proj.weight", (config.kv_width, hidden)),
        value=source.take(prefix + "v_proj.weight", (config.kv_width, hidden)),
        output=source.take(prefix + "o_proj.weight", (hidden, config.query_width)),
        gate=source.take(prefix + "gate_proj.weight", (wide, hidden)),
        up=source.take(prefix + "up_proj.weight", (wide, hidden)),
        down=source.take(prefix + "down_proj.weight", (hidden, wide)),
        query_bias=bias("q_proj", config.query_width),
        key_bias=bias("k_proj", config.kv_width),
        value_bias=bias("v_proj", config.kv_width),
        query_norm=extra_norm("q_norm", config.head_dim),
        key_norm=extra_norm("k_norm", config.head_dim),
        attention_out_norm=extra_norm("attention_out_norm", hidden),
        feed_forward_out_norm=extra_norm("feed_forward_out_norm", hidden),
    )
