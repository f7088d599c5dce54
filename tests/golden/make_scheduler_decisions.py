"""Records what the scheduler decides in seeded lives of engines: `python -m tests.golden.make_scheduler_decisions`.

A change of the scheduler that is only faster or tidier leaves the record as it is. One that means to decide otherwise
records anew, and its commit says why.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from services.worker.engine.engine_config import NeverFitsError
from services.worker.engine.outputs import EngineOutput, SchedulerOutput
from services.worker.engine.proposer import NgramProposer
from services.worker.engine.request import SamplingParams
from tests.helpers.engine import EngineRig, PriorityClass, TenantLimits, make_request, make_spec, prompt

RECORD = Path(__file__).with_name("scheduler_decisions.json")
SEEDS = range(12)
_ROUNDS = 25
_VOCAB_SIZE = 3


def digest_of_life(seed: int) -> str:
    """SHA-256 over every decision and every output of one seeded life of an engine."""
    digest = hashlib.sha256()
    for line in _life(random.Random(seed)):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _life(rng: random.Random) -> Iterator[str]:
    rig = _rig(rng)
    ids: list[str] = []
    for _ in range(_ROUNDS):
        for _ in range(rng.choice([0, 0, 1, 1, 2, 4])):
            ids.append(f"r{len(ids)}")
            _arrive(rng, rig, ids[-1])
        if ids and rng.random() < 0.1:
            rig.engine.abort(rng.choice(ids))
        for _ in range(rng.randint(1, 6)):
            yield from _step(rig, seconds=rng.choice([0.001, 0.02]))
    while rig.engine.has_work():
        yield from _step(rig, seconds=0.001)


def _rig(rng: random.Random) -> EngineRig:
    slots = rng.randint(1, 8)
    blocks = rng.randint(6, 48)
    return EngineRig(
        spec=make_spec(num_blocks=blocks, block_size=rng.choice([1, 2, 4]), vocab_size=_VOCAB_SIZE, max_model_len=200),
        proposer=NgramProposer(max_ngram=2, min_ngram=1),
        max_num_seqs=slots,
        max_num_batched_tokens=max(rng.randint(2, 32), slots),
        max_prefill_chunk=rng.randint(1, 12),
        tenant_limits={
            "a": TenantLimits(max_blocks=rng.choice([None, 8]), max_slots=rng.choice([None, 1, 2])),
            "b": TenantLimits(reserved_blocks=min(rng.randint(0, 3), blocks - 1), reserved_slots=min(1, slots - 1)),
        },
        max_draft_count=rng.choice([0, 0, 2]),
        aging_seconds=rng.choice([0.05, 30.0]),
        max_bypass_count=rng.randint(0, 3),
    )


def _arrive(rng: random.Random, rig: EngineRig, request_id: str) -> None:
    tenant = rng.choice(["a", "b", "c"])
    request = make_request(
        request_id,
        prompt(rng.randint(1, 40), seed=rng.randint(0, 2), vocab_size=_VOCAB_SIZE),
        sampling=SamplingParams(
            max_tokens=rng.randint(1, 24), seed=0, prompt_logprob_count=rng.choice([None, None, None, 0])
        ),
        n=rng.choice([1, 1, 1, 2, 3]),
        tenant=tenant,
        weight=rng.choice([1.0, 1.0, 3.0]),
        priority_class=rng.choice(list(PriorityClass)),
        cache_salt=tenant.encode() if rng.random() < 0.7 else b"",
        deadline=rig.now + rng.random() if rng.random() < 0.1 else None,
    )
    try:
        rig.add(request)
    except NeverFitsError:
        return


def _step(rig: EngineRig, *, seconds: float) -> Iterator[str]:
    known = len(rig.runner.decisions)
    outputs = rig.step(seconds=seconds)
    for decision in rig.runner.decisions[known:]:
        yield _decision_line(decision)
    yield " ".join(_output_line(each) for each in outputs)


def _decision_line(decision: SchedulerOutput) -> str:
    new = [
        (str(each.key), each.prompt_token_ids.tolist(), each.output_token_ids.tolist())
        for each in decision.new_requests
    ]
    rows = [
        (str(row.key), row.start, row.token_ids.tolist(), list(row.block_table), row.samples, row.draft_count)
        for row in decision.scheduled
    ]
    released = [str(key) for key in decision.released]
    return repr((decision.step, new, rows, released, list(decision.block_copies)))


def _output_line(output: EngineOutput) -> str:
    finish = output.finish_reason.value if output.finish_reason is not None else ""
    return repr(
        (str(output.key), output.first_index, output.token_ids, output.started, output.cached_token_count, finish)
    )


if __name__ == "__main__":
    RECORD.write_text(json.dumps({str(seed): digest_of_life(seed) for seed in SEEDS}, indent=1) + "\n")
