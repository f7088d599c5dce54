"""What a decoder-only transformer looks like, whatever file it came from.

Owns the shape arithmetic and the limits a loader checks. Reads no file and no environment.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from services.worker.models.errors import ModelLoadError

MAX_CONTEXT = 1 << 22
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 21
MAX_LAYERS = 1024


class RopeScaling(enum.Enum):
    """How rotary frequencies are stretched beyond the trained context."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `dimension` values of a head, in halves (not interleaved pairs).

    `freq_factors` (dimension / 2,) divide the frequencies (the GGUF tensor `rope_freqs.weight`).
    """

    theta: float
    dimension: int
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    freq_factors: tuple[float, ...] = ()


class Activation(enum.Enum):
    """What the gate of the feed-forward part goes through."""

    SILU = "silu"
    GELU_TANH = "gelu (tanh)"


@dataclasses.dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers that see the last `tokens` positions only (their own among them), with `rope` of their own.

    Every layer but the last of each `period` is one.
    """

    tokens: int
    period: int
    rope: RopeConfig

    def covers(self, layer: int) -> bool:
        """Whether `layer`, from 0, is one of them."""
        return (layer + 1) % self.period != 0


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one model. `vocab_size` counts real tokens, `embedding_rows` the rows of the matrix (>= vocab_size).

    `attention_scale` multiplies the scores, None for head_dim ** -0.5. `extra_norms`: a block also norms each head's
    query and key, and what attention and feed-forward give before it is added.
    """

    family: str
    vocab_size: int
    embedding_rows: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool = False
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    extra_norms: bool = False
    sliding_window: SlidingWindow | None = None

    @property
    def is_plain(self) -> bool:
        """A block as Llama's, with or without biases of its projections."""
        is_scaled = self.embedding_scale != 1.0 or self.attention_scale is not None
        return not (is_scaled or self.extra_norms or self.sliding_window or self.activation is not Activation.SILU)

    @property
    def query_width(self) -> int:
        return self.head_count * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_head_count * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        """Values (keys and values, all layers) that one token keeps in the cache."""
        return 2 * self.layer_count * self.kv_width

    @property
    def parameter_count(self) -> int:
        layer = self.hidden_size * (2 * self.query_width + 2 * self.kv_width + 3 * self.intermediate_size + 2)
        embeddings = self.embedding_rows * self.hidden_size * (1 if self.tied_embeddings else 2)
        return layer * self.layer_count + embeddings + self.hidden_size


def check_config(config: ModelConfig) -> ModelConfig:
    """Return `config` when every number is inside its limits; raises ModelLoadError naming the first that is not."""
    bounds = (
        ("vocabulary size", config.vocab_size, 1, MAX_VOCAB),
        ("embedding rows", config.embedding_rows, config.vocab_size, MAX_VOCAB),
        ("hidden size", config.hidden_size, 1, MAX_WIDTH),
        ("feed-forward size", config.intermediate_size, 1, MAX_WIDTH),
        ("layer count", config.layer_count, 1, MAX_LAYERS),
        ("head count", config.head_count, 1, MAX_WIDTH),
        ("key/value head count", config.kv_head_count, 1, config.head_count),
        ("head size", config.head_dim, 2, 1024),
        ("context length", config.context_length, 1, MAX_CONTEXT),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise ModelLoadError(f"the model's {name} is {value}, outside {low} to {high}")
    if config.head_count % config.kv_head_count:
        raise ModelLoadError(f"{config.head_count} heads cannot share {config.kv_head_count} key/value heads evenly")
    if not 0.0 < config.norm_eps < 1.0:
        raise ModelLoadError(f"the model's norm epsilon is {config.norm_eps}, outside 0 to 1")
    _check_rope(config, config.rope)
    if config.sliding_window is not None:
        if config.sliding_window.tokens < 1:
            raise ModelLoadError(f"the model's sliding window is {config.sliding_window.tokens} tokens")
        _check_rope(config, config.sliding_window.rope)
    return config


def _check_rope(config: ModelConfig, rope: RopeConfig) -> None:
    if not (math.isfinite(rope.theta) and rope.theta > 0):
        raise ModelLoadError(f"the model's rope base is {rope.theta}, not a positive number")
    if rope.dimension != config.head_dim or rope.dimension % 2:
        raise ModelLoadError(f"rope over {rope.dimension} of {config.head_dim} head values is not supported")
    if not (math.isfinite(rope.factor) and rope.factor > 0):
        raise ModelLoadError(f"the model's rope factor is {rope.factor}, not a positive number")
    if rope.freq_factors and len(rope.freq_factors) != rope.dimension // 2:
        raise ModelLoadError(f"{len(rope.freq_factors)} rope frequency factors do not fit {rope.dimension} values")
    if not all(math.isfinite(value) and value > 0 for value in rope.freq_factors):
        raise ModelLoadError("the model's rope frequency factors are not all positive numbers")
