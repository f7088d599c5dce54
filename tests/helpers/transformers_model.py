"""The embedded model's weights inside transformers' own model: the reference for what a transformer says."""

from __future__ import annotations

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.worker.models.decoder import DecoderTensors
from services.worker.models.gguf_loader import load_gguf
from services.worker.models.registry import decoder_tensors
from tests.golden.make_smollm2_greedy import model_path


@functools.cache
def transformers_model() -> LlamaForCausalLM:
    """The same weights inside transformers' own model."""
    checkpoint = load_gguf(model_path())
    shape = checkpoint.config
    config = LlamaConfig(
        vocab_size=shape.embedding_rows,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layer_count,
        num_attention_heads=shape.head_count,
        num_key_value_heads=shape.kv_head_count,
        max_position_embeddings=shape.context_length,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    state = _state(decoder_tensors(shape, checkpoint.tensors))
    model = empty.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()


def _state(tensors: DecoderTensors) -> dict[str, torch.Tensor]:
    state = {
        "model.embed_tokens.weight": torch.from_numpy(tensors.embedding.float32()),
        "model.norm.weight": torch.from_numpy(tensors.norm),
    }
    for index, layer in enumerate(tensors.layers):
        start = f"model.layers.{index}."
        state[start + "input_layernorm.weight"] = torch.from_numpy(layer.input_norm)
        state[start + "post_attention_layernorm.weight"] = torch.from_numpy(layer.post_norm)
        for name, stored in (
            ("self_attn.q_proj", layer.query),
            ("self_attn.k_proj", layer.key),
            ("self_attn.v_proj", layer.value),
            ("self_attn.o_proj", layer.output),
            ("mlp.gate_proj", layer.gate),
            ("mlp.up_proj", layer.up),
            ("mlp.down_proj", layer.down),
        ):
            state[f"{start}{name}.weight"] = torch.from_numpy(stored.float32())
    return state
