"""What a loader hands over: shape, tensors, tokenizer and provenance of one model. Values only."""

from __future__ import annotations

import dataclasses

from services.worker.models.model_config import ModelConfig
from services.worker.models.tensors import TensorSource
from services.worker.models.tokenizer_export import TokenizerExport


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """One model ready to be built. `digest` is SHA-256 of its files; `quantised`: at most 8 bits a weight."""

    name: str
    owner: str
    digest: bytes
    config: ModelConfig
    tensors: TensorSource
    tokenizer: TokenizerExport
    quantised: bool
