"""Rotary tables: cosines and sines by position, computed once at load in float32 as the reference does.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3.1's frequency bands.
"""

from __future__ import annotations

import math

import torch

from services.worker.models.model_config import RopeConfig, RopeScaling


def rope_tables(rope: RopeConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, each (length, dimension / 2) float32 on the CPU."""
    frequencies, scale = _frequencies(rope)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos() * scale, angles.sin() * scale


def _frequencies(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    steps = torch.arange(0, rope.dimension, 2, dtype=torch.int64).to(torch.float32) / rope.dimension
    frequencies = 1.0 / (rope.theta**steps)
    scale = 1.0
    if rope.scaling is RopeScaling.LINEAR:
        frequencies = frequencies / rope.factor
    elif rope.scaling is RopeScaling.LLAMA3:
        frequencies = _llama3(rope, frequencies)
    elif rope.scaling is RopeScaling.YARN:
        frequencies = _yarn(rope, frequencies)
        scale = rope.attention_factor or 0.1 * math.log(max(rope.factor, 1.0)) + 1.0
    if rope.freq_factors:
        frequencies = frequencies / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return frequencies, scale


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    low = rope.original_context / rope.low_freq_factor
    high = rope.original_context / rope.high_freq_factor
    blend = (rope.original_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > low, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= low) & (wavelengths >= high), smooth, scaled)


def _yarn(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    def correction(rotations: float) -> float:
        span = math.log(rope.original_context / (rotations * 2 * math.pi))
        return rope.dimension * span / (2 * math.log(rope.theta))

    low = max(math.floor(correction(rope.beta_fast)), 0)
    high = min(math.ceil(correction(rope.beta_slow)), rope.dimension - 1)
    ramp = (torch.arange(rope.dimension // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return frequencies / rope.factor * (1 - keep) + frequencies * keep
