"""Family name → the function that takes its tensors. A new family is a new file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.models.decoder import DecoderTensors
from services.worker.models.errors import ModelLoadError
from services.worker.models.llama import llama_tensors
from services.worker.models.model_config import ModelConfig
from services.worker.models.qwen2 import qwen2_tensors
from services.worker.models.tensors import TensorSource

_FAMILIES: dict[str, Callable[[ModelConfig, TensorSource], DecoderTensors]] = {
    "gemma3": llama_tensors,
    "llama": llama_tensors,
    "qwen2": qwen2_tensors,
}


def decoder_tensors(config: ModelConfig, source: TensorSource) -> DecoderTensors:
    """The tensors of `config.family`; raises ModelLoadError for a family nobody wrote."""
    family = _FAMILIES.get(config.family)
    if family is None:
        raise ModelLoadError(f"the model family {config.family} is not supported")
    return family(config, source)
