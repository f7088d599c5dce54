"""A tiny random transformer in a folder, as `transformers` would save one, and what plain torch says to a prompt."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

THETA = 10_000.0


@dataclasses.dataclass(frozen=True)
class TinyShape:
    """The default runs in the compiled kernels too. `padded_rows` are rows of the embedding beyond the vocabulary."""

    model_type: str = "llama"
    vocab_size: int = 64
    padded_rows: int = 0
    hidden_size: int = 64
    intermediate_size: int = 96
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    context: int = 256

    @property
    def has_bias(self) -> bool:
        return self.model_type == "qwen2"


def write_tiny_model(folder: Path, shape: TinyShape | None = None, *, seed: int = 0) -> Path:
    """Save random weights, a byte tokenizer of `vocab_size` words and the settings; returns the folder."""
    shape = shape or TinyShape()
    folder.mkdir(parents=True, exist_ok=True)
    noise = torch.Generator().manual_seed(seed)

    def random(*size: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(*size, generator=noise) * scale

    hidden, wide = shape.hidden_size, shape.intermediate_size
    rows = shape.vocab_size + shape.padded_rows
    widths = {
        "q": shape.heads * shape.head_dim,
        "k": shape.kv_heads * shape.head_dim,
        "v": shape.kv_heads * shape.head_dim,
    }
    weights = {
        "model.embed_tokens.weight": random(rows, hidden, scale=1.0),
        "model.norm.weight": 1 + random(hidden),
        "lm_head.weight": random(rows, hidden),
    }
    # Were they counted, the padded rows would win.
    weights["lm_head.weight"][shape.vocab_size :] *= 4
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        for name, width in widths.items():
            weights[f"{at}self_attn.{name}_proj.weight"] = random(width, hidden)
            if shape.has_bias:
                weights[f"{at}self_attn.{name}_proj.bias"] = random(width, scale=1.0)
        weights[f"{at}self_attn.o_proj.weight"] = random(hidden, widths["q"])
        weights[f"{at}mlp.gate_proj.weight"] = random(wide, hidden)
        weights[f"{at}mlp.up_proj.weight"] = random(wide, hidden)
        weights[f"{at}mlp.down_proj.weight"] = random(hidden, wide)
        weights[f"{at}input_layernorm.weight"] = 1 + random(hidden)
        weights[f"{at}post_attention_layernorm.weight"] = 1 + random(hidden)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_settings(shape)))
    _write_tokenizer(folder, shape.vocab_size)
    return folder


def reference_logits(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits (tokens, rows) float32 after each token, from the saved weights, written out plainly and in one go."""
    settings = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    head_dim, heads, kv_heads = settings["head_dim"], settings["num_attention_heads"], settings["num_key_value_heads"]
    count = len(token_ids)
    angles = torch.arange(count)[:, None] / THETA ** (torch.arange(0, head_dim, 2) / head_dim)
    turn = torch.cat((angles, angles), dim=-1)[:, None]
    future = torch.full((count, count), float("-inf")).triu(1)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return weights[name] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + settings["rms_norm_eps"]))

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * turn.cos() + torch.cat((-second, first), dim=-1) * turn.sin()

    x = weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
    for layer in range(settings["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm.weight")
        query = rotate(project(y, at + "self_attn.q_proj").view(count, heads, head_dim))
        key = rotate(project(y, at + "self_attn.k_proj").view(count, kv_heads, head_dim))
        value = project(y, at + "self_attn.v_proj").view(count, kv_heads, head_dim)
        key, value = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * head_dim**-0.5 + future
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(count, -1)
        x = x + project(attended, at + "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm.weight")
        x = x + project(F.silu(project(y, at + "mlp.gate_proj")) * project(y, at + "mlp.up_proj"), at + "mlp.down_proj")
    return F.linear(norm(x, "model.norm.weight"), weights["lm_head.weight"])


def reference_greedy(folder: Path, prompt: Sequence[int], count: int, *, vocab_size: int) -> list[int]:
    """The most likely real token `count` times over, each from the whole sequence anew."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(int(reference_logits(folder, token_ids)[-1, :vocab_size].argmax()))
    return token_ids[len(prompt) :]


def _settings(shape: TinyShape) -> dict[str, object]:
    return {
        "model_type": shape.model_type,
        "vocab_size": shape.vocab_size + shape.padded_rows,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - 2]]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
