"""Typed access to GGUF metadata and to the fields of a folder's JSON: the only place that judges a value's type.

Called by the loaders and the tokenizer exports.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.worker.models.errors import ModelLoadError

Metadata = Mapping[str, object]


def required_int(metadata: Metadata, key: str) -> int:
    """The integer under `key`; raises ModelLoadError when absent or of another type."""
    value = optional_int(metadata, key)
    if value is None:
        raise ModelLoadError(f"the file lacks {key}")
    return value


def optional_int(metadata: Metadata, key: str) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelLoadError(f"{key} is not an integer")
    return value


def optional_float(metadata: Metadata, key: str) -> float | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(f"{key} is not a number")
    return float(value)


def optional_bool(metadata: Metadata, key: str) -> bool | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"{key} is not true or false")
    return value


def optional_text(metadata: Metadata, key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelLoadError(f"{key} is not a text")
    return value


def text_list(metadata: Metadata, key: str) -> list[str]:
    """The list of strings under `key`, empty when absent."""
    value = metadata.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelLoadError(f"{key} is not a list of texts")
    return [str(item) for item in value]


def number_list(metadata: Metadata, key: str) -> list[float]:
    """The list of numbers under `key`, empty when absent."""
    value = metadata.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
        raise ModelLoadError(f"{key} is not a list of numbers")
    return [float(item) for item in value]
