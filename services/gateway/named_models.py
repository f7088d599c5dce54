"""What models a key may use, by every name that it may call them, and what each can do. One list for both doors."""

from __future__ import annotations

import contextlib
import functools

from services.common.admission_types import KeyRecord
from services.common.errors import ModelNotFound, NoWorker
from services.common.routes import Target
from services.gateway.generation import ModelDirectory, RouteAsk, ServedModel
from services.gateway.validation import may_use


def named_models(directory: ModelDirectory, key: KeyRecord) -> dict[str, ServedModel]:
    """Each served version as `model@version`; a plain name is what its route, or without one the default, gives."""
    named: dict[str, ServedModel] = {}
    for model in directory.models():
        ref = model.card.model
        if may_use(key, ref.model, Target(ref.model, ref.version)):
            named.setdefault(ref.model, model)
            named[f"{ref.model}@{ref.version}"] = model
    for alias in directory.aliases():
        named.pop(alias, None)
        allowed = functools.partial(may_use, key, alias)
        with contextlib.suppress(ModelNotFound, NoWorker):
            named[alias] = directory.resolve(alias, RouteAsk(key.tenant, allowed=allowed))
    return named


def owner_of(model: ServedModel) -> str:
    """Who is named as its owner."""
    return model.card.owner or "millrace"


def capabilities(model: ServedModel) -> list[str]:
    """What may be asked of it."""
    chat = [] if model.template is None else ["chat", "tools"]
    reasoning = [] if model.reasoning is None else ["reasoning"]
    structured = ["structured_output"] if model.card.structured_output else []
    return ["completions", "embeddings", *chat, *reasoning, *structured]
