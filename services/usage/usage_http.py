"""Usage by HTTP: sums and rows, for an administrator or for a key of scope `usage:read`, which sees its own tenant.

Each route is one call of the gRPC service. Served beside the administrators' API; builds nothing but routes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf import json_format
from millrace.usage.v1 import usage_service_pb2 as pb
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from services.common.errors import InvalidRequest
from services.usage.account_service import HttpContext
from services.usage.records import FORMATS, record_of
from services.usage.selection import TAG
from services.usage.service import UsageService


def usage_routes(service: UsageService) -> list[Route]:
    """`GET /v1/usage` and `GET /v1/usage/export`."""

    async def sums(request: Request) -> Response:
        message = _parse(request, pb.QueryUsageRequest(), ("group_by",))
        answer = await service.QueryUsage(message, HttpContext(request.headers))
        text = json_format.MessageToJson(answer, preserving_proto_field_name=True)
        return Response(text, media_type="application/json")

    async def rows(request: Request) -> Response:
        message = _parse(request, pb.ExportUsageRequest(), ())
        name = request.query_params.get("format", "jsonl")
        if name not in FORMATS:
            raise InvalidRequest(f"format is one of {', '.join(FORMATS)}.", param="format")
        pages = service.ExportUsage(message, HttpContext(request.headers))
        # The first page before the status: what is refused is refused with its own.
        first = await anext(pages)
        headers = {"x-millrace-next-cursor": first.next_cursor}
        return StreamingResponse(_lines(first, pages, name), headers=headers, media_type=FORMATS[name].media_type)

    return [Route("/v1/usage", sums, methods=["GET"]), Route("/v1/usage/export", rows, methods=["GET"])]


async def _lines(
    page: pb.ExportUsageResponse, rest: AsyncIterator[pb.ExportUsageResponse], name: str
) -> AsyncIterator[str]:
    kind = FORMATS[name]
    yield kind.head
    while page.rows:
        yield "".join([kind.line(record_of(row)) for row in page.rows])
        page = await anext(rest)


def _parse(request: Request, message: Any, lists: tuple[str, ...]) -> Any:
    """The query as a message; `metadata.<tag>` narrows to a tag. Raises InvalidRequest."""
    fields: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name.startswith(TAG):
            fields.setdefault("metadata", {})[name.removeprefix(TAG)] = value
        elif name in lists:
            fields.setdefault(name, []).append(value)
        elif name != "format":
            fields[name] = value
    try:
        return json_format.ParseDict(fields, message)
    except json_format.ParseError as error:
        raise InvalidRequest(str(error).splitlines()[0]) from None
