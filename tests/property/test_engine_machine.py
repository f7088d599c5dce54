"""Random lives of requests in tiny engines: nothing is lost, mixed up, leaked or stuck."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.worker.engine.engine_config import NeverFitsError
from services.worker.engine.proposer import NgramProposer
from services.worker.engine.request import Choice, FinishReason, RequestKey, SamplingParams
from tests.helpers.engine import (
    EngineRig,
    FakeScript,
    PriorityClass,
    TenantLimits,
    assert_engine_empty,
    echoes,
    make_request,
    make_spec,
)

TENANTS = ["a", "b", "c"]
# Any choice ends within this many steps of the last arrival: prefill by single tokens, for all, several times over.
STEP_LIMIT = 4000


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, aborts, steps and time over one engine; the rig checks invariants and block contents each step."""

    @initialize(
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
    )
    def build(
        self, num_blocks, block_size, max_num_seqs, budget, chunk, cap, slot_cap, reserved, drafts, aging, bypass
    ) -> None:
        limits = {
            "a": TenantLimits(max_blocks=cap, max_slots=slot_cap),
            "b": TenantLimits(reserved_blocks=min(reserved, num_blocks - 1), reserved_slots=min(1, max_num_seqs - 1)),
        }
        self.errors: set[tuple[RequestKey, int]] = set()
        self.rig = EngineRig(
            # A vocabulary this small repeats itself, so that drafts are sometimes right and prompts sometimes meet.
            spec=make_spec(num_blocks=num_blocks, block_size=block_size, vocab_size=3, max_model_len=200),
            script=FakeScript(row_error=lambda key, index: "boom" if (key, index) in self.errors else None),
            proposer=NgramProposer(max_ngram=2, min_ngram=1),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, max_num_seqs),
            max_prefill_chunk=chunk,
            tenant_limits=limits,
            max_draft_count=drafts,
            aging_seconds=aging,
            max_bypass_count=bypass,
        )
        self.count = 0
        self.expected: dict[RequestKey, int] = {}
        self.aborted: set[str] = set()
        self.expiring: set[str] = set()

    live = Bundle("live")

    @rule(
        target=live,
        length=st.integers(1, 30),
        prefix=st.sampled_from([0, 1, 2]),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        received=st.sampled_from([0, 0, 0, 1, 3]),
        tenant=st.sampled_from(TENANTS),
        priority=st.sampled_from(list(PriorityClass)),
        salted=st.booleans(),
        wants_logprobs=st.sampled_from([False, False, True]),
        deadline=st.none() | st.floats(0.001, 0.1),
        fails_at=st.none() | st.integers(0, 11),
    )
    def arrive(
        self, length, prefix, max_tokens, n, received, tenant, priority, salted, wants_logprobs, deadline, fails_at
    ):
        request_id = f"r{self.count}"
        self.count += 1
        received = min(received, max_tokens)
        choices = tuple(
            Choice(index, np.array(echoes(request_id, received, choice=index, vocab_size=3), dtype=np.int32))
            for index in range(n)
        )
        request = make_request(
            request_id,
            np.random.default_rng(prefix).integers(0, 3, length).astype(np.int32),
            sampling=SamplingParams(
                max_tokens=max_tokens, seed=0, prompt_logprob_count=0 if wants_logprobs else None
            ),
            tenant=tenant,
            priority_class=priority,
            deadline=None if deadline is None else self.rig.now + deadline,
        )
        request = dataclasses.replace(request, choices=choices)
        if not salted:
            request = dataclasses.replace(request, cache_salt=b"")
        try:
            self.rig.add(request)
        except NeverFitsError:
            return multiple()
        if deadline is not None:
            self.expiring.add(request_id)
        if fails_at is not None:
            self.errors.add((RequestKey(request_id, 0, 1), fails_at))
        for choice in choices:
            self.expected[RequestKey(request_id, choice.index, 1)] = received
        return request_id

    @rule(request_id=consumes(live), choice=st.none() | st.integers(0, 2))
    def abort(self, request_id, choice) -> None:
        self.rig.engine.abort(request_id, choice=choice)
        self.aborted.add(request_id)

    @rule(count=st.integers(1, 8), seconds=st.sampled_from([0.001, 0.02]))
    def step(self, count, seconds) -> None:
        self.rig.step(count, seconds=seconds)

    @invariant()
    def blocks_and_slots_add_up(self) -> None:
        if hasattr(self, "rig"):
            self.rig.engine.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run(limit=STEP_LIMIT)
        assert_engine_empty(self.rig)
        assert set(self.rig.outputs) == set(self.expected), "a choice never ended, or one that never was did"
        for key, received in self.expected.items():
            self.check(key, received)

    def check(self, key: RequestKey, received: int) -> None:
        outputs = self.rig.outputs[key]
        got = [token_id for output in outputs for token_id in output.token_ids]
        wanted = echoes(key.request_id, received + len(got), choice=key.choice, vocab_size=3)[received:]
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
