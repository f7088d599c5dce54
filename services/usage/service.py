"""The gRPC face of reading the ledger: exports, single rows, sums and checks of days. Reading makes no usage."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime

from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc

from services.common.errors import InvalidRequest, NotFound
from services.usage.accelerator import query_worker_time
from services.usage.accelerator_wire import accelerator_use, worker_time_answer
from services.usage.account_service import CallContext, authorization_of
from services.usage.account_wire import time_field
from services.usage.admin_keys import AdminKeys, Caller
from services.usage.days import Days
from services.usage.dead_letters import replay_dead_letters
from services.usage.events import request_id_of
from services.usage.exports import decode_cursor, encode_cursor, export_pages, ledger_row, subject_of
from services.usage.ledger import find_row, last_row_id, read_dead_letters
from services.usage.queries import Group, query_usage
from services.usage.reconcile import Totals, reconcile
from services.usage.reconcile_wire import drift_message, totals_message
from services.usage.seals import RowDigests, Seal, Signer
from services.usage.selection import Selection
from services.usage.store import Store


class UsageService(usage_service_pb2_grpc.UsageServiceServicer):
    """Reading makes no usage. Administrators see every tenant, a key of scope `usage:read` its own."""

    def __init__(self, store: Store, admins: AdminKeys, signer: Signer, days: Days) -> None:
        self._store = store
        self._admins = admins
        self._signer = signer
        self._days = days

    async def ExportUsage(
        self, request: pb.ExportUsageRequest, context: CallContext
    ) -> AsyncIterator[pb.ExportUsageResponse]:
        """Rows after the cursor up to the newest at the start, a page a message; the last message is the seal."""
        caller = await self._admins.reader(authorization_of(context))
        chosen = _selection(request, caller)
        after = decode_cursor(request.cursor, chosen) if request.cursor else request.after_row_id
        last = max(after, await self._store.read(last_row_id))
        rows, next_cursor = RowDigests(), encode_cursor(last, chosen)
        async for page in export_pages(self._store, chosen, after, last):
            for row, digest in zip(page.rows, page.digests, strict=True):
                rows.add(row.row_id, digest)
            page.cursor = encode_cursor(page.rows[-1].row_id, chosen)
            page.last_row_id, page.next_cursor = last, next_cursor
            yield page
        seal = self._signer.sign(Seal(subject_of(chosen), after, last, rows.row_count, rows.digest))
        yield pb.ExportUsageResponse(cursor=next_cursor, last_row_id=last, seal=_seal(seal), next_cursor=next_cursor)

    async def GetUsage(self, request: pb.GetUsageRequest, context: CallContext) -> pb.GetUsageResponse:
        """One row by request id. Raises NotFound."""
        caller = await self._admins.reader(authorization_of(context))
        tenant = caller.tenant or request.tenant
        row = await self._store.read(lambda connection: find_row(connection, request.request_id, tenant))
        if row is None:
            raise NotFound("There is no ledger row for this request yet.", param="request_id")
        return pb.GetUsageResponse(row=ledger_row(row))

    async def QueryUsage(self, request: pb.QueryUsageRequest, context: CallContext) -> pb.QueryUsageResponse:
        """Raises InvalidRequest."""
        caller = await self._admins.reader(authorization_of(context))
        work = functools.partial(query_usage, chosen=_selection(request, caller), group_by=list(request.group_by))
        answer = pb.QueryUsageResponse(groups=[_group(group) for group in await self._store.read(work)])
        if caller.tenant:
            # What an accelerator costs is the platform's own business.
            for group in answer.groups:
                group.accelerator.ClearField("costs")
        return answer

    async def QueryWorkerTime(
        self, request: pb.QueryWorkerTimeRequest, context: CallContext
    ) -> pb.QueryWorkerTimeResponse:
        """How the time of all tenants' workers was spent."""
        await self._admins.administrator(authorization_of(context))
        start, end = time_field(request, "start_time"), time_field(request, "end_time")
        work = functools.partial(query_worker_time, model=request.model, version=request.version, start=start, end=end)
        return worker_time_answer(await self._store.read(work))

    async def Reconcile(
        self, request: pb.ReconcileRequest, context: CallContext
    ) -> AsyncIterator[pb.ReconcileResponse]:
        """Drifts a page a message, then the totals. Raises InvalidRequest."""
        await self._admins.administrator(authorization_of(context))
        start, end = time_field(request, "start_time"), time_field(request, "end_time")
        if start is None or end is None:
            raise InvalidRequest("Say from when to when: start_time and end_time.", param="start_time")
        totals = Totals()
        async for page in reconcile(self._store, Selection(tenant=request.tenant, start=start, end=end), totals):
            if page:
                yield pb.ReconcileResponse(drifts=[drift_message(drift) for drift in page])
        yield pb.ReconcileResponse(totals=totals_message(totals))

    async def VerifyDay(self, request: pb.VerifyDayRequest, context: CallContext) -> pb.VerifyDayResponse:
        """Reads every row of the day. Raises InvalidRequest, NotFound."""
        await self._admins.administrator(authorization_of(context))
        try:
            day = date.fromisoformat(request.day)
        except ValueError:
            raise InvalidRequest("A day is written as 2026-03-01.", param="day") from None
        seal, finding = await self._days.verify(day)
        answer = pb.VerifyDayResponse(seal=_seal(seal))
        if finding is not None:
            answer.finding = finding.text
            if finding.row_id is not None:
                answer.row_id = finding.row_id
        return answer

    async def ListDeadLetters(
        self, request: pb.ListDeadLettersRequest, context: CallContext
    ) -> pb.ListDeadLettersResponse:
        """What could not become a row, and why: a page, by stream and entry."""
        await self._admins.administrator(authorization_of(context))
        entry_id, _, stream = request.page_token.partition(" ")
        letters = await self._store.read(functools.partial(read_dead_letters, after=(stream, entry_id)))
        return pb.ListDeadLettersResponse(
            next_page_token=f"{letters[-1].entry_id} {letters[-1].stream}" if letters else "",
            letters=[
                pb.DeadLetter(
                    stream=letter.stream,
                    entry_id=letter.entry_id,
                    reason=letter.reason,
                    payload_byte_count=len(letter.payload),
                    request_id=request_id_of(letter.payload) or "",
                )
                for letter in letters
            ],
        )

    async def ReplayDeadLetters(
        self, request: pb.ReplayDeadLettersRequest, context: CallContext
    ) -> pb.ReplayDeadLettersResponse:
        """Those that can be read now become rows."""
        await self._admins.administrator(authorization_of(context))
        done = await replay_dead_letters(self._store, datetime.now(UTC))
        return pb.ReplayDeadLettersResponse(taken_count=done.taken_count, left_count=done.left_count)


