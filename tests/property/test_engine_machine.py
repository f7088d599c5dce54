"""Random lives of requests in tiny engines: nothing is lost, mixed up, leaked or stuck."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from services.worker.engine.engine_config import NeverFitsError
from services.worker.engine.kv_blocks import KVBlock
from services.worker.engine.kv_transfer import ImportOutcome, RemotePrefill
from services.worker.engine.proposer import NgramProposer
from services.worker.engine.request import (
    Choice,
    EngineRequest,
    FinishReason,
    KVRole,
    RequestKey,
    SamplingParams,
    fresh_choices,
)
from tests.helpers.engine import (
    EngineRig,
    FakeScript,
    PriorityClass,
    TenantLimits,
    assert_engine_empty,
    echoes,
    make_request,
    make_spec,
    prompt,
    tokens,
)
from tests.helpers.tiers import FaultyTiers

VOCAB_SIZE = 3
# Any choice ends within this many steps of the last arrival: prefill by single tokens, for all, several times over.
STEP_LIMIT = 4000


def own_sequence(request_id: str, choice: int, count: int) -> list[int]:
    """What a choice must say in this vocabulary."""
    return echoes(request_id, count, choice=choice, vocab_size=VOCAB_SIZE)


@dataclasses.dataclass(frozen=True)
class Shape:
    """An engine too small for comfort."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    chunk: int
    cap: int | None
    slot_cap: int | None
    reserved: int
    drafts: int
    aging: float
    bypass: int
    has_tiers: bool


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request to come: `received` tokens are known from an earlier attempt, `fails_at` is its row's fault."""

    length: int
    prefix: int
    max_tokens: int
    n: int
    received: int
    tenant: str
    priority: PriorityClass
    is_salted: bool
    prompt_logprob_count: int | None
    lifetime: float | None
    fails_at: int | None
    role: KVRole


