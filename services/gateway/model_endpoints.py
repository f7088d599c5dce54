"""`GET /v1/models` and `/v1/models/{id}`: what the key may use and what it can do. Called by the HTTP door."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import ModelNotFound
from services.gateway.api_types import ModelDetails, ModelList, ModelObject
from services.gateway.generation import ModelDirectory, ServedModel
from services.gateway.json_endpoint import json_response
from services.gateway.named_models import capabilities, named_models, owner_of


class ModelEndpoints:
    """Answers from the directory; `started_at` is unix seconds."""

    def __init__(self, directory: ModelDirectory, started_at: int) -> None:
        self._directory = directory
        self._started_at = started_at

    async def list(self, request: Request) -> Response:
        """All that the key may use, by every name."""
        data = [self._model(name, model) for name, model in named_models(self._directory, request.state.key).items()]
        return json_response(ModelList(data=data))

    async def get(self, request: Request) -> Response:
        """One model. Raises ModelNotFound; NoWorker when nothing serves it at the moment, or when that cannot be
        told."""
        name = request.path_params["model"]
        model = named_models(self._directory, request.state.key).get(name)
        if model is None:
            self._directory.resolve(name)
            raise ModelNotFound(f"There is no model `{name[:256]}`.", param="model")
        return json_response(self._model(name, model))

    def _model(self, name: str, model: ServedModel) -> ModelObject:
        card = model.card
        return ModelObject(
            id=name,
            created=self._started_at,
            owned_by=owner_of(model),
            max_model_len=card.max_model_len,
            millrace=ModelDetails(
                version=card.model.version,
                manifest_digest=card.model.manifest_digest.hex(),
                deterministic=card.deterministic,
                capabilities=capabilities(model),
            ),
        )
