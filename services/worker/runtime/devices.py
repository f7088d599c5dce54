"""What a CUDA device adds to the making of a runner: its kernels, its memory, its graphs.

Imports Triton only when asked for a device, so that a worker on a CPU needs none. Called by the factory.
"""

from __future__ import annotations

import torch

from services.worker.models.decoder import DecoderTensors
from services.worker.models.errors import ModelLoadError
from services.worker.runtime.choosing import Chooser
from services.worker.runtime.forward import Forward
from services.worker.runtime.kv_store import KVStore
from services.worker.runtime.memory_budget import available_memory

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_forward(
    tensors: DecoderTensors, device: torch.device, dtype: str, *, max_model_len: int
) -> tuple[Forward, Chooser, str]:
    """Weights on `device`, the chooser, and the dtype that "auto" became. Raises ModelLoadError."""
    name = "bfloat16" if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise ModelLoadError(f"dtype {dtype} is for a CPU; a CUDA device takes {', '.join(_DTYPES)}")
    try:
        from services.worker.runtime.triton_forward import TritonChooser, TritonForward
    except ImportError as error:
        raise ModelLoadError("a CUDA device needs the package triton (the extra gpu)") from error

    forward = TritonForward(tensors, max_model_len=max_model_len, device=device, dtype=_DTYPES[name])
    return forward, TritonChooser(), name


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken where the keys and values will lie."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def warm_up(forward: Forward, store: KVStore, *, max_requests: int) -> None:
    """Compile and record the decoding steps of up to `max_requests`; nothing where there are no graphs."""
    from services.worker.runtime.triton_forward import TritonForward

    if store.data.device.type == "cuda" and isinstance(forward, TritonForward):
        forward.capture(store, max_requests=max_requests)