SHAPES = st.builds(
    Shape,
    num_blocks=st.integers(3, 24),
    block_size=st.sampled_from([1, 2, 4]),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(2, 24),
    chunk=st.integers(1, 12),
    cap=st.none() | st.integers(2, 12),
    slot_cap=st.none() | st.integers(1, 3),
    reserved=st.integers(0, 3),
    drafts=st.integers(0, 3),
    aging=st.sampled_from([0.01, 30.0]),
    bypass=st.integers(0, 3),
    has_tiers=st.sampled_from([True, True, True, False]),
)
ARRIVALS = st.builds(
    Arrival,
    length=st.integers(1, 30),
    prefix=st.sampled_from([0, 1, 2]),
    max_tokens=st.integers(1, 12),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    received=st.sampled_from([0, 0, 0, 1, 3]),
    tenant=st.sampled_from(["a", "b", "c"]),
    priority=st.sampled_from(list(PriorityClass)),
    is_salted=st.booleans(),
    prompt_logprob_count=st.sampled_from([None, None, 0]),
    lifetime=st.none() | st.floats(0.001, 0.1),
    fails_at=st.none() | st.none() | st.integers(0, 11),
    role=st.sampled_from([KVRole.LOCAL, KVRole.IMPORT, KVRole.EXPORT]),
)


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, aborts, steps, faulty tiers and peers; the rig checks invariants and block contents each step."""

    live: Bundle[str] = Bundle("live")

    @initialize(shape=SHAPES)
    def build(self, shape: Shape) -> None:
        limits = {
            "a": TenantLimits(max_blocks=shape.cap, max_slots=shape.slot_cap),
            "b": TenantLimits(
                reserved_blocks=min(shape.reserved, shape.num_blocks - 1), reserved_slots=min(1, shape.max_num_seqs - 1)
            ),
        }
        self.errors: set[tuple[RequestKey, int]] = set()
        self.tiers = FaultyTiers()
        self.rig = EngineRig(
            # A vocabulary this small repeats itself, so that drafts are sometimes right and prompts sometimes meet.
            spec=make_spec(
                num_blocks=shape.num_blocks, block_size=shape.block_size, vocab_size=VOCAB_SIZE, max_model_len=200
            ),
            script=FakeScript(row_error=lambda key, index: "boom" if (key, index) in self.errors else None),
            proposer=NgramProposer(max_ngram=2, min_ngram=1),
            tiers=self.tiers if shape.has_tiers else None,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=max(shape.budget, shape.max_num_seqs),
            max_prefill_chunk=shape.chunk,
            tenant_limits=limits,
            max_draft_count=shape.drafts,
            aging_seconds=shape.aging,
            max_bypass_count=shape.bypass,
        )
        self.peer = EngineRig(spec=make_spec(num_blocks=256, block_size=shape.block_size, vocab_size=VOCAB_SIZE))
        self.asked: list[RemotePrefill] = []
        self.exported: list[str] = []
        self.requests: dict[str, EngineRequest] = {}
        self.count = 0
        self.expected: dict[RequestKey, int] = {}
        self.aborted: set[str] = set()
        self.expiring: set[str] = set()

    @rule(target=live, arrival=ARRIVALS)
    def arrive(self, arrival: Arrival) -> MultipleResults[str] | str:
        request_id = f"r{self.count}"
        self.count += 1
        received = min(arrival.received, arrival.max_tokens)
        choices = tuple(Choice(index, tokens(*own_sequence(request_id, index, received))) for index in range(arrival.n))
        request = make_request(
            request_id,
            prompt(arrival.length, seed=arrival.prefix, vocab_size=VOCAB_SIZE),
            sampling=SamplingParams(
                max_tokens=arrival.max_tokens, seed=0, prompt_logprob_count=arrival.prompt_logprob_count
            ),
            tenant=arrival.tenant,
            priority_class=arrival.priority,
            choices=choices,
            cache_salt=arrival.tenant.encode() if arrival.is_salted else b"",
            deadline=None if arrival.lifetime is None else self.rig.now + arrival.lifetime,
            kv_role=arrival.role,
        )
        try:
            self.rig.add(request)
        except NeverFitsError:
            return multiple()
        self.requests[request_id] = request
        if arrival.role is KVRole.EXPORT:
            self.exported.append(request_id)
        if arrival.lifetime is not None:
            self.expiring.add(request_id)
        if arrival.fails_at is not None:
            self.errors.add((RequestKey(request_id, 0, 1), arrival.fails_at))
        for choice in choices:
            self.expected[RequestKey(request_id, choice.index, 1)] = received
        return request_id

    @rule(request_id=consumes(live), choice=st.none() | st.integers(0, 2))
    def abort(self, request_id: str, choice: int | None) -> None:
        self.rig.engine.abort(request_id, choice=choice)
        self.aborted.add(request_id)

    @rule(count=st.integers(1, 8), seconds=st.sampled_from([0.001, 0.02]))
    def step(self, count: int, seconds: float) -> None:
        self.rig.step(count, seconds=seconds)

    @rule(number=st.integers(0, 99), between=st.integers(0, 12))
    def come_back_after_a_crowd(self, number: int, between: int) -> None:
        """A prompt as large as the pool pushes the cached blocks out; then an earlier prompt is asked again."""
        if not self.requests:
            return
        earlier = list(self.requests.values())[number % len(self.requests)]
        self.rig.step(between)
        spec = self.rig.runner.spec
        filling = prompt(spec.num_blocks * spec.block_size, seed=9, vocab_size=VOCAB_SIZE)
        once = SamplingParams(max_tokens=1, seed=0)
        self.repeat(dataclasses.replace(earlier, prompt_token_ids=filling, sampling=once, tenant="c", cache_salt=b""))
        self.rig.step(between)
        self.repeat(earlier)

    def repeat(self, source: EngineRequest) -> None:
        """The same as a new request of one choice, without a deadline."""
        request_id = f"r{self.count}"
        self.count += 1
        request = dataclasses.replace(
            source, request_id=request_id, choices=fresh_choices(1), deadline=None, kv_role=KVRole.LOCAL
        )
        with contextlib.suppress(NeverFitsError):
            self.rig.add(request)
            self.expected[RequestKey(request_id, 0, 1)] = 0

    @rule()
    def finish_reads(self) -> None:
        self.tiers.finish_reads()

    @rule(number=st.integers(0, 999), fault=st.sampled_from([FaultyTiers.lose, FaultyTiers.spoil, FaultyTiers.swap]))
    def spoil_a_tier(self, number: int, fault: Callable[[FaultyTiers, int], None]) -> None:
        fault(self.tiers, number)

    @rule(number=st.integers(0, 99), fault=st.sampled_from(["none", "none", "short", "spoilt", "shifted", "failed"]))
    def a_peer_answers(self, number: int, fault: str) -> None:
        self.asked += self.rig.engine.take_remote_prefills()
        if not self.asked:
            return
        prefill = self.asked.pop(number % len(self.asked))
        request_id, epoch = prefill.key.request_id, prefill.key.epoch
        if fault == "failed":
            self.rig.engine.kv_failed(request_id, epoch)
            return
        blocks = self.prefilled_by_peer(request_id)[prefill.start // self.peer.runner.spec.block_size :]
        if fault == "short":
            blocks = blocks[: number % (len(blocks) + 1)]
        elif fault == "shifted":
            blocks = blocks[1:]
        elif fault == "spoilt" and blocks:
            spoilt = blocks[number % len(blocks)]
            blocks[number % len(blocks)] = spoilt._replace(payload=bytes(len(spoilt.payload)))
        if self.rig.engine.kv_received(request_id, epoch, blocks) is not ImportOutcome.WAITING:
            return
        if fault == "short":
            start = prefill.start + len(blocks) * self.peer.runner.spec.block_size
            self.asked.append(dataclasses.replace(prefill, start=start))
        else:
            # The peer knows the prompt, not what was said after it.
            self.rig.engine.kv_failed(request_id, epoch)

    @rule(number=st.integers(0, 99))
    def a_peer_takes_its_blocks(self, number: int) -> None:
        if not self.exported:
            return
        request_id = self.exported.pop(number % len(self.exported))
        blocks = self.rig.engine.exported_kv(request_id, 1, start=0)
        if blocks:
            assert blocks == self.prefilled_by_peer(request_id)[: len(blocks)]
        self.rig.engine.release_kv(request_id, 1)

    def prefilled_by_peer(self, request_id: str) -> list[KVBlock]:
        """The full blocks of a request's prompt as another engine computes them."""
        prompt_only = SamplingParams(max_tokens=1, seed=0)
        source = self.requests[request_id]
        self.peer.add(
            dataclasses.replace(
                source, sampling=prompt_only, choices=fresh_choices(1), deadline=None, kv_role=KVRole.EXPORT
            )
        )
        self.peer.outputs.clear()
        self.peer.run()
        blocks = self.peer.engine.exported_kv(request_id, 1, start=0)
        assert self.peer.engine.release_kv(request_id, 1)
        assert_engine_empty(self.peer)
        return blocks

    @invariant()
    def blocks_and_slots_add_up(self) -> None:
        if hasattr(self, "rig"):
            self.rig.engine.check_invariants()
            assert self.rig.engine.stats(self.rig.now).steps_without_progress == 0, "a step with work computed nothing"

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(STEP_LIMIT):
            if not self.rig.engine.has_work():
                break
            self.tiers.finish_reads()
            self.a_peer_answers(0, "none")
            self.a_peer_takes_its_blocks(0)
            self.rig.step()
        for request_id in self.exported:
            self.rig.engine.release_kv(request_id, 1)
        assert_engine_empty(self.rig)
        assert set(self.rig.outputs) == set(self.expected), "a choice never ended, or one that never was did"
        for key, received in self.expected.items():
            self.check(key, received)

    def check(self, key: RequestKey, received: int) -> None:
        outputs = self.rig.outputs[key]
        got = [token_id for output in outputs for token_id in output.token_ids]
        wanted = own_sequence(key.request_id, key.choice, received + len(got))[received:]
        assert got == wanted, f"{key} got {got}, its own sequence is {wanted}"
        assert outputs[0].first_index == received
        reason = outputs[-1].finish_reason
        allowed = {FinishReason.LENGTH}
        allowed |= {FinishReason.CANCELLED} if key.request_id in self.aborted else set()
        allowed |= {FinishReason.EXPIRED} if key.request_id in self.expiring else set()
        allowed |= {FinishReason.ERROR} if any(bad == key for bad, _ in self.errors) else set()
        assert reason in allowed, f"{key} ended by {reason}"


EngineMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase
