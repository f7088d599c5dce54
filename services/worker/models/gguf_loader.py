"""GGUF file → Checkpoint: meaning of keys, names and row orders of the Llama-shaped architectures.

Owns the mapping to canonical names. Copies no weights except rows that the format permutes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from services.worker.models import gguf_metadata as meta
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.errors import ModelLoadError
from services.worker.models.gemma3 import gemma3_config
from services.worker.models.gguf_file import GGUFFile, read_gguf
from services.worker.models.model_config import ModelConfig, RopeConfig, RopeScaling, check_config
from services.worker.models.tensors import GGMLType, IndexArray, NamedTensors, StoredTensor
from services.worker.models.tokenizer_export import TokenizerExport, tokenizer_from_gguf
from services.worker.stages import StageClock

# Architectures whose query and key rows are stored for interleaved rope pairs.
_PERMUTED = frozenset({"llama"})
_FAMILIES = {"gemma3": "gemma3", "llama": "llama", "qwen2": "qwen2"}
_TOP_NAMES = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_norm.weight",
    "ffn_norm.weight": "post_norm.weight",
    "attn_q.weight": "q_proj.weight",
    "attn_k.weight": "k_proj.weight",
    "attn_v.weight": "v_proj.weight",
    "attn_q.bias": "q_proj.bias",
    "attn_k.bias": "k_proj.bias",
    "attn_v.bias": "v_proj.bias",
    "attn_output.weight": "o_proj.weight",
    "ffn_gate.weight": "gate_proj.weight",
    "ffn_up.weight": "up_proj.weight",
    "ffn_down.weight": "down_proj.weight",
    "attn_q_norm.weight": "q_norm.weight",
    "attn_k_norm.weight": "k_norm.weight",
    "post_attention_norm.weight": "attention_out_norm.weight",
    "post_ffw_norm.weight": "feed_forward_out_norm.weight",
}
_PLAIN = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})


def load_gguf(path: Path, stages: StageClock | None = None) -> Checkpoint:
    """Read `path`; raises ModelLoadError. Blocks on disk (header, and once through the file for its digest)."""
    stages = stages if stages is not None else StageClock()
    file = read_gguf(path)
    stages.ended("map")
    tokenizer = tokenizer_from_gguf(file.metadata)
    stages.ended("tokenizer")
    config = check_config(_config(file, tokenizer))
    tensors = _canonical_tensors(file, config)
    quantised = any(tensor.encoding not in _PLAIN for tensor in file.tensors.values())
    name = meta.optional_text(file.metadata, "general.name") or path.stem
    owner = meta.optional_text(file.metadata, "general.organization") or "unknown"
    stages.ended("map")
    digest = file_digest(path)
    stages.ended("digest")
    return Checkpoint(name, owner, digest, config, tensors, tokenizer, quantised)


def file_digest(path: Path) -> bytes:
    """SHA-256 of the file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").digest()


def _config(file: GGUFFile, tokenizer: TokenizerExport) -> ModelConfig:
    data = file.metadata
    architecture = meta.optional_text(data, "general.architecture") or "unnamed"
    if architecture not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelLoadError(f"the architecture {architecture} is not supported (supported: {known})")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError("the model has no tensor token_embd.weight")
    heads = meta.required_int(data, f"{architecture}.attention.head_count")
    hidden = meta.required_int(data, f"{architecture}.embedding_length")
    if heads < 1:
        raise ModelLoadError(f"the model's head count is {heads}, outside 1 to 1048576")
    head_dim = meta.optional_int(data, f"{architecture}.attention.key_length") or hidden // heads
    kv_heads = meta.optional_int(data, f"{architecture}.attention.head_count_kv") or heads
    context = meta.required_int(data, f"{architecture}.context_length")
    config = ModelConfig(
        family=_FAMILIES[architecture],
        vocab_size=tokenizer.vocab_size,
        embedding_rows=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=meta.required_int(data, f"{architecture}.feed_forward_length"),
        layer_count=meta.required_int(data, f"{architecture}.block_count"),
        head_count=heads,
        kv_head_count=kv_heads,
        head_dim=head_dim,
        context_length=context,
        norm_eps=meta.optional_float(data, f"{architecture}.attention.layer_norm_rms_epsilon") or 1e-5,
        rope=_rope(file, architecture, head_dim, context),
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
    )
    if config.family == "gemma3":
        return gemma3_config(config, meta.optional_int(data, "gemma3.attention.sliding_window"))
    return config


def _rope(file: GGUFFile, architecture: str, head_dim: int, context: int) -> RopeConfig:
    data = file.metadata
    kind = meta.optional_text(data, f"{architecture}.rope.scaling.type") or "none"
    kinds = {"none": RopeScaling.NONE, "linear": RopeScaling.LINEAR, "yarn": RopeScaling.YARN}
    if kind not in kinds:
        raise ModelLoadError(f"the rope scaling {kind} is not supported")
    factors: tuple[float, ...] = ()
    stored = file.tensors.get("rope_freqs.weight")
    if stored is not None:
        factors = tuple(float(value) for value in stored.float32().reshape(-1))
    return RopeConfig(
        theta=meta.optional_float(data, f"{architecture}.rope.freq_base") or 10000.0,
        dimension=meta.optional_int(data, f"{architecture}.rope.dimension_count") or head_dim,
        scaling=kinds[kind],
        factor=meta.optional_float(data, f"{architecture}.rope.scaling.factor") or 1.0,
        original_context=meta.optional_int(data, f"{architecture}.rope.scaling.original_context_length") or context,
        freq_factors=factors,
    )


def _canonical_tensors(file: GGUFFile, config: ModelConfig) -> NamedTensors:
    architecture = meta.optional_text(file.metadata, "general.architecture") or ""
    tensors: dict[str, StoredTensor] = {}
    for stored_name, tensor in file.tensors.items():
        if stored_name == "rope_freqs.weight":
            continue
        name = _canonical_name(stored_name)
        short = name.rsplit(".", 2)[-2]
        if architecture in _PERMUTED and short in ("q_proj", "k_proj"):
            heads = config.head_count if short == "q_proj" else config.kv_head_count
            tensors[name] = _unpermuted(tensor, heads)
        else:
            tensors[name] = tensor
    return NamedTensors(tensors)


def _canonical_name(stored: str) -> str:
    if stored in _TOP_NAMES:
        return _TOP_NAMES[stored]
    parts = stored.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _LAYER_NAMES:
        return f"layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}"
    return stored if "." in stored else f"{stored}.weight"


def _unpermuted(tensor: StoredTensor, heads: int) -> StoredTensor:
    """Rows back from rope pairs (0, 1), (2, 3) … to halves (0, d/2), (1, d/2 + 1) …, head by head."""
    rows = tensor.shape[0]
    if rows % (2 * heads) or tensor.rows != rows:
        raise ModelLoadError(f"tensor {tensor.name} has {rows} rows, which {heads} heads do not divide")
    index: IndexArray = np.arange(rows, dtype=np.int64).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    return tensor.take_rows(index)
