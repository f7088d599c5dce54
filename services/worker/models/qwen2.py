"""The Qwen2 family: a Llama block whose query, key and value projections carry a bias."""

from __future__ import annotations

import dataclasses

from services.worker.models.decoder import DecoderTensors
from services.worker.models.llama import llama_tensors
from services.worker.models.model_config import ModelConfig
from services.worker.models.tensors import TensorSource


def qwen2_tensors(config: ModelConfig, source: TensorSource) -> DecoderTensors:
    """Take every tensor of the family; raises ModelLoadError for a missing, misshapen or unused one."""
    return llama_tensors(dataclasses.replace(config, qkv_bias=True), source)
