"""Who computes what in the next step, and what its answer changes.

Owns the life of every request from `add` to its last output. Knows no phases: each request has
`num_computed_tokens` chasing `num_tokens`, a step hands out a token budget. Never touches tensors or text.
Called by the engine only. Charter: `schedule` stays a list of phases; a new feature is a new file and one call here.
"""

from __future__ import annotations

import dataclasses

from services.worker.engine import stop_rules
from services.worker.engine.admission import Admission
from services.worker.engine.decode_columns import DecodeColumns
from services.worker.engine.engine_config import DuplicateRequestError, EngineConfig
from services.worker.engine.kv_cache_manager import KVCacheManager
from services.worker.engine.kv_tiers import SpilledBlocks
from services.worker.engine.kv_transfer import KVImports
from services.worker.engine.model_runner import RunnerSpec
from services.worker.engine.outputs import (
    EngineOutput,
    EngineStats,
    ModelRunnerOutput,
    SampledRow,
    ScheduledRequest,
    SchedulerOutput,
    TokenArray,
)
from services.worker.engine.proposer import Speculation
from services.worker.engine.request import (
    Choice,
    EngineRequest,
    FinishReason,
    KVRole,
    PriorityClass,
    Request,
    RequestGroup,
    RequestKey,
    RequestState,
)
from services.worker.engine.request_queue import RequestQueue
from services.worker.engine.requests_in_hand import RequestsInHand
from services.worker.engine.running_batch import RunningBatch
from services.worker.engine.step_builder import StepBuilder
from services.worker.engine.step_pace import StepPace


@dataclasses.dataclass(slots=True)
class _Counters:
    preemption: int = 0
    prefill: int = 0
    decode: int = 0


