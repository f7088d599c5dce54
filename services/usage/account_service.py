"""The account service: tenants, projects, keys, administrators, audit. Translates; decides nothing but who may call.

Served by gRPC as it is, and by HTTP through admin_http.py. Every call asks for the key of an administrator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import sqlalchemy as sa
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc
from starlette.datastructures import Headers

from services.common.errors import InvalidRequest
from services.usage.account_wire import (
    admin_key_message,
    audit_message,
    key_message,
    policy_of,
    project_message,
    tenant_message,
    time_field,
    weight_of,
)
from services.usage.accounts import Accounts, KeySpec, TenantSpec, check_text
from services.usage.admin_keys import AdminKeys
from services.usage.audit import read_acts
from services.usage.policies import check_policy, check_policy_of_key, policy_from_json, policy_to_json
from services.usage.store import Store

DEFAULT_OVERLAP = timedelta(days=1)
AUDIT_PAGE = 100
MAX_AUDIT_PAGE = 500


class CallContext(Protocol):
    """The part of a call's context that tells who calls."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class HttpContext:
    """The context of a call that came by HTTP."""

    def __init__(self, headers: Headers) -> None:
        self._sent = [("authorization", value) for value in headers.getlist("authorization")]

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What came as the authorization header."""
        return self._sent


def authorization_of(context: CallContext) -> str:
    """The `authorization` metadata, empty where absent."""
    found = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else ""


class AccountService(usage_service_pb2_grpc.AccountServiceServicer):
    """Raises Unauthenticated, PermissionDenied, InvalidRequest, NotFound."""

    def __init__(self, accounts: Accounts, admins: AdminKeys, store: Store) -> None:
        self._accounts = accounts
        self._admins = admins
        self._store = store

    async def CreateTenant(self, request: pb.CreateTenantRequest, context: CallContext) -> pb.CreateTenantResponse:
        """A new tenant."""
        actor = await self._actor(context)
        spec = TenantSpec(request.tenant, request.display_name, policy_of(request.limits, weight_of(request)))
        return pb.CreateTenantResponse(tenant=tenant_message(await self._accounts.create_tenant(spec, actor)))

    async def UpdateTenant(self, request: pb.UpdateTenantRequest, context: CallContext) -> pb.UpdateTenantResponse:
        """Change what is given."""
        actor = await self._actor(context)
        check_text("display_name", request.display_name)

        def change(row: sa.Row[Any]) -> dict[str, Any]:
            name = request.display_name if request.HasField("display_name") else row.display_name
            return {"display_name": name, "policy": _new_policy(row, request)}

        return pb.UpdateTenantResponse(
            tenant=tenant_message(await self._accounts.update_tenant(request.tenant, change, actor))
        )

    async def ListTenants(self, request: pb.ListTenantsRequest, context: CallContext) -> pb.ListTenantsResponse:
        """Every tenant."""
        await self._actor(context)
        return pb.ListTenantsResponse(tenants=[tenant_message(row) for row in await self._accounts.list_tenants()])

    async def CreateProject(self, request: pb.CreateProjectRequest, context: CallContext) -> pb.CreateProjectResponse:
        """A new project."""
        actor = await self._actor(context)
        row = await self._accounts.create_project(request.tenant, request.project, request.display_name, actor)
        return pb.CreateProjectResponse(project=project_message(row))

    async def ListProjects(self, request: pb.ListProjectsRequest, context: CallContext) -> pb.ListProjectsResponse:
        """Projects of a tenant or of all."""
        await self._actor(context)
        rows = await self._accounts.list_projects(request.tenant)
        return pb.ListProjectsResponse(projects=[project_message(row) for row in rows])

    async def CreateKey(self, request: pb.CreateKeyRequest, context: CallContext) -> pb.CreateKeyResponse:
        """The only answer that ever holds the secret."""
        actor = await self._actor(context)
        spec = KeySpec(
            request.tenant,
            request.display_name,
            tuple(request.models),
            time_field(request, "expire_time"),
            request.project,
            policy_of(request.limits, weight_of(request)),
            tuple(request.scopes) or ("inference",),
        )
        row, secret = await self._accounts.create_key(spec, actor=actor)
        return pb.CreateKeyResponse(key=key_message(row), secret=secret)

    async def UpdateKey(self, request: pb.UpdateKeyRequest, context: CallContext) -> pb.UpdateKeyResponse:
        """Change what is given."""
        actor = await self._actor(context)

        def change(row: sa.Row[Any]) -> dict[str, Any]:
            check_policy_of_key(policy_of(request.limits, None))
            return {"policy": _new_policy(row, request)}

        return pb.UpdateKeyResponse(key=key_message(await self._accounts.update_key(request.key_id, change, actor)))

    async def RotateKey(self, request: pb.RotateKeyRequest, context: CallContext) -> pb.RotateKeyResponse:
        """The only answer that ever holds the new secret."""
        actor = await self._actor(context)
        overlap = DEFAULT_OVERLAP
        if request.HasField("overlap"):
            overlap = timedelta(seconds=request.overlap.seconds)
        row, secret, old = await self._accounts.rotate_key(request.key_id, overlap, actor)
        return pb.RotateKeyResponse(key=key_message(row), secret=secret, old_key=key_message(old))

    async def ListKeys(self, request: pb.ListKeysRequest, context: CallContext) -> pb.ListKeysResponse:
        """Keys without their secrets."""
        await self._actor(context)
        rows = await self._accounts.list_keys(request.tenant)
        return pb.ListKeysResponse(keys=[key_message(row) for row in rows])

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: CallContext) -> pb.RevokeKeyResponse:
        """Refused by every gateway within five seconds."""
        actor = await self._actor(context)
        return pb.RevokeKeyResponse(key=key_message(await self._accounts.revoke_key(request.key_id, actor)))

    async def CreateAdminKey(
        self, request: pb.CreateAdminKeyRequest, context: CallContext
    ) -> pb.CreateAdminKeyResponse:
        """The only answer that ever holds the secret."""
        actor = await self._actor(context)
        row, secret = await self._admins.create(request.name, time_field(request, "expire_time"), actor)
        return pb.CreateAdminKeyResponse(key=admin_key_message(row), secret=secret)

    async def ListAdminKeys(self, request: pb.ListAdminKeysRequest, context: CallContext) -> pb.ListAdminKeysResponse:
        """Every administrator's key, without the secrets."""
        await self._actor(context)
        return pb.ListAdminKeysResponse(keys=[admin_key_message(row) for row in await self._admins.list()])

    async def RevokeAdminKey(
        self, request: pb.RevokeAdminKeyRequest, context: CallContext
    ) -> pb.RevokeAdminKeyResponse:
        """Refused from the next call on."""
        actor = await self._actor(context)
        return pb.RevokeAdminKeyResponse(key=admin_key_message(await self._admins.revoke(request.key_id, actor)))

    async def ListAudit(self, request: pb.ListAuditRequest, context: CallContext) -> pb.ListAuditResponse:
        """A page of records."""
        await self._actor(context)
        size = request.page_size if request.HasField("page_size") else AUDIT_PAGE
        if not 1 <= size <= MAX_AUDIT_PAGE:
            raise InvalidRequest(f"page_size must be between 1 and {MAX_AUDIT_PAGE}.", param="page_size")
        rows = await self._store.read(
            lambda connection: read_acts(connection, request.tenant, request.after_audit_id, size)
        )
        return pb.ListAuditResponse(records=[audit_message(row) for row in rows])

    async def _actor(self, context: CallContext) -> str:
        return (await self._admins.administrator(authorization_of(context))).name


def _new_policy(row: sa.Row[Any], request: Any) -> dict[str, Any]:
    """The row's policy with the limits and the weight that are given. Raises InvalidRequest."""
    old = policy_from_json(row.policy)
    weight = weight_of(request)
    policy = policy_of(request.limits, None) if request.HasField("limits") else old
    policy = dataclasses.replace(policy, weight=old.weight if weight is None else weight)
    check_policy(policy)
    return policy_to_json(policy)
