"""`/v1/batches`: create, get, list, cancel. Writes wishes into the store; the runner carries them out.

A batch keeps the digest of the key that made it: its lines run with what that key may do when they run.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import InvalidRequest, NotFound
from services.common.lifecycle import new_ulid
from services.gateway.auth import digest_of
from services.gateway.batch_store import OwnedBatch
from services.gateway.batch_types import WINDOW_S, Batch, BatchBody, BatchList
from services.gateway.come_back import refuse_key
from services.gateway.files_endpoint import find_file, page_of
from services.gateway.front_parts import FrontParts
from services.gateway.handlers import read_body
from services.gateway.json_body import decode_body
from services.gateway.json_endpoint import json_response
from services.gateway.limits import Limits
from services.gateway.validation import check_metadata


class BatchesEndpoint:
    """Starlette endpoints."""

    def __init__(self, parts: FrontParts, limits: Limits) -> None:
        self._batches = parts.batches
        self._files = parts.files
        self._clock = parts.clock
        self._limits = limits

    async def create(self, request: Request) -> Response:
        """Raises InvalidRequest and Unsupported by the field, NotFound for a file that is not the tenant's."""
        refuse_key(request.headers.raw)
        body = decode_body(await read_body(request, self._limits), BatchBody, self._limits)
        check_metadata(body.metadata or {}, self._limits)
        tenant = request.state.key.tenant
        try:
            facts = await find_file(self._files, tenant, body.input_file_id)
        except NotFound as error:
            raise NotFound(error.message, param="input_file_id") from None
        if facts.purpose != "batch":
            raise InvalidRequest("The file was not uploaded for a batch.", param="input_file_id")
        now = int(self._clock.wall())
        batch = Batch(
            id=f"batch_{new_ulid()}",
            endpoint=body.endpoint,
            input_file_id=facts.id,
            status="validating",
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=body.metadata,
        )
        digest = digest_of(request.headers.get("authorization"))
        await self._batches.add(OwnedBatch(tenant, digest, batch))
        return json_response(batch)

    async def get(self, request: Request) -> Response:
        """Raises NotFound for another tenant's too."""
        return json_response(await self._find(request))

    async def list(self, request: Request) -> Response:
        """One page. Raises InvalidRequest for a bad `limit`."""
        after, limit = page_of(request)
        found = await self._batches.newest(request.state.key.tenant, after=after, limit=limit + 1)
        page = found[:limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(BatchList(page, len(found) > limit, first, last))

    async def cancel(self, request: Request) -> Response:
        """Cut what runs; what has a result keeps it. Raises NotFound, and InvalidRequest when it is too late."""
        while (batch := await self._find(request)).status in ("validating", "in_progress"):
            now = int(self._clock.wall())
            new = msgspec.structs.replace(batch, status="cancelling", cancelling_at=now)
            if await self._batches.change(request.state.key.tenant, batch, new):
                return json_response(new)
        if batch.status not in ("cancelling", "cancelled"):
            raise InvalidRequest(f"The batch cannot be cancelled any more: it is {batch.status}.")
        return json_response(batch)

    async def _find(self, request: Request) -> Batch:
        batch = await self._batches.get(request.state.key.tenant, request.path_params["id"])
        if batch is None:
            raise NotFound("There is no such batch.")
        return batch