def _selection(request: pb.ExportUsageRequest | pb.QueryUsageRequest, caller: Caller) -> Selection:
    return Selection(
        tenant=caller.tenant or request.tenant,
        project=request.project,
        key_id=request.key_id,
        model=request.model,
        version=request.version,
        tags=dict(request.metadata),
        start=time_field(request, "start_time"),
        end=time_field(request, "end_time"),
    )


def _group(group: Group) -> pb.UsageGroup:
    prompt, cached, completion, reasoning = group.billed.counts
    return pb.UsageGroup(
        keys=group.keys,
        request_count=group.request_count,
        billed=pb.TokenSums(
            prompt_token_count=prompt,
            cached_token_count=cached,
            completion_token_count=completion,
            reasoning_token_count=reasoning,
        ),
        completed_request_count=group.completed_count,
        targeted_request_count=group.targeted_count,
        targets_met_request_count=group.targets_met_count,
        accelerator=accelerator_use(group),
        costs=[
            pb.Cost(
                currency=currency,
                prompt_micros=amounts.prompt,
                cached_micros=amounts.cached,
                completion_micros=amounts.completion,
                reasoning_micros=amounts.reasoning,
            )
            for currency, amounts in sorted(group.costs.items())
        ],
    )


def _seal(seal: Seal) -> pb.Seal:
    return pb.Seal(
        subject=seal.subject,
        after_row_id=seal.after_row_id,
        last_row_id=seal.last_row_id,
        row_count=seal.row_count,
        digest=seal.digest,
        previous=seal.previous,
        public_key=seal.public_key,
        signature=seal.signature,
    )
