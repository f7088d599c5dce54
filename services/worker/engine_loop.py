"""Runs the engine on a thread of its own; the event loop talks to it by values.

Commands go in through an inbox; reports come out by one wake-up of the event loop, however many steps they cover.
The heartbeat stops when the engine stops. The engine never waits for anything out here. Built by wiring.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import structlog

from services.common.clock import Clock
from services.worker.engine.engine_config import EngineError, NeverFitsError
from services.worker.engine.outputs import EngineOutput, EngineStats, KVEvents
from services.worker.engine.request import EngineRequest, SamplingParams
from services.worker.engine.step_costs import ChoiceCost
from services.worker.kv_moves import KVCommand, KVMoves, KVReport, PeeredEngine
from services.worker.requests import Abort
from services.worker.time_account import TimeAccount, TimeSpent

IDLE_TICK_S = 0.5
CACHE_PERIOD_S = 0.1
# How often the engine looks again when all its work waits for something outside: a disk, a peer.
WAITING_TICK_S = 0.002
STALE_FLOOR_S = 5.0
STALE_STEPS = 10.0
_MEAN_WEIGHT = 0.05
_CANARY = "canary"
Command = EngineRequest | Abort | KVCommand


class SteppedEngine(PeeredEngine, Protocol):
    """The part of `engine.Engine` that the loop uses."""

    def add_request(self, request: EngineRequest, *, now: float) -> None: ...
    def check_request(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str, *, epoch: int | None = None, choice: int | None = None) -> int: ...
    def step(self, now: float) -> list[EngineOutput]: ...
    def note_step_time(self, seconds: float) -> None: ...
    def take_costs(self, seconds: float) -> list[ChoiceCost]: ...
    def fail_all(self, error: str) -> list[EngineOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self, now: float) -> EngineStats: ...
    def take_kv_events(self) -> KVEvents: ...
    def check_invariants(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Rejection:
    """The engine refused a request after it was handed over. `reason` is of the error table."""

    request_id: str
    epoch: int
    reason: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class LoopReport:
    """What happened since the last report. `failed` true: the engine as a whole broke and will not run again."""

    outputs: list[EngineOutput]
    rejections: list[Rejection]
    stats: EngineStats | None
    step_seconds: list[float]
    failed: bool
    cache: list[KVEvents] = dataclasses.field(default_factory=list)
    costs: list[ChoiceCost] = dataclasses.field(default_factory=list)
    kv: KVReport = dataclasses.field(default_factory=KVReport)
    # Prompt tokens of all requests that the engine took since the start: `stats` count those.
    taken_token_total: int = 0

    def with_later(self, report: LoopReport) -> LoopReport:
        """Both in one; takes over the lists of this one."""
        self.outputs.extend(report.outputs)
        self.rejections.extend(report.rejections)
        self.step_seconds.extend(report.step_seconds)
        self.cache.extend(report.cache)
        self.costs.extend(report.costs)
        self.kv.extend(report.kv)
        return dataclasses.replace(
            self,
            stats=report.stats or self.stats,
            failed=self.failed or report.failed,
            taken_token_total=report.taken_token_total,
        )


class EngineLoop:
    """Owner of the engine's thread. All methods are for the event loop's thread and return at once."""

    def __init__(self, engine: SteppedEngine, *, clock: Clock) -> None:
        self._engine = engine
        self._moves = KVMoves(engine)
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._condition = threading.Condition()
        self._inbox: list[Command] = []
        self._stopping = False
        self._failed = False
        self._busy = False
        self._pausing = False
        self._checked = True
        self._beat_at = clock.monotonic()
        self._mean_step_s = 0.0
        self._submitted_tokens = self._taken_tokens = self._told_tokens = 0
        self._cache_told_at = -math.inf
        self._time = TimeAccount(clock.monotonic())
        self._pending: LoopReport | None = None
        self._wake_up_sent = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_report: Callable[[LoopReport], None] = lambda report: None
        self._canaries: dict[int, asyncio.Future[None]] = {}

    def start(self, on_report: Callable[[LoopReport], None]) -> None:
        """Start the thread; reports arrive on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._on_report = on_report
        self._beat_at = self._clock.monotonic()
        self._time = TimeAccount(self._beat_at)
        self._thread.start()

    def check(self, request: EngineRequest) -> None:
        """Raise NeverFitsError or another EngineError for a request that the engine would refuse for itself."""
        self._engine.check_request(request)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; a later refusal of the engine comes back as a Rejection."""
        self._submitted_tokens += len(request.prompt_token_ids)
        self._put([request])

    def abort(self, aborts: Iterable[Abort]) -> None:
        """Stop choices; each ends as CANCELLED in a later report."""
        self._put(aborts)

    def move(self, command: KVCommand) -> None:
        """Take in or hand out blocks between two steps; what comes of it is in a later report."""
        self._put([command])

    async def stop(self) -> bool:
        """End the thread after the step in hand; False when it did not end within 5 s (a frozen engine)."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 5.0)
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """The engine broke as a whole; it runs nothing again."""
        return self._failed

    @property
    def untold_token_count(self) -> int:
        """Prompt tokens that were submitted and that the stats of the last report do not count."""
        return self._submitted_tokens - self._told_tokens

    def beat_age(self) -> float:
        """Seconds since the last step or idle tick."""
        return self._clock.monotonic() - self._beat_at

    def progress_age(self) -> float | None:
        """Seconds since the last step while there is work; None when idle."""
        return self.beat_age() if self._busy else None

    @property
    def time_spent(self) -> TimeSpent:
        """Busy and idle time since the start, up to the last step or idle tick."""
        return self._time.spent

    def healthy(self) -> bool:
        """False when the engine broke, its thread died, or a step takes > max(5 s, 10 × the mean step)."""
        if self._failed or (self._thread.ident is not None and not self._thread.is_alive() and not self._stopping):
            return False
        return self.beat_age() <= max(STALE_FLOOR_S, STALE_STEPS * self._mean_step_s)

    async def canary(self, token_id: int, timeout_s: float) -> None:
        """Have the engine generate one token. Raises TimeoutError or RuntimeError when it does not."""
        number = len(self._canaries) + 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._canaries[number] = future
        prompt = np.array([token_id], dtype=np.int32)
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
        self.submit(EngineRequest(_CANARY, number, prompt, sampling))
        try:
            async with asyncio.timeout(timeout_s):
                await future
        finally:
            self.abort([Abort(_CANARY, number)])

    def check_invariants(self) -> None:
        """Raise AssertionError when the engine's accounting is off. Only after `stop`."""
        self._engine.check_invariants()

    # --- the engine's thread -------------------------------------------------------------------------------------
    def _run(self) -> None:
        engine = self._engine
        try:
            while True:
                commands = self._wait()
                if commands is None:
                    return
                now = self._clock.monotonic()
                rejections = [r for command in commands if (r := self._obey(command, now)) is not None]
                outputs: list[EngineOutput] = []
                taken: list[float] = []
                has_stepped = engine.has_work()
                if has_stepped:
                    outputs = engine.step(now)
                self._beat_at = self._clock.monotonic()
                stats = engine.stats(self._beat_at)
                self._pausing = has_stepped and stats.scheduled_token_count == 0 and engine.has_work()
                if has_stepped and not self._pausing:
                    taken = [self._beat_at - now]
                    self._note_step(taken[0])
                    engine.note_step_time(taken[0])
                costs = self._share_time(stats.scheduled_token_count) if has_stepped else []
                cache = self._cache_changes(self._beat_at)
                moves = self._moves.collect()
                if commands or outputs or taken or cache or moves:
                    total = self._taken_tokens
                    self._report(LoopReport(outputs, rejections, stats, taken, False, cache, costs, moves, total))
        except Exception as error:
            structlog.get_logger().error("engine_failed", error=type(error).__name__, exc_info=error)
            self._failed = True
            report = LoopReport([], [], None, [], True, taken_token_total=self._taken_tokens)
            with contextlib.suppress(Exception):
                engine.fail_all("the engine failed")
                report.costs.extend(engine.take_costs(0.0))
            self._report(report)

    def _wait(self) -> list[Command] | None:
        with self._condition:
            while not self._inbox and not self._stopping and not self._engine.has_work():
                self._busy = False
                self._beat_at = self._clock.monotonic()
                self._time.idle_until(self._beat_at)
                if not self._condition.wait(IDLE_TICK_S) and not self._checked:
                    self._checked = True
                    self._engine.check_invariants()
            if self._pausing and not self._inbox and not self._stopping:
                self._condition.wait(WAITING_TICK_S)
                self._time.idle_until(self._clock.monotonic())
            if self._stopping:
                return None
            if not self._busy:
                # An idle tick may be half a second old: the age of the first step starts here.
                self._beat_at = self._clock.monotonic()
                self._time.idle_until(self._beat_at)
            self._busy = True
            self._checked = False
            commands, self._inbox = self._inbox, []
            return commands

    def _obey(self, command: Command, now: float) -> Rejection | None:
        if isinstance(command, Abort):
            self._engine.abort(command.request_id, epoch=command.epoch, choice=command.choice)
            return None
        if not isinstance(command, EngineRequest):
            self._moves.obey(command)
            return None
        self._taken_tokens += len(command.prompt_token_ids)
        try:
            self._engine.add_request(command, now=now)
        except NeverFitsError as error:
            return Rejection(command.request_id, command.epoch, "CONTEXT_LENGTH_EXCEEDED", str(error))
        except EngineError as error:
            return Rejection(command.request_id, command.epoch, "INVALID_REQUEST", str(error))
        return None

    def _cache_changes(self, now: float) -> list[KVEvents]:
        """What became hittable or stopped being so, at most each 100 ms and before the engine idles."""
        if now - self._cache_told_at < CACHE_PERIOD_S and self._engine.has_work():
            return []
        self._cache_told_at = now
        events = self._engine.take_kv_events()
        return [events] if events.snapshot or events.stored or events.removed else []

    def _share_time(self, token_count: int) -> list[ChoiceCost]:
        # What lies between two steps is part of the later one; a step that computed nothing is idle.
        if token_count:
            return self._engine.take_costs(self._time.busy_until(self._beat_at))
        self._time.idle_until(self._beat_at)
        return self._engine.take_costs(0.0)

    def _note_step(self, seconds: float) -> None:
        mean = self._mean_step_s
        self._mean_step_s = seconds if mean == 0.0 else mean + _MEAN_WEIGHT * (seconds - mean)

    def _report(self, report: LoopReport) -> None:
        with self._condition:
            self._pending = report if self._pending is None else self._pending.with_later(report)
            wake, self._wake_up_sent = not self._wake_up_sent, True
        if wake and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    # --- the event loop's thread ---------------------------------------------------------------------------------
    def _put(self, commands: Iterable[Command]) -> None:
        with self._condition:
            self._inbox.extend(commands)
            self._condition.notify()

    def _deliver(self) -> None:
        with self._condition:
            report, self._pending = self._pending, None
            self._wake_up_sent = False
        if report is None:
            return
        self._told_tokens = report.taken_token_total
        self._answer_canaries(report)
        self._on_report(report)

    def _answer_canaries(self, report: LoopReport) -> None:
        if not self._canaries:
            return
        good = {o.key.epoch for o in report.outputs if o.key.request_id == _CANARY and o.token_ids}
        bad = {o.key.epoch for o in report.outputs if o.key.request_id == _CANARY and o.error}
        bad |= {r.epoch for r in report.rejections if r.request_id == _CANARY}
        for number, future in list(self._canaries.items()):
            if future.done():
                continue
            if number in good:
                future.set_result(None)
            elif number in bad or report.failed:
                future.set_exception(RuntimeError("the engine did not generate the canary token"))
