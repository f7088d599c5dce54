"""The one exception of this room: a model that cannot be loaded, in a sentence for the operator."""

from __future__ import annotations


class ModelLoadError(Exception):
    """A model file is missing, corrupt, unsupported or too large; `str()` is one plain sentence."""
