"""What this worker is, in the terms of a release manifest, and whether that is what the manifest says.

Never imports torch: the kernels are known by their sources. Called by model_source once the model is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
from pathlib import Path

from millrace.worker.v1 import worker_service_pb2

from services.common.lifecycle import StartupError
from services.common.release import MAX_RELEASE_BYTES, Pins, ReleaseError, parse_keys, parse_release
from services.worker.engine.request import SamplingParams

KERNELS = Path(__file__).with_name("kernels")
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """What a loader knows and the card does not say."""

    weights_digest: bytes
    dtype: str
    kv_cache_dtype: str
    runtime: str
    kernels: str
    hardware: str


def runtime_version(*packages: str) -> str:
    """This package with its version, and the named ones with theirs."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("millrace", *packages))


def kernel_version(abi: int) -> str:
    """ABI and sources of the kernels, compiled ones and Triton's."""
    digest = hashlib.sha256()
    files = (path for path in KERNELS.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for path in sorted(files):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(KERNELS).as_posix()}\0{len(data)}\0".encode() + data)
    return f"abi {abi}, sources {digest.hexdigest()}"


def cpu_class(instruction_set: str) -> str:
    """A CPU by what the kernels use of it."""
    return f"cpu {platform.machine()} {instruction_set}"


def pins_of(card: worker_service_pb2.ModelCard, build: Build) -> Pins:
    """The pins of a loaded model."""
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    return Pins(
        model=card.model.model,
        version=card.model.version,
        weights=build.weights_digest.hex(),
        tokenizer=card.tokenizer_digest.hex(),
        chat_template=hashlib.sha256(card.chat_template.encode()).hexdigest(),
        runtime=build.runtime,
        kernels=build.kernels,
        dtype=build.dtype,
        kv_cache_dtype=build.kv_cache_dtype,
        hardware=build.hardware,
        max_model_len=card.max_model_len,
        max_num_seqs=card.max_num_seqs,
        sampling_defaults={name: float(defaults[name]) for name in SAMPLING},  # type: ignore[arg-type]
    )


def held_to(path: Path, key: str, pins: Pins) -> bytes:
    """Digest of the manifest in `path`, signed with `key`. Raises StartupError naming all that differs here."""
    try:
        with path.open("rb") as opened:
            release = parse_release(opened.read(MAX_RELEASE_BYTES + 1))
        release.check(parse_keys(key))
    except OSError as error:
        raise StartupError(f"The release {path} cannot be read: {error.strerror}.") from error
    except ReleaseError as error:
        raise StartupError(f"The release {path} is refused: {error}.") from None
    if different := release.manifest.pins.differences(pins):
        raise StartupError(f"This worker is not what the release {path} says: {'; '.join(different)}.")
    return release.manifest.digest
