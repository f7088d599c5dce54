"""`/v1/files`: a tenant's JSONL for batches, uploaded as a form, listed, read and deleted. Called by the HTTP door.

An upload is bounded before and while it is read, and lies on disk from its first MiB on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from services.common.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    MillraceError,
    NotFound,
    PayloadTooLarge,
    Unsupported,
)
from services.common.lifecycle import new_ulid
from services.gateway.batch_store import FileStore
from services.gateway.batch_types import FileDeleted, FileList, FileObject
from services.gateway.come_back import refuse_key
from services.gateway.json_endpoint import json_response
from services.gateway.limits import Limits

# What the form itself may take beside the file.
_FORM_BYTES = 64 * 1024
_FIELD_BYTES = 1_024
_FILE_ID = re.compile(r"file-[0-9A-Z]{26}(-output|-error)?")
_PURPOSES = ("batch", "batch_output")


class FilesEndpoint:
    """Starlette endpoints."""

    def __init__(self, files: FileStore, limits: Limits) -> None:
        self._files = files
        self._limits = limits

    async def create(self, request: Request) -> Response:
        """Upload. Raises PayloadTooLarge, InvalidRequest, Unsupported, by the field or the limit."""
        refuse_key(request.headers.raw)
        form = await self._form(request)
        try:
            upload = _upload_of(form)
            name = (upload.filename or "").encode()[: self._limits.file_name_bytes].decode(errors="ignore")
            facts = await self._files.add_input(request.state.key.tenant, f"file-{new_ulid()}", name, upload.file)
        finally:
            await form.close()
        return json_response(facts)

    async def list(self, request: Request) -> Response:
        """One page. Raises InvalidRequest for a bad `limit` or `purpose`."""
        purpose, (after, limit) = request.query_params.get("purpose", ""), page_of(request)
        if purpose and purpose not in _PURPOSES:
            raise InvalidRequest(f"`purpose` is one of {', '.join(_PURPOSES)}.", param="purpose")
        found = await self._files.newest(request.state.key.tenant, purpose=purpose, after=after, limit=limit + 1)
        page = found[:limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(FileList(page, len(found) > limit, first, last))

    async def get(self, request: Request) -> Response:
        """A file's facts. Raises NotFound for another tenant's too."""
        return json_response(await find_file(self._files, request.state.key.tenant, request.path_params["id"]))

    async def content(self, request: Request) -> Response:
        """The bytes. Raises NotFound."""
        facts = await find_file(self._files, request.state.key.tenant, request.path_params["id"])
        path = self._files.path(facts.id)
        if not await asyncio.to_thread(path.is_file):
            raise _missing()
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """Forget a file. Raises NotFound, and InvalidRequest while a batch reads it."""
        asked = request.path_params["id"]
        if not await self._files.delete(request.state.key.tenant, asked):
            raise _missing()
        return json_response(FileDeleted(asked))

    async def _form(self, request: Request) -> FormData:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise InvalidRequest("Send the file as `multipart/form-data`.", param="content-type")
        most = self._limits.batch_file_bytes
        refused: MillraceError | None = None

        async def bounded() -> AsyncGenerator[bytes, None]:
            nonlocal refused
            size = 0
            async for chunk in request.stream():
                size += len(chunk)
                if size > most + _FORM_BYTES:
                    refused = PayloadTooLarge(f"A file takes at most {most} bytes.", param="file")
                    raise MultiPartException(refused.message)
                yield chunk

        declared = request.headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared[:16]) > most + _FORM_BYTES:
            raise PayloadTooLarge(f"A file takes at most {most} bytes.", param="file")
        parser = MultiPartParser(request.headers, bounded(), max_files=1, max_fields=4, max_part_size=_FIELD_BYTES)
        try:
            async with asyncio.timeout(self._limits.upload_timeout_s):
                form = await parser.parse()
        except MultiPartException as error:
            raise refused or InvalidRequest(f"The form is not valid: {error.message}") from None
        except TimeoutError:
            raise DeadlineExceeded(f"The file did not arrive within {self._limits.upload_timeout_s:g} s.") from None
        except ClientDisconnect:
            raise Cancelled("The client went away.") from None
        sizes = [each.size or 0 for each in form.values() if isinstance(each, UploadFile)]
        if max(sizes, default=0) > most:
            await form.close()
            raise PayloadTooLarge(f"A file takes at most {most} bytes.", param="file")
        return form


def page_of(request: Request) -> tuple[str, int]:
    """`after` and `limit` of a list, 1 to 100. Raises InvalidRequest."""
    limit = request.query_params.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= 100):
        raise InvalidRequest("`limit` is a number from 1 to 100.", param="limit")
    return request.query_params.get("after", ""), int(limit)


async def find_file(files: FileStore, tenant: str, file_id: str) -> FileObject:
    """The tenant's file. Raises NotFound."""
    facts = await files.get(tenant, file_id) if _FILE_ID.fullmatch(file_id) else None
    if facts is None:
        raise _missing()
    return facts


def _upload_of(form: FormData) -> UploadFile:
    unknown = next((name for name in form if name not in ("file", "purpose")), None)
    if unknown is not None:
        raise InvalidRequest(f"`{unknown}` is not a known field.", param=unknown)
    if form.get("purpose") != "batch":
        raise Unsupported("`purpose` must be `batch`.", param="purpose")
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise InvalidRequest("`file` is required, with a file name.", param="file")
    return upload


def _missing() -> NotFound:
    return NotFound("There is no such file.")
