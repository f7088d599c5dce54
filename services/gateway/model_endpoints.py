"""`GET /v1/models` and `/v1/models/{id}`: what the key may use and what it can do. Called by the HTTP door."""

from __future__ import annotations

import contextlib
import functools

from starlette.requests import Request
from starlette.responses import Response

from services.common.admission_types import KeyRecord
from services.common.errors import ModelNotFound, NoWorker
from services.common.routes import Target
from services.gateway.api_types import ModelDetails, ModelList, ModelObject
from services.gateway.generation import ModelDirectory, RouteAsk, ServedModel
from services.gateway.json_endpoint import json_response
from services.gateway.validation import may_use


class ModelEndpoints:
    """Answers from the directory; `started_at` is unix seconds."""

    def __init__(self, directory: ModelDirectory, started_at: int) -> None:
        self._directory = directory
        self._started_at = started_at

    async def list(self, request: Request) -> Response:
        """Each served version once; a plain name is what its route, or without one the default, gives."""
        data = [self._model(name, model) for name, model in self._named(request.state.key).items()]
        return json_response(ModelList(data=data))

    async def get(self, request: Request) -> Response:
        """One model. Raises ModelNotFound."""
        name = request.path_params["model"]
        model = self._named(request.state.key).get(name)
        if model is None:
            raise ModelNotFound(f"There is no model `{name[:256]}`.", param="model")
        return json_response(self._model(name, model))

    def _named(self, key: KeyRecord) -> dict[str, ServedModel]:
        named: dict[str, ServedModel] = {}
        for model in self._directory.models():
            ref = model.card.model
            if may_use(key, ref.model, Target(ref.model, ref.version)):
                named.setdefault(ref.model, model)
                named[f"{ref.model}@{ref.version}"] = model
        for alias in self._directory.aliases():
            named.pop(alias, None)
            allowed = functools.partial(may_use, key, alias)
            with contextlib.suppress(ModelNotFound, NoWorker):
                named[alias] = self._directory.resolve(alias, RouteAsk(key.tenant, allowed=allowed))
        return named

    def _model(self, name: str, model: ServedModel) -> ModelObject:
        card = model.card
        return ModelObject(
            id=name,
            created=self._started_at,
            owned_by=card.owner or "millrace",
            max_model_len=card.max_model_len,
            millrace=ModelDetails(
                version=card.model.version,
                manifest_digest=card.model.manifest_digest.hex(),
                deterministic=card.deterministic,
                capabilities=_capabilities(model),
            ),
        )


def _capabilities(model: ServedModel) -> list[str]:
    chat = [] if model.template is None else ["chat", "tools"]
    return ["completions", "embeddings", *chat, *([] if model.reasoning is None else ["reasoning"])]
