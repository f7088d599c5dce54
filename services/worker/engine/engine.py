"""The engine: takes requests, runs steps, says what happened to each choice.

Owns scheduler and runner, and their one loop: schedule, execute, update. Decides nothing about text, tenants' money
or the network. Called by the worker's engine loop on one thread; every call but `step` returns at once.
Charter: a new feature is a new file and at most one call here.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.isolation_check import check_isolation
from services.worker.engine.kv_blocks import KVBlock, sealed
from services.worker.engine.kv_tiers import KVTiers, SpilledBlocks
from services.worker.engine.kv_transfer import ImportOutcome, RemotePrefill
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.outputs import EngineOutput, EngineStats, KVEvents, ModelRunnerOutput
from services.worker.engine.proposer import Proposer, Speculation
from services.worker.engine.request import EngineRequest
from services.worker.engine.request_checks import check_fits, check_request
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.step_costs import ChoiceCost, StepCosts


class Engine:
    """One model runner's scheduler, cache and stop rules. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        proposer: Proposer | None = None,
        tiers: KVTiers | None = None,
    ) -> None:
        """`tiers` keep what the pool evicts; None loses it.

        Raises ValueError when the settings cannot work with the runner's pool.
        Raises RuntimeError when the self-test of tenant isolation fails.
        """
        config.validate(num_blocks=runner.spec.num_blocks)
        check_isolation(config)
        self._runner = runner
        speculation = None
        if proposer is not None and config.max_draft_count:
            speculation = Speculation(
                proposer, max_draft_count=config.max_draft_count, max_batch=config.max_draft_batch
            )
        spilled = None
        if tiers is not None:
            spilled = SpilledBlocks(tiers, runner.kv_layout, block_size=runner.spec.block_size)
        self._scheduler = Scheduler(runner.spec, config, speculation=speculation, spilled=spilled)
        self._costs = StepCosts()
        self._is_broken = False

    def add_request(self, request: EngineRequest, *, now: float) -> None:
        """Queue every choice of `request`. Each ends with exactly one EngineOutput that has a `finish_reason`.

        `now` is on the clock of `request.deadline`. Raises InvalidRequestError, NeverFitsError or
        DuplicateRequestError, and then has changed nothing.
        """
        self.check_request(request)
        self._scheduler.add(request, now=now)

    def check_request(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError or NeverFitsError as `add_request` would. Reads constants only: any thread may."""
        spec, scheduler = self._runner.spec, self._scheduler
        check_request(request, spec)
        block_limit, slot_limit = scheduler.kv.limit(request.tenant), scheduler.slot_limit(request.tenant)
        check_fits(request, spec, block_limit=block_limit, slot_limit=slot_limit)

    def abort(self, request_id: str, *, epoch: int | None = None, choice: int | None = None) -> int:
        """Stop choices of a request (of this epoch, of this choice; None means all) and free their blocks at once.

        Returns how many were stopped; each ends as CANCELLED in the next step's outputs. Unknown ids return 0.
        """
        return self._scheduler.abort(request_id, epoch=epoch, choice=choice)

    def step(self, now: float) -> list[EngineOutput]:
        """Schedule, compute and account one step; blocks for as long as the runner computes.

        Returns at most one output a choice that got tokens, started or ended. Raises what the runner raises for the
        device as a whole; only `fail_all` may follow.
        """
        if self._is_broken:
            raise RuntimeError("the last step failed: call fail_all first")
        self._is_broken = True
        decision = self._scheduler.schedule(now)
        self._scheduler.kv.move_blocks(self._runner)
        result = ModelRunnerOutput(rows=())
        if decision.scheduled or decision.released:
            result = self._runner.execute(decision)
        outputs = self._scheduler.update(decision, result, now=now)
        self._costs.note(decision, result, outputs)
        self._is_broken = False
        return outputs

    def note_step_time(self, seconds: float) -> None:
        """How long the last step took: what a target for the step time is held by."""
        self._scheduler.note_step_time(seconds)

    def take_costs(self, seconds: float) -> list[ChoiceCost]:
        """Share the `seconds` that the last step took among what it computed; returns the choices that ended in it."""
        return self._costs.take(seconds)

    def fail_all(self, error: str) -> list[EngineOutput]:
        """End every choice with ERROR, free everything and empty the cache; the engine can then go on."""
        self._is_broken = False
        outputs = self._scheduler.fail_all(error)
        self._costs.end(outputs)
        return outputs

    def take_remote_prefills(self) -> list[RemotePrefill]:
        """What to ask peers for, since the last call. Each must be answered by `kv_received` or `kv_failed`."""
        return self._scheduler.imports.take_announced()

    def kv_received(self, request_id: str, epoch: int, blocks: Sequence[KVBlock]) -> ImportOutcome:
        """A peer's next blocks, in the order asked for; copied in at once. They may come in several calls."""
        return self._scheduler.imports.received(request_id, epoch, blocks, self._runner)

    def kv_failed(self, request_id: str, epoch: int) -> bool:
        """The peer delivers no more: the rest of the prompt is computed here. False, an orphan, when none waits."""
        return self._scheduler.imports.failed(request_id, epoch)

    def exported_kv(self, request_id: str, epoch: int, *, start: int, limit: int | None = None) -> list[KVBlock]:
        """Copies of an EXPORT request's computed blocks of the prompt, from the block `start` on, at most `limit`."""
        end = None if limit is None else start + limit
        runner, held = self._runner, self._scheduler.kv.exports.blocks(request_id, epoch)[start:end]
        return [sealed(full_hash, runner.export_block(block), runner.kv_layout) for block, full_hash in held]

    def release_kv(self, request_id: str, epoch: int) -> bool:
        """Let go of an EXPORT request's blocks, which are kept until then; False when they are not kept (any more)."""
        return self._scheduler.kv.exports.release(request_id, epoch)

    def has_work(self) -> bool:
        """True while a choice is unfinished or `step` still has something to hand out."""
        return self._scheduler.has_work()

    def stats(self, now: float) -> EngineStats:
        """Counts as of the last step. Takes time in proportion to the requests in hand."""
        return self._scheduler.stats(now)

    def take_kv_events(self) -> KVEvents:
        """Changes of the set of hittable blocks since the last call; bounded, a snapshot after an overflow."""
        return self._scheduler.kv.pool.take_events()

    def check_invariants(self) -> None:
        """Raise AssertionError when block, slot or queue accounting is off. When idle also that nothing is held."""
        self._scheduler.check_invariants()
        if not self.has_work():
            self._runner.check_invariants()
