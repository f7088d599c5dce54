"""A bounded reader of the JSON files beside a folder's weights. Judges size and shape, no meaning."""

from __future__ import annotations

import json
from pathlib import Path

from services.worker.models.errors import ModelLoadError

MAX_JSON_BYTES = 64 << 20


def read_object(path: Path, *, optional: bool = False) -> dict[str, object]:
    """The object in `path`; {} when it is absent and `optional`. Raises ModelLoadError with one sentence."""
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(read_bounded(path))
    except (ValueError, RecursionError):
        raise ModelLoadError(f"{path.name} is not valid JSON") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} does not hold a JSON object")
    return value


def read_bounded(path: Path) -> bytes:
    """All bytes of `path`, at most MAX_JSON_BYTES."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path.name} is larger than {MAX_JSON_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelLoadError(f"the folder {path.parent.name} has no {path.name}") from None
    except OSError as error:
        raise ModelLoadError(f"cannot read {path.name}: {error.strerror}") from None


def section(data: dict[str, object], key: str) -> dict[str, object]:
    """The object under `key`, {} when absent or null; raises ModelLoadError for another type."""
    value = data.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelLoadError(f"{key} is not an object")
    return value
