"""What a CUDA device adds to the making of a runner: its kernels, its memory, its graphs.

Imports Triton only when asked for a device, so that a worker on a CPU needs none. Called by the factory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.worker.models.decoder import DecoderTensors
from services.worker.models.errors import ModelLoadError
from services.worker.runtime.choosing import Chooser
from services.worker.runtime.forward import Forward
from services.worker.runtime.kv_store import KVStore
from services.worker.runtime.memory_budget import available_memory

if TYPE_CHECKING:
    from services.worker.runtime.products import ProductMaker

# Precisions by the dtype of what is computed between the products of a layer.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.bfloat16}
# Ada, Hopper and later.
FP8_CAPABILITY = (8, 9)


def device_forward(
    tensors: DecoderTensors, device: torch.device, dtype: str, *, max_model_len: int
) -> tuple[Forward, Chooser, str]:
    """Weights on `device`, the chooser, and the dtype that "auto" became. Raises ModelLoadError."""
    name = "bfloat16" if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise ModelLoadError(f"dtype {dtype} is for a CPU; a CUDA device takes {', '.join(_DTYPES)}")
    try:
        from services.worker.runtime.products import PlainProduct, fp8_product
        from services.worker.runtime.triton_forward import TritonChooser, TritonForward
    except ImportError as error:
        raise ModelLoadError("a CUDA device needs the package triton (the extra gpu)") from error

    product: ProductMaker = PlainProduct
    if name == "fp8":
        if device.type == "cuda":
            check_capability(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        product = fp8_product
        _try_fp8(product, device)
    forward = TritonForward(tensors, max_model_len=max_model_len, device=device, dtype=_DTYPES[name], product=product)
    return forward, TritonChooser(), name


def check_capability(name: str, capability: tuple[int, int]) -> None:
    """Raise ModelLoadError when a device called `name`, of that compute capability, has no fp8 products."""
    if capability < FP8_CAPABILITY:
        needed, found = (".".join(map(str, each)) for each in (FP8_CAPABILITY, capability))
        raise ModelLoadError(
            f"dtype fp8 needs a device of compute capability {needed} or newer; {name} has {found}: choose bfloat16"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken where the keys and values will lie."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def warm_up(forward: Forward, store: KVStore, *, max_requests: int) -> None:
    """Compile and record the decoding steps of up to `max_requests`; nothing where there are no graphs."""
    from services.worker.runtime.triton_forward import TritonForward

    if store.data.device.type == "cuda" and isinstance(forward, TritonForward):
        forward.capture(store, max_requests=max_requests)


def _try_fp8(product: ProductMaker, device: torch.device) -> None:
    """One product: not every build of torch has them for every device that could."""
    one = torch.ones((16, 16), dtype=torch.bfloat16, device=device)
    try:
        product(one, None)(one[:1])
    except RuntimeError as error:
        raise ModelLoadError(
            f"dtype fp8 is not what torch {torch.__version__} multiplies on this device ({error}): choose bfloat16"
        ) from error