class Scheduler:
    """Requests in every state, and the next step."""

    def __init__(
        self,
        spec: RunnerSpec,
        config: EngineConfig,
        *,
        speculation: Speculation | None = None,
        spilled: SpilledBlocks | None = None,
    ) -> None:
        self._spec = spec
        self._config = config
        self._speculation = speculation
        self.kv = KVCacheManager(num_blocks=spec.num_blocks, block_size=spec.block_size, config=config, spilled=spilled)
        self._queue = RequestQueue()
        self._running = RunningBatch(config)
        self.imports = KVImports(self.kv, self._queue, self._running, max_waiting=config.max_num_seqs)
        self._admission = Admission(self._queue, self._running, self.kv, imports=self.imports, config=config)
        self._requests = RequestsInHand()
        self._sequence = self._step = 0
        self._pace = StepPace(config.step_time_target_s)
        self._columns = DecodeColumns()
        self._builder = self._new_builder()
        # Requests whose newest token has no block yet.
        self._crowded: list[Request] = []
        self._released: list[RequestKey] = []
        self._ended: list[EngineOutput] = []
        self._counters = _Counters()
        self._idle_steps = 0
        self._progress_at = 0.0

    def slot_limit(self, tenant: str) -> int:
        """The most slots `tenant` can ever hold."""
        return self._running.limit(tenant)

    def add(self, source: EngineRequest, *, now: float) -> None:
        """Queue every choice of a checked request. Raises DuplicateRequestError, and then has changed nothing."""
        keys = [RequestKey(source.request_id, choice.index, source.epoch) for choice in source.choices]
        if any(key in self._requests for key in keys):
            raise DuplicateRequestError(f"request {source.request_id} epoch {source.epoch} is already in hand")
        if not self._requests:
            self._progress_at = now
        root = self.kv.root_of(adapter_digest=source.adapter_digest, cache_salt=source.cache_salt)
        group = RequestGroup(source, root=root)
        if source.kv_role is KVRole.EXPORT:
            self.kv.exports.open(source.request_id, source.epoch)
        for choice in source.choices:
            self._add_choice(group, choice, now=now)

    def abort(self, request_id: str, *, epoch: int | None, choice: int | None) -> int:
        """End matching choices as CANCELLED now; returns how many."""
        chosen = self._requests.matching(request_id, epoch=epoch, choice=choice)
        for request in chosen:
            self._finish(request, stop_rules.ended(request, FinishReason.CANCELLED))
        self._running.compact()
        return len(chosen)

    def fail_all(self, error: str) -> list[EngineOutput]:
        """End everything with ERROR and forget all cached contents, which a device fault may have spoilt."""
        self.kv.end_step()
        for request in list(self._requests):
            self._finish(request, stop_rules.ended(request, FinishReason.ERROR, error=error))
        self.kv.forget_contents()
        self._running.compact()
        return self.take_ended()

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide one step: decodes first, then chunks of running prefills, then admissions, within the budget."""
        self._step += 1
        self._builder = self._new_builder()
        self.kv.begin_step(now, prefill_total=self._counters.prefill)
        self._expire(now)
        self._age(now)
        for victim in self._admission.victims_for_better_class():
            self._preempt(victim)
        self._running.compact()
        self.imports.resume(self._builder)
        prefills = self._schedule_decodes(now)
        self._schedule_prefills(prefills)
        self._running.compact()
        self._admission.admit(self._builder)
        return self._decision()

    def update(self, decision: SchedulerOutput, result: ModelRunnerOutput, *, now: float) -> list[EngineOutput]:
        """Account a computed step. Rows whose request ended meanwhile are ignored.

        Raises RuntimeError when the runner did not answer every row.
        """
        if len(result.rows) != len(decision.scheduled):
            raise RuntimeError(f"the runner answered {len(result.rows)} rows of {len(decision.scheduled)}")
        self.kv.end_step()
        requests = self._builder.requests
        outputs, again = stop_rules.apply_decodes(requests, result.rows, drafts=self._builder.drafts)
        self._counters.decode += len(outputs)
        for index in again:
            request = requests[index]
            if outputs[index] is not None:
                self.kv.publish(request)
            else:
                self._counters.decode -= 1
                outputs[index] = self._account(request, decision.scheduled[index], result.rows[index])
            if request.state is RequestState.RUNNING and request.num_output_tokens > request.fits_outputs:
                self._crowded.append(request)
        if decision.scheduled or self._ended or not self._requests or self._waits_outside():
            self._idle_steps = 0
            self._progress_at = now
        else:
            self._idle_steps += 1
        self._running.compact()
        return [output for output in outputs if output is not None] + self.take_ended()

    def note_step_time(self, seconds: float) -> None:
        """How long the last step took."""
        self._pace.note(self._builder.token_count, seconds)

    def take_ended(self) -> list[EngineOutput]:
        """Last outputs of choices that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def has_work(self) -> bool:
        """True while a choice is unfinished, an output waits, or the runner must still be told of a release."""
        return bool(self._requests or self._ended or self._released)

    def stats(self, now: float) -> EngineStats:
        """Counts as of now."""
        pool, admission, spec, counters = self.kv.pool, self._admission, self._speculation, self._counters
        backlog = self._queue.token_count + sum(each.num_pending_tokens for each in self._running)
        return EngineStats(
            step=self._step,
            running_count=len(self._running),
            waiting_count=len(self._queue),
            free_block_count=pool.available_count - pool.cached_count,
            cached_block_count=pool.cached_count,
            held_block_count=pool.held_count,
            total_block_count=pool.num_blocks,
            free_slot_count=self._config.max_num_seqs - len(self._running),
            backlog_token_count=backlog,
            scheduled_token_count=self._builder.token_count,
            preemption_total=counters.preemption,
            prefix_query_token_total=admission.prefix_query_total,
            prefix_hit_token_total=admission.prefix_hit_total,
            prefill_token_total=counters.prefill,
            decode_token_total=counters.decode,
            draft_token_total=spec.draft_total if spec else 0,
            accepted_draft_token_total=spec.accepted_total if spec else 0,
            block_copy_total=self.kv.copy_total,
            tiers=self.kv.tier_stats(),
            transfer=self.imports.stats(),
            steps_without_progress=self._idle_steps,
            seconds_without_progress=now - self._progress_at if self._requests else 0.0,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError when blocks, slots, queue and states disagree. Call between steps."""
        running = [request for request in self._requests if request.state is RequestState.RUNNING]
        waiting = self._queue.waiting()
        self.kv.check_invariants(list(self._requests))
        self._queue.check_invariants()
        self._running.check_invariants()
        assert {id(each) for each in running} == {id(each) for each in self._running}, "states and batch disagree"
        self.imports.check_invariants()
        assert len(running) + len(waiting) + len(self.imports) == len(self._requests), "one neither runs nor waits"
        assert all(not each.blocks for each in waiting), "a waiting request holds blocks"
        for each in self._requests:
            each.check_invariants()
        crowded = [each for each in running if each.num_output_tokens > each.fits_outputs]
        assert all(each in self._crowded for each in crowded), f"{crowded} lack a block, and nobody knows"
        self._requests.check_invariants()
        if not self._requests:
            assert self.kv.pool.held_count == self.kv.exports.block_count, "idle, and blocks are held"
            assert self._speculation is None or self._speculation.is_idle(), "idle, and drafts are recorded"

    def _waits_outside(self) -> bool:
        """True while requests wait for a disk or a peer, or a peer keeps blocks."""
        return self.kv.is_reading or self.imports.is_waiting or len(self.kv.exports) > 0

    def _new_builder(self) -> StepBuilder:
        config = self._config
        return StepBuilder(
            self._columns, budget=config.max_num_batched_tokens, max_prefill_chunk=config.max_prefill_chunk
        )

    def _add_choice(self, group: RequestGroup, choice: Choice, *, now: float) -> None:
        self._sequence += 1
        request = Request(group, choice, sequence=self._sequence, arrival=now, eos_token_ids=self._spec.eos_token_ids)
        group.members.append(request)
        self._requests.add(request)
        self._queue.enter(request)
        reason = stop_rules.already_ended(request)
        if reason is not None:
            self._finish(request, stop_rules.ended(request, reason))

    def _expire(self, now: float) -> None:
        for request in self._requests.take_due(now):
            self._finish(request, stop_rules.ended(request, FinishReason.EXPIRED))
        self._running.compact()

    def _age(self, now: float) -> None:
        """An old BATCH request counts as INTERACTIVE, waiting or in the middle of its prefill."""
        aging = self._config.aging_seconds
        if self._queue.has_class(PriorityClass.BATCH):
            self._queue.promote(now, aging_seconds=aging)
        if self._running.has_batch_class():
            for request in list(self._running):
                if (
                    request.priority_class is PriorityClass.BATCH
                    and request.num_pending_tokens > 1
                    and now - request.arrival >= aging
                ):
                    self._running.promote(request)

    def _schedule_decodes(self, now: float) -> list[Request]:
        """Rows of all requests with one token to compute; returns the others, best first."""
        granted: dict[RequestKey, TokenArray] = {}
        drafts = self._drafts(now) if self._speculation is not None else {}
        crowded, self._crowded = self._crowded, []
        for request in list(self._running) if drafts else sorted(crowded, key=lambda each: each.rank):
            if request.num_pending_tokens != 1 or request.state is not RequestState.RUNNING:
                continue
            num_tokens = request.num_tokens
            if request.num_output_tokens > request.fits_outputs and not self._make_fit(request, num_tokens):
                continue
            proposed = drafts.get(request.key) if drafts else None
            if proposed is not None and self.kv.grow(request, num_tokens + len(proposed)):
                granted[request.key] = proposed
        self._running.compact()
        decodes = [each for each in self._running if each.num_pending_tokens == 1]
        prefills: list[Request] = []
        if len(decodes) < len(self._running):
            prefills = [each for each in self._running if each.num_pending_tokens != 1]
        self._builder.add_decodes(decodes, granted)
        self._builder.budget = self._pace.prefill_room(len(decodes), self._builder.budget)
        self._queue.charge_one_each(self._running.count_by_share(without=prefills))
        return prefills

    def _drafts(self, now: float) -> dict[RequestKey, TokenArray]:
        decodes = [each for each in self._running if each.num_pending_tokens == 1]
        if self._speculation is None or len(decodes) < len(self._running):
            return {}
        waiting = len(self._queue)
        budget = self._builder.budget - len(decodes) - waiting
        return self._speculation.drafts(decodes, budget=budget, step=self._step, now=now, waiting_count=waiting)

    def _schedule_prefills(self, prefills: list[Request]) -> None:
        """Chunks for running prefills, best first; of the long ones that of the tenant that has had least."""
        builder = self._builder
        longs = [request for request in prefills if request.state is RequestState.RUNNING and builder.is_long(request)]
        turn = min(longs, key=self._queue.fair_order) if longs else None
        others_wait = len(prefills) > 1 or len(self._queue) > 0
        for request in prefills:
            if request.state is not RequestState.RUNNING or (builder.is_long(request) and request is not turn):
                continue
            size = builder.chunk_size(request, others_wait=others_wait)
            if size:
                self._queue.charge_chunk(request, size)
                builder.add_chunk(request, size)

    def _make_fit(self, request: Request, num_tokens: int) -> bool:
        """Blocks for a running request's next token, at the cost of worse ones; False when it was itself the worst."""
        while not self.kv.grow(request, num_tokens):
            capped = self.kv.room(request.tenant).by_tenant < 1
            victim = next(
                each
                for each in self._running.worst_first()
                if each is request or each.tenant == request.tenant or (not capped and self.kv.frees_for_others(each))
            )
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue with all blocks given up; what was computed and published may still be hit."""
        self._leave_batch(request, state=RequestState.PREEMPTED)
        self._queue.put(request)
        self._counters.preemption += 1

    def _leave_batch(self, request: Request, *, state: RequestState) -> None:
        self.kv.free(request)
        self._running.remove(request, state=state)
        self._released.append(request.key)
        if self._speculation is not None:
            self._speculation.release(request.key)

    def _account(self, request: Request, row: ScheduledRequest, sampled: SampledRow) -> EngineOutput | None:
        """Any row at all; None when its request has ended, or ends now, or has nothing to tell."""
        if request.state is not RequestState.RUNNING:
            return None
        output = stop_rules.apply(request, row, sampled)
        if output is not None and output.error is not None:
            self._finish(request, output)
            return None
        known = len(row.token_ids) - row.draft_count
        if row.samples and known == 1 and row.start >= request.num_prompt_tokens:
            self._counters.decode += 1
        else:
            self._counters.prefill += known
        if row.draft_count and self._speculation is not None:
            accepted = request.num_computed_tokens - row.start - known
            self._counters.decode += accepted
            self._queue.charge(request, accepted)
            self._speculation.record(request.key, draft_count=row.draft_count, accepted_count=accepted)
        if request.num_output_tokens - request.num_pending_tokens >= request.full_at:
            self.kv.publish(request)
        request.note_decoding()
        if output is not None and output.finish_reason is not None:
            self._finish(request, output)
            return None
        return output

    def _finish(self, request: Request, output: EngineOutput) -> None:
        """The only way out: frees everything a request has, in whatever state, and keeps its last output."""
        if request.state is RequestState.RUNNING:
            self._leave_batch(request, state=RequestState.FINISHED)
        elif request.state is RequestState.WAITING_FOR_REMOTE_KV:
            self.imports.leave(request)
        else:
            self._queue.remove(request)
            request.state = RequestState.FINISHED
        self._queue.leave(request)
        request.group.members.remove(request)
        self._requests.remove(request)
        self._ended.append(output)

    def _decision(self) -> SchedulerOutput:
        released, self._released = self._released, []
        return SchedulerOutput(
            step=self._step,
            new_requests=tuple(self._builder.new_requests),
            scheduled=tuple(self._builder.rows),
            released=tuple(released),
            block_copies=self.kv.take_copies(),
            decode_keys=self._builder.decode_keys,
        )
