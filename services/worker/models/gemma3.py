"""The Gemma 3 family (text): what its block has beyond Llama's, and which layers see a window only.

Source: Gemma 3 Technical Report (arXiv 2503.19786). Norm weights come with their 1 already added, as GGUF stores them.
"""

from __future__ import annotations

import dataclasses
import math

from services.worker.models.model_config import Activation, ModelConfig, RopeConfig, SlidingWindow

_LOCAL_THETA = 10_000.0
_PERIOD = 6
# The 27B model scales scores by its width over its heads, not by the size of a head; its depth tells it.
_LAYERS_OF_27B = 62


def gemma3_config(config: ModelConfig, window: int | None) -> ModelConfig:
    """`config`, as read like a Llama's, with what Gemma 3 adds; `window` in tokens, None where every layer sees all."""
    scale = None
    if config.layer_count == _LAYERS_OF_27B:
        scale = (config.hidden_size / config.head_count) ** -0.5
    sliding = None
    if window is not None:
        sliding = SlidingWindow(window, _PERIOD, RopeConfig(theta=_LOCAL_THETA, dimension=config.head_dim))
    return dataclasses.replace(
        config,
        activation=Activation.GELU_TANH,
        embedding_scale=math.sqrt(config.hidden_size),
        attention_scale=scale,
        extra_norms=True,
        sliding_window=sliding,
    )
