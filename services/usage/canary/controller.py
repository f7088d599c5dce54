"""Moves rollouts by themselves: reads what requests of both versions did, advances, promotes or rolls back.

One of the usage services does so at a time, by a lease. It reads the usage streams beside the ledger's group, so a
database that is away does not blind it, and changes routes by compare-and-set: a command by hand that came between
wins, and the next look starts from it. What it knows is kept in Redis each second: its successor goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import redis.asyncio as aioredis
import structlog
from google.protobuf import message as protobuf_message
from millrace.usage.v1 import rollout_progress_pb2 as pb
from millrace.usage.v1 import usage_event_pb2

from services.common.admission_scripts import pool_key, slot_key, store_errors
from services.common.admission_store import AdmissionStore
from services.common.clock import Clock
from services.common.errors import MillraceError, RevisionConflict, StoreUnavailable
from services.common.lease import Lease
from services.common.route_store import RouteStore
from services.common.routes import RolloutState, Route, RouteTable
from services.common.streams import UsageStream
from services.usage import rollout as steps
from services.usage.canary.judge import Call, Verdict
from services.usage.canary.trial import Trial, is_watched
from services.usage.release_gate import serve_another

WHO = "canary controller"
LOOK_S = 0.5
LEASE_S = 5.0
SAVE_S = 1.0
# Redis' clock and ours may be this far apart.
CLOCKS_S = 60.0
# Entries read at once from a usage stream.
PAGE = 1_000
_PROGRESS = slot_key("routes", "progress")


class ProgressStore:
    """What is known of each rollout, in Redis beside the route table, by alias."""

    def __init__(self, redis: aioredis.Redis) -> None:
        self._redis: Any = redis

    async def read(self, alias: str) -> pb.RolloutProgress | None:
        """What the controller wrote last, or None. Raises StoreUnavailable."""
        with store_errors():
            raw = await self._redis.hget(_PROGRESS, alias)
        if raw is None:
            return None
        with contextlib.suppress(protobuf_message.DecodeError):
            return pb.RolloutProgress.FromString(raw)
        return None

    async def write(self, progress: pb.RolloutProgress) -> None:
        """Replace it. Raises StoreUnavailable."""
        with store_errors():
            await self._redis.hset(_PROGRESS, progress.alias, progress.SerializeToString())


class CanaryController:
    """One loop; wiring runs it in every usage service."""

    def __init__(self, redis: aioredis.Redis, routes: RouteStore, clock: Clock) -> None:
        self._routes = routes
        self._clock = clock
        self._progress = ProgressStore(redis)
        self._admission = AdmissionStore(redis)
        self._stream = UsageStream(redis)
        self._lease = Lease(redis, slot_key("routes", "canary_controller"), LEASE_S)
        self._leads = False
        self._trials: dict[str, Trial] = {}
        self._places: dict[str, str] = {}
        self._save_at = 0.0

    async def run(self) -> None:
        """Look each half second until cancelled; while Redis is away, nothing is decided."""
        try:
            while True:
                try:
                    await self.look()
                except StoreUnavailable:
                    self._forget()
                except MillraceError as error:
                    structlog.get_logger().error("rollout_not_judged", reason=error.message)
                await self._clock.sleep(LOOK_S)
        finally:
            if self._leads:
                await asyncio.shield(self._lease.release())

    async def look(self) -> None:
        """Read what ended since the last look and act on it. Raises StoreUnavailable."""
        if not await self._lead():
            return
        table = await self._routes.read()
        now = self._clock.wall()
        watched = [] if table is None else [r for r in table.routes.values() if is_watched(r.rollout, now)]
        await self._take(watched)
        if table is None or not self._trials:
            return
        events = await self._read()
        for trial in self._trials.values():
            trial.observe(events, now)
        for alias in list(self._trials):
            table = await self._act(table, self._trials[alias], now)
        if now >= self._save_at:
            self._save_at = now + SAVE_S
            for trial in self._trials.values():
                await self._save(trial)

    async def _lead(self) -> bool:
        leads = await (self._lease.keep() if self._leads else self._lease.take())
        if leads != self._leads:
            self._forget()
            self._leads = leads
        return leads

    def _forget(self) -> None:
        # Another may have gone on meanwhile: what it kept is read again.
        self._trials, self._places = {}, {}
        self._leads = False

    async def _take(self, watched: Sequence[Route]) -> None:
        """A trial for each step that is watched; one that is watched no longer goes."""
        trials: dict[str, Trial] = {}
        for route in watched:
            rollout = route.rollout
            if rollout is None:
                continue
            known = self._trials.get(route.alias)
            if known is not None and known.is_of(rollout):
                trials[route.alias] = known
                continue
            trials[route.alias] = Trial(route, rollout)
            kept = await self._progress.read(route.alias)
            if kept is not None and trials[route.alias].restore(kept):
                self._places |= {
                    place.stream: place.entry_id for place in kept.places if place.stream not in self._places
                }
        self._trials = trials
        if not trials:
            self._places = {}
            return
        models = {t.model for trial in trials.values() for t in (trial.rollout.baseline, trial.rollout.candidate)}
        since = min(trial.rollout.step_time for trial in trials.values())
        for pool in await self._admission.list_pools():
            if pool.model in models:
                self._places.setdefault(pool_key(pool, "usage"), f"{max(0, int((since - CLOCKS_S) * 1000))}-0")

    async def _read(self) -> list[usage_event_pb2.UsageEvent]:
        events = []
        while True:
            found = await self._stream.after(self._places, PAGE)
            for entry in found:
                self._places[entry.stream] = entry.entry_id
                with contextlib.suppress(protobuf_message.DecodeError):
                    events.append(usage_event_pb2.UsageEvent.FromString(entry.fields.get("e", b"")))
            if len(found) < PAGE:
                return events

    async def _act(self, table: RouteTable, trial: Trial, now: float) -> RouteTable:
        """Write the next table where the verdict asks for one; returns the table that stands as far as is known."""
        verdict = trial.verdict()
        change = self._change(trial, verdict, now)
        if change is None:
            return table
        if verdict.call is Call.PASS and serve_another(trial.rollout, await self._admission.list_workers()):
            # What was judged is not what was released; `rollout status` names the workers.
            return table
        try:
            changed = await self._routes.replace(change(table), who=WHO, why=verdict.why)
        except RevisionConflict:
            # A command by hand came between and stands; the next look sees it.
            return table
        structlog.get_logger().info("rollout_moved", alias=trial.alias, verdict=verdict.call.value, why=verdict.why)
        await self._save(trial)
        return changed

    def _change(self, trial: Trial, verdict: Verdict, now: float) -> functools.partial[RouteTable] | None:
        rollout = trial.rollout
        if verdict.call is Call.FAIL:
            return functools.partial(steps.roll_back, alias=trial.alias, now=now, reason=verdict.why)
        baked = now - rollout.step_time >= rollout.bake_s
        if verdict.call is Call.PASS and baked and rollout.state is RolloutState.RUNNING:
            return functools.partial(steps.promote, alias=trial.alias, now=now, reason=verdict.why)
        return None

    async def _save(self, trial: Trial) -> None:
        await self._progress.write(trial.progress(sorted(self._places.items()), self._clock.wall()))
