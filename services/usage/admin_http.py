"""The account service by HTTP, on a port of its own: each route is one call of the gRPC service, in proto3's JSON.

Deny by default: nothing of a request is read before its key is known for an administrator's, whatever the route.
Builds nothing but the app; wiring.py serves it.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog
from google.protobuf import json_format
from google.protobuf.message import Message
from millrace.usage.v1 import route_service_pb2 as routes_pb
from millrace.usage.v1 import usage_service_pb2 as pb
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.common.errors import Internal, InvalidRequest, MillraceError, NotFound, PayloadTooLarge
from services.usage.account_service import AccountService, HttpContext
from services.usage.admin_keys import AdminKeys
from services.usage.route_service import RouteService

MAX_BODY_BYTES = 65_536
BODY_TIMEOUT_S = 10.0
PREFIX = "/admin/v1"
# A method of AccountService or RouteService.
Call = Callable[[Any, Any], Awaitable[Message]]


def create_admin_app(
    service: AccountService, routing: RouteService, admins: AdminKeys, others: Sequence[Route] = ()
) -> Starlette:
    """The ASGI application; `others` are routes that ask for a key themselves."""
    rollout = f"{PREFIX}/rollouts/{{alias}}"
    tenant, key, admin = f"{PREFIX}/tenants/{{tenant}}", f"{PREFIX}/keys/{{key_id}}", f"{PREFIX}/admin-keys"
    table: list[tuple[str, str, type[Message], Call]] = [
        ("POST", f"{PREFIX}/tenants", pb.CreateTenantRequest, service.CreateTenant),
        ("GET", f"{PREFIX}/tenants", pb.ListTenantsRequest, service.ListTenants),
        ("PATCH", tenant, pb.UpdateTenantRequest, service.UpdateTenant),
        ("POST", f"{tenant}/projects", pb.CreateProjectRequest, service.CreateProject),
        ("GET", f"{PREFIX}/projects", pb.ListProjectsRequest, service.ListProjects),
        ("POST", f"{PREFIX}/keys", pb.CreateKeyRequest, service.CreateKey),
        ("GET", f"{PREFIX}/keys", pb.ListKeysRequest, service.ListKeys),
        ("PATCH", key, pb.UpdateKeyRequest, service.UpdateKey),
        ("POST", f"{key}/rotate", pb.RotateKeyRequest, service.RotateKey),
        ("POST", f"{key}/revoke", pb.RevokeKeyRequest, service.RevokeKey),
        ("POST", admin, pb.CreateAdminKeyRequest, service.CreateAdminKey),
        ("GET", admin, pb.ListAdminKeysRequest, service.ListAdminKeys),
        ("POST", f"{admin}/{{key_id}}/revoke", pb.RevokeAdminKeyRequest, service.RevokeAdminKey),
        ("GET", f"{PREFIX}/audit", pb.ListAuditRequest, service.ListAudit),
        ("GET", f"{PREFIX}/routes", routes_pb.GetRoutesRequest, routing.GetRoutes),
        ("PUT", f"{PREFIX}/routes", routes_pb.PutRoutesRequest, routing.PutRoutes),
        ("GET", f"{PREFIX}/routes/history", routes_pb.ListRouteHistoryRequest, routing.ListRouteHistory),
        ("POST", f"{PREFIX}/routes/restore", routes_pb.RestoreRoutesRequest, routing.RestoreRoutes),
        ("POST", f"{rollout}/start", routes_pb.StartRolloutRequest, routing.StartRollout),
        ("POST", f"{rollout}/promote", routes_pb.PromoteRolloutRequest, routing.PromoteRollout),
        ("POST", f"{rollout}/pause", routes_pb.PauseRolloutRequest, routing.PauseRollout),
        ("POST", f"{rollout}/resume", routes_pb.ResumeRolloutRequest, routing.ResumeRollout),
        ("POST", f"{rollout}/rollback", routes_pb.RollBackRolloutRequest, routing.RollBackRollout),
    ]

    async def missing(request: Request, _error: Exception) -> Response:
        try:
            await admins.administrator(request.headers.get("authorization", ""))
        except MillraceError as error:
            return _refusal(error)
        return _refusal(NotFound(f"There is nothing at {request.method} {request.url.path[:256]}."))

    async def failed(request: Request, error: Exception) -> Response:
        if not isinstance(error, MillraceError):
            structlog.get_logger().error("admin_request_failed", path=request.url.path[:64], exc_info=error)
            error = Internal("Internal error.")
        return _refusal(error)

    routes = [Route(path, _endpoint(kind, call, admins), methods=[method]) for method, path, kind, call in table]
    return Starlette(
        routes=[*routes, *others],
        exception_handlers={404: missing, 405: missing, MillraceError: failed, Exception: failed},
    )


def _endpoint(kind: type[Message], call: Call, admins: AdminKeys) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        await admins.administrator(request.headers.get("authorization", ""))
        fields = dict(request.query_params) if request.method == "GET" else await _body(request)
        try:
            message = json_format.ParseDict({**fields, **request.path_params}, kind())
        except json_format.ParseError as error:
            raise InvalidRequest(str(error).splitlines()[0]) from None
        answer = await call(message, HttpContext(request.headers))
        return Response(
            json_format.MessageToJson(answer, preserving_proto_field_name=True), media_type="application/json"
        )

    return endpoint


async def _body(request: Request) -> dict[str, Any]:
    """The fields of a JSON object; nothing is an empty one. Raises PayloadTooLarge, InvalidRequest."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise PayloadTooLarge(f"The body is larger than {MAX_BODY_BYTES} bytes.")
        fields = json.loads(body) if body else {}
    except TimeoutError:
        raise InvalidRequest(f"The body did not arrive within {BODY_TIMEOUT_S:g} s.") from None
    except (ValueError, RecursionError):
        raise InvalidRequest("The body is not JSON.") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("The body is not a JSON object.")
    return fields


def _refusal(error: MillraceError) -> Response:
    row, headers = error.row, {"x-millrace-reason": error.row.reason}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    fields = {"message": error.message, "type": row.openai_type, "param": error.param, "code": row.reason}
    return Response(json.dumps({"error": fields}), row.http_status, headers, media_type="application/json")
