"""The route service: the table, its history and its rollouts. Translates; who may call and what changes is decided
behind it. Served by gRPC as it is, and by HTTP through admin_http.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message
from millrace.usage.v1 import route_service_pb2 as pb
from millrace.usage.v1 import route_service_pb2_grpc

from services.common.admission_types import WorkerRecord
from services.common.clock import Clock
from services.common.errors import InvalidRequest, NotFound, RevisionConflict
from services.common.route_wire import MAX_REASON_CHARS, from_message, target_of, to_message
from services.common.routes import RouteTable
from services.usage import rollout
from services.usage.account_service import CallContext, authorization_of
from services.usage.admin_keys import AdminKeys
from services.usage.canary.criteria import check_criteria
from services.usage.release_gate import Ask, ReleaseGate, reason
from services.usage.route_log import Change, RouteLog

PAGE = 20
MAX_PAGE = 100
AnswerT = TypeVar("AnswerT", bound=Message)


class RouteService(route_service_pb2_grpc.RouteServiceServicer):
    """Administrators only."""

    def __init__(
        self,
        log: RouteLog,
        admins: AdminKeys,
        gate: ReleaseGate,
        clock: Clock,
        workers: Callable[[], Awaitable[Sequence[WorkerRecord]]],
    ) -> None:
        """`workers` lists those that live."""
        self._log = log
        self._workers = workers
        self._admins = admins
        self._gate = gate
        self._clock = clock

    async def GetRoutes(self, request: pb.GetRoutesRequest, context: CallContext) -> pb.GetRoutesResponse:
        """The table that stands, or while Redis is away the last one; an empty one of revision 0 where nobody wrote
        any."""
        await self._actor(context)
        return pb.GetRoutesResponse(table=to_message(await self._log.table()))

    async def PutRoutes(self, request: pb.PutRoutesRequest, context: CallContext) -> pb.PutRoutesResponse:
        """Raises InvalidRequest, RevisionConflict."""
        who, wanted = await self._actor(context), from_message(request.table)
        for route in wanted.routes.values():
            if route.rollout is not None:
                check_criteria(route.rollout.criteria)

        def put(stands: RouteTable) -> RouteTable:
            if stands.revision != wanted.revision:
                text = f"The table is made from revision {wanted.revision}; revision {stands.revision} stands."
                raise RevisionConflict(text, param="revision")
            return wanted

        return await self._changed(pb.PutRoutesResponse, put, who, request.why)

    async def ListRouteHistory(
        self, request: pb.ListRouteHistoryRequest, context: CallContext
    ) -> pb.ListRouteHistoryResponse:
        """Revisions with who made them and why."""
        await self._actor(context)
        size = request.page_size or PAGE
        if not 1 <= size <= MAX_PAGE:
            raise InvalidRequest(f"page_size must be between 1 and {MAX_PAGE}.", param="page_size")
        before = request.before_revision or (await self._log.routes.read() or RouteTable()).revision + 1
        answer = pb.ListRouteHistoryResponse()
        for revision in await self._log.routes.history(before=before, count=size):
            shown = answer.revisions.add(actor=revision.who, why=revision.why, table=to_message(revision.table))
            shown.time.FromMilliseconds(round(revision.time_s * 1000))
        return answer

    async def RestoreRoutes(self, request: pb.RestoreRoutesRequest, context: CallContext) -> pb.RestoreRoutesResponse:
        """Raises NotFound."""
        who = await self._actor(context)
        found = await self._log.routes.at(request.revision)
        if found is None:
            raise NotFound(f"There is no revision {request.revision}.", param="revision")
        table = found.table
        why = request.why or f"restored revision {request.revision}"
        return await self._changed(
            pb.RestoreRoutesResponse, lambda stands: dataclasses.replace(table, revision=stands.revision), who, why
        )

    async def StartRollout(self, request: pb.StartRolloutRequest, context: CallContext) -> pb.StartRolloutResponse:
        """Raises InvalidRequest for a rollout under way, a withdrawn baseline, steps that do not rise to 100,
        criteria that there are not, and what the gate refuses."""
        who = await self._actor(context)
        ask, workers = Ask(request.release, request.force), await self._workers()
        plan = rollout.Plan(
            target_of(request.candidate, request.alias),
            target_of(request.baseline, request.alias) if request.baseline else None,
            tuple(request.step_percents) or rollout.DEFAULT_STEPS,
            request.bake.ToTimedelta().total_seconds() if request.HasField("bake") else rollout.DEFAULT_BAKE_S,
            dict(request.criteria),
            request.mirrored_share,
        )

        def change(table: RouteTable) -> RouteTable:
            started = rollout.start(table, request.alias, plan, now=self._clock.wall())
            return self._gate.passed(started, request.alias, ask, workers)

        why = reason(ask, request.why) or f"rollout of {plan.candidate}"
        return await self._changed(pb.StartRolloutResponse, change, who, why)

    async def PromoteRollout(
        self, request: pb.PromoteRolloutRequest, context: CallContext
    ) -> pb.PromoteRolloutResponse:
        """Raises NotFound, InvalidRequest."""
        who = await self._actor(context)
        ask, workers = Ask(request.release, request.force), await self._workers()

        def change(table: RouteTable) -> RouteTable:
            now, percent = self._clock.wall(), request.percent or None
            promoted = rollout.promote(table, request.alias, now=now, percent=percent)
            return self._gate.passed(promoted, request.alias, ask, workers)

        return await self._changed(pb.PromoteRolloutResponse, change, who, reason(ask, request.why) or "promoted")

    async def PauseRollout(self, request: pb.PauseRolloutRequest, context: CallContext) -> pb.PauseRolloutResponse:
        """Raises NotFound, InvalidRequest."""
        who, why = await self._actor(context), request.why or "paused"
        change = functools.partial(rollout.pause, alias=request.alias, reason=why)
        return await self._changed(pb.PauseRolloutResponse, change, who, why)

    async def ResumeRollout(self, request: pb.ResumeRolloutRequest, context: CallContext) -> pb.ResumeRolloutResponse:
        """Raises NotFound, InvalidRequest."""
        who = await self._actor(context)
        change = functools.partial(rollout.resume, alias=request.alias, now=self._clock.wall())
        return await self._changed(pb.ResumeRolloutResponse, change, who, request.why or "resumed")

    async def RollBackRollout(
        self, request: pb.RollBackRolloutRequest, context: CallContext
    ) -> pb.RollBackRolloutResponse:
        """Raises NotFound, InvalidRequest."""
        who, why = await self._actor(context), request.why or "rolled back by hand"
        change = functools.partial(rollout.roll_back, alias=request.alias, now=self._clock.wall(), reason=why)
        return await self._changed(pb.RollBackRolloutResponse, change, who, why)

    async def _changed(self, answer: type[AnswerT], change: Change, who: str, why: str) -> AnswerT:
        if len(why) > MAX_REASON_CHARS:
            raise InvalidRequest(f"why takes at most {MAX_REASON_CHARS} characters.", param="why")

        def checked(table: RouteTable) -> RouteTable:
            # What cannot be read back must not be written.
            return from_message(to_message(change(table)))

        fields: dict[str, Any] = {"table": to_message(await self._log.change(checked, who=who, why=why))}
        return answer(**fields)

    async def _actor(self, context: CallContext) -> str:
        return (await self._admins.administrator(authorization_of(context))).name
