"""The gRPC face of the usage service: exports, tenants and keys. Translates; decides nothing but who may call."""

from __future__ import annotations

import dataclasses
import functools
import hmac
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import grpc
import sqlalchemy as sa
from google.protobuf import timestamp_pb2
from millrace.usage.v1 import usage_event_pb2, usage_service_pb2, usage_service_pb2_grpc

from services.common.admission_types import QuotaLimits
from services.common.errors import InvalidRequest, NotFound, Unauthenticated
from services.usage.accounts import Accounts, KeySpec, TenantSpec
from services.usage.ledger import RowFilter, StoredRow, find_row, last_row_id, read_rows
from services.usage.store import Store

PAGE_ROWS = 500
Context = grpc.aio.ServicerContext[Any, Any]


class AdminGate:
    """Checks the administrators' bearer token; without one configured, whoever reaches the address may call."""

    def __init__(self, token: str) -> None:
        self._token = token

    def check(self, context: Context) -> None:
        """Raises Unauthenticated."""
        if not self._token:
            return
        sent = dict(context.invocation_metadata() or ()).get("authorization", "")
        text = sent if isinstance(sent, str) else ""
        if not hmac.compare_digest(text.encode(), f"Bearer {self._token}".encode()):
            raise Unauthenticated("This call needs the administrators' token.")


class UsageService(usage_service_pb2_grpc.UsageServiceServicer):
    """Reads of the ledger. Reading makes no usage."""

    def __init__(self, store: Store, gate: AdminGate) -> None:
        self._store = store
        self._gate = gate

    async def ExportUsage(
        self, request: usage_service_pb2.ExportUsageRequest, context: Context
    ) -> AsyncIterator[usage_service_pb2.ExportUsageResponse]:
        """Rows after the cursor up to the newest at the start, a page a message and a short transaction each."""
        self._gate.check(context)
        wanted = RowFilter(
            tenant=request.tenant,
            after_row_id=request.after_row_id,
            last_row_id=await self._store.read(last_row_id),
            start=_time(request, "start_time"),
            end=_time(request, "end_time"),
        )
        while rows := await self._store.read(functools.partial(read_rows, wanted=wanted, limit=PAGE_ROWS)):
            yield usage_service_pb2.ExportUsageResponse(rows=[_ledger_row(row) for row in rows])
            wanted = dataclasses.replace(wanted, after_row_id=rows[-1].row_id)

    async def GetUsage(
        self, request: usage_service_pb2.GetUsageRequest, context: Context
    ) -> usage_service_pb2.GetUsageResponse:
        """One row by request id. Raises NotFound."""
        self._gate.check(context)
        row = await self._store.read(lambda connection: find_row(connection, request.request_id, request.tenant))
        if row is None:
            raise NotFound("There is no ledger row for this request yet.", param="request_id")
        return usage_service_pb2.GetUsageResponse(row=_ledger_row(row))


class AccountService(usage_service_pb2_grpc.AccountServiceServicer):
    """Tenants and keys."""

    def __init__(self, accounts: Accounts, gate: AdminGate) -> None:
        self._accounts = accounts
        self._gate = gate

    async def CreateTenant(
        self, request: usage_service_pb2.CreateTenantRequest, context: Context
    ) -> usage_service_pb2.CreateTenantResponse:
        """Raises InvalidRequest."""
        self._gate.check(context)
        sent = request.limits
        limits = QuotaLimits(
            requests_per_minute=_optional(sent, "requests_per_minute"),
            tokens_per_minute=_optional(sent, "tokens_per_minute"),
            concurrent_requests=_optional(sent, "concurrent_request_count"),
            budget_tokens=_optional(sent, "budget_token_count"),
        )
        spec = TenantSpec(
            request.tenant,
            request.display_name,
            limits,
            _optional(sent, "queued_request_count"),
            request.weight if request.HasField("weight") else 1.0,
        )
        return usage_service_pb2.CreateTenantResponse(tenant=_tenant(await self._accounts.create_tenant(spec)))

    async def ListTenants(
        self, request: usage_service_pb2.ListTenantsRequest, context: Context
    ) -> usage_service_pb2.ListTenantsResponse:
        """Every tenant."""
        self._gate.check(context)
        rows = await self._accounts.list_tenants()
        return usage_service_pb2.ListTenantsResponse(tenants=[_tenant(row) for row in rows])

    async def CreateKey(
        self, request: usage_service_pb2.CreateKeyRequest, context: Context
    ) -> usage_service_pb2.CreateKeyResponse:
        """The only answer that ever holds the secret. Raises InvalidRequest, NotFound."""
        self._gate.check(context)
        expires = _time(request, "expire_time")
        spec = KeySpec(request.tenant, request.display_name, tuple(request.models), expires, request.project)
        row, secret = await self._accounts.create_key(spec)
        return usage_service_pb2.CreateKeyResponse(key=_key(row), secret=secret)

    async def ListKeys(
        self, request: usage_service_pb2.ListKeysRequest, context: Context
    ) -> usage_service_pb2.ListKeysResponse:
        """Keys without their secrets."""
        self._gate.check(context)
        rows = await self._accounts.list_keys(request.tenant)
        return usage_service_pb2.ListKeysResponse(keys=[_key(row) for row in rows])

    async def RevokeKey(
        self, request: usage_service_pb2.RevokeKeyRequest, context: Context
    ) -> usage_service_pb2.RevokeKeyResponse:
        """Raises NotFound."""
        self._gate.check(context)
        return usage_service_pb2.RevokeKeyResponse(key=_key(await self._accounts.revoke_key(request.key_id)))


def _optional(message: Any, name: str) -> int | None:
    return getattr(message, name) if message.HasField(name) else None


def _time(message: Any, name: str) -> datetime | None:
    if not message.HasField(name):
        return None
    try:
        moment: datetime = getattr(message, name).ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{name} is not between the years 1 and 9999.", param=name) from None
    return moment


def _stamp(time: datetime | None) -> timestamp_pb2.Timestamp | None:
    if time is None:
        return None
    stamp = timestamp_pb2.Timestamp()
    stamp.FromDatetime(time)
    return stamp


def _ledger_row(row: StoredRow) -> usage_service_pb2.LedgerRow:
    return usage_service_pb2.LedgerRow(
        row_id=row.row_id,
        event=usage_event_pb2.UsageEvent.FromString(row.event),
        insert_time=_stamp(row.insert_time),
    )


def _tenant(row: sa.Row[Any]) -> usage_service_pb2.Tenant:
    limits = usage_service_pb2.Limits(
        requests_per_minute=row.requests_per_minute,
        tokens_per_minute=row.tokens_per_minute,
        concurrent_request_count=row.concurrent_requests,
        budget_token_count=row.budget_tokens,
        queued_request_count=row.queued_requests,
    )
    return usage_service_pb2.Tenant(
        tenant=row.tenant,
        display_name=row.display_name,
        limits=limits,
        weight=row.weight,
        create_time=_stamp(row.create_time),
    )


def _key(row: sa.Row[Any]) -> usage_service_pb2.ApiKey:
    return usage_service_pb2.ApiKey(
        key_id=row.key_id,
        tenant=row.tenant,
        display_name=row.display_name,
        models=row.models,
        create_time=_stamp(row.create_time),
        expire_time=_stamp(row.expire_time),
        revoke_time=_stamp(row.revoke_time),
        project=row.project,
    )
