"""Folder of safetensors (as `transformers` saves one) → Checkpoint, for the Llama-shaped architectures.

Owns the meaning of `config.json` and of tensor names. Runs no code of the folder and unpickles nothing.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.worker.models import gguf_metadata as meta
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.errors import ModelLoadError
from services.worker.models.folder_tokenizer import tokenizer_from_folder
from services.worker.models.json_file import read_object, section
from services.worker.models.model_config import ModelConfig, RopeConfig, RopeScaling, check_config
from services.worker.models.tensors import GGMLType, NamedTensors, StoredTensor
from services.worker.stages import StageClock

MAX_SHARDS = 1024
_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
_ENCODINGS = {
    torch.float32: GGMLType.F32,
    torch.float16: GGMLType.F16,
    torch.bfloat16: GGMLType.BF16,
}
_SCALINGS = {
    "default": RopeScaling.NONE,
    "linear": RopeScaling.LINEAR,
    "llama3": RopeScaling.LLAMA3,
    "yarn": RopeScaling.YARN,
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_PARTS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}


def load_folder(folder: Path, stages: StageClock | None = None) -> Checkpoint:
    """Read `folder`; raises ModelLoadError. Blocks on disk, once through the weights for their digest."""
    stages = stages if stages is not None else StageClock()
    settings = read_object(folder / "config.json")
    tokenizer = tokenizer_from_folder(folder, settings)
    stages.ended("tokenizer")
    shards = _shards(folder)
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        _read_shard(shard, tensors)
    tied = meta.optional_bool(settings, "tie_word_embeddings") is True or "lm_head.weight" not in tensors
    if tied:
        tensors.pop("lm_head.weight", None)
    config = check_config(_config(settings, tensors, tokenizer.vocab_size, tied=tied))
    stages.ended("map")
    digest = _digest([folder / "config.json", folder / "tokenizer.json", *shards])
    stages.ended("digest")
    name, source = folder.resolve().name, NamedTensors(tensors)
    return Checkpoint(name, "unknown", digest, config, source, tokenizer, quantised=False)


def _shards(folder: Path) -> list[Path]:
    """The weight files, in order of name; an index may name files of this folder only."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ModelLoadError(f"the folder {folder.name} has no model.safetensors")
        return [single]
    names = sorted({str(name) for name in section(read_object(index), "weight_map").values()})
    if not 1 <= len(names) <= MAX_SHARDS:
        raise ModelLoadError(f"{index.name} names {len(names)} files, outside 1 to {MAX_SHARDS}")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadError(f"{index.name} names {name!r}, which is not a file of the folder")
        if not (folder / name).is_file():
            raise ModelLoadError(f"the folder {folder.name} has no {name}")
    return [folder / name for name in names]


def _read_shard(path: Path, into: dict[str, StoredTensor]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            for stored_name in file.keys():  # noqa: SIM118 - the handle is no mapping
                if stored_name.endswith("rotary_emb.inv_freq"):
                    continue
                name = _canonical_name(stored_name)
                if name in into:
                    raise ModelLoadError(f"tensor {stored_name} appears twice")
                into[name] = _stored(stored_name, file.get_tensor(stored_name))
    except SafetensorError as error:
        raise ModelLoadError(f"{path.name} is corrupt: {error}") from None
    except OSError as error:
        raise ModelLoadError(f"cannot read {path.name}: {error}") from None


def _stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    encoding = _ENCODINGS.get(tensor.dtype)
    if encoding is None:
        raise ModelLoadError(f"tensor {name} holds {tensor.dtype}, which is not supported")
    if not 1 <= tensor.dim() <= 2 or not tensor.numel():
        raise ModelLoadError(f"tensor {name} has shape {tuple(tensor.shape)}")
    shape = tuple(tensor.shape)
    data = tensor.contiguous().view(torch.uint8).numpy().reshape(math.prod(shape[:-1]), -1)
    return StoredTensor(name, shape, encoding, data)


def _canonical_name(stored: str) -> str:
    if stored in _TOP_NAMES:
        return _TOP_NAMES[stored]
    parts = stored.split(".")
    if parts[:2] == ["model", "layers"] and len(parts) in (5, 6) and parts[2].isdecimal():
        part = parts[-2]
        return f"layers.{int(parts[2])}.{_PARTS.get(part, part)}.{parts[-1]}"
    return stored


def _config(
    settings: dict[str, object], tensors: dict[str, StoredTensor], vocab_size: int, *, tied: bool
) -> ModelConfig:
    kind = meta.optional_text(settings, "model_type") or "unnamed"
    if kind not in _FAMILIES:
        raise ModelLoadError(f"the model type {kind} is not supported (supported: {', '.join(sorted(_FAMILIES))})")
    activation = meta.optional_text(settings, "hidden_act") or "silu"
    if activation != "silu":
        raise ModelLoadError(f"the activation {activation} is not supported")
    embedding = tensors.get("embed.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError("the model has no tensor model.embed_tokens.weight")
    context = meta.required_int(settings, "max_position_embeddings")
    window = meta.optional_int(settings, "sliding_window")
    if window is not None and meta.optional_bool(settings, "use_sliding_window") is not False and window < context:
        raise ModelLoadError(f"a sliding window of {window} tokens is not supported")
    heads = meta.required_int(settings, "num_attention_heads")
    hidden = meta.required_int(settings, "hidden_size")
    if heads < 1:
        raise ModelLoadError(f"the model's head count is {heads}, outside 1 to 1048576")
    head_dim = meta.optional_int(settings, "head_dim") or hidden // heads
    return ModelConfig(
        family=_FAMILIES[kind],
        vocab_size=vocab_size,
        embedding_rows=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=meta.required_int(settings, "intermediate_size"),
        layer_count=meta.required_int(settings, "num_hidden_layers"),
        head_count=heads,
        kv_head_count=meta.optional_int(settings, "num_key_value_heads") or heads,
        head_dim=head_dim,
        context_length=context,
        norm_eps=meta.optional_float(settings, "rms_norm_eps") or 1e-6,
        rope=_rope(settings, head_dim, context),
        tied_embeddings=tied,
        qkv_bias="layers.0.q_proj.bias" in tensors,
    )


def _rope(settings: dict[str, object], head_dim: int, context: int) -> RopeConfig:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` as older files have them."""
    stretch = section(settings, "rope_parameters") or section(settings, "rope_scaling")
    kind = meta.optional_text(stretch, "rope_type") or meta.optional_text(stretch, "type") or "default"
    if kind not in _SCALINGS:
        raise ModelLoadError(f"the rope scaling {kind} is not supported")
    theta = meta.optional_float(stretch, "rope_theta") or meta.optional_float(settings, "rope_theta")
    return RopeConfig(
        theta=theta or 10000.0,
        dimension=head_dim,
        scaling=_SCALINGS[kind],
        factor=meta.optional_float(stretch, "factor") or 1.0,
        original_context=meta.optional_int(stretch, "original_max_position_embeddings") or context,
        low_freq_factor=meta.optional_float(stretch, "low_freq_factor") or 1.0,
        high_freq_factor=meta.optional_float(stretch, "high_freq_factor") or 4.0,
        beta_fast=meta.optional_float(stretch, "beta_fast") or 32.0,
        beta_slow=meta.optional_float(stretch, "beta_slow") or 1.0,
        attention_factor=meta.optional_float(stretch, "attention_factor"),
    )


def _digest(files: list[Path]) -> bytes:
    """SHA-256 over each file's name and own SHA-256."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as handle:
            total.update(path.name.encode() + b"\0" + hashlib.file_digest(handle, "sha256").digest())
    return total.digest()
