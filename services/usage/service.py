"""Reads of the ledger by gRPC. Translates; decides nothing but who may call and whose usage it sees."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncIterator
from typing import Any

import grpc
from millrace.usage.v1 import usage_event_pb2, usage_service_pb2, usage_service_pb2_grpc

from services.common.errors import NotFound
from services.usage.account_service import authorization_of
from services.usage.account_wire import stamp, time_field
from services.usage.admin_keys import AdminKeys
from services.usage.ledger import RowFilter, StoredRow, find_row, last_row_id, read_rows
from services.usage.store import Store

PAGE_ROWS = 500
Context = grpc.aio.ServicerContext[Any, Any]


class UsageService(usage_service_pb2_grpc.UsageServiceServicer):
    """Reading makes no usage. Administrators see every tenant, a key of scope `usage:read` its own."""

    def __init__(self, store: Store, admins: AdminKeys) -> None:
        self._store = store
        self._admins = admins

    async def ExportUsage(
        self, request: usage_service_pb2.ExportUsageRequest, context: Context
    ) -> AsyncIterator[usage_service_pb2.ExportUsageResponse]:
        """Rows after the cursor up to the newest at the start, a page a message and a short transaction each."""
        caller = await self._admins.reader(authorization_of(context))
        wanted = RowFilter(
            tenant=caller.tenant or request.tenant,
            after_row_id=request.after_row_id,
            last_row_id=await self._store.read(last_row_id),
            start=time_field(request, "start_time"),
            end=time_field(request, "end_time"),
        )
        while rows := await self._store.read(functools.partial(read_rows, wanted=wanted, limit=PAGE_ROWS)):
            yield usage_service_pb2.ExportUsageResponse(rows=[_ledger_row(row) for row in rows])
            wanted = dataclasses.replace(wanted, after_row_id=rows[-1].row_id)

    async def GetUsage(
        self, request: usage_service_pb2.GetUsageRequest, context: Context
    ) -> usage_service_pb2.GetUsageResponse:
        """One row by request id. Raises NotFound."""
        caller = await self._admins.reader(authorization_of(context))
        tenant = caller.tenant or request.tenant
        row = await self._store.read(lambda connection: find_row(connection, request.request_id, tenant))
        if row is None:
            raise NotFound("There is no ledger row for this request yet.", param="request_id")
        return usage_service_pb2.GetUsageResponse(row=_ledger_row(row))


def _ledger_row(row: StoredRow) -> usage_service_pb2.LedgerRow:
    return usage_service_pb2.LedgerRow(
        row_id=row.row_id,
        event=usage_event_pb2.UsageEvent.FromString(row.event),
        insert_time=stamp(row.insert_time),
    )
