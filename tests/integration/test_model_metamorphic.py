"""What a request says does not depend on company, chunks, preemption, cache, speculation or its siblings."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from services.worker.engine.kv_blocks import KVBlock
from services.worker.engine.proposer import NgramProposer
from services.worker.engine.request import KVRole, PriorityClass, RequestKey, SamplingParams
from tests.helpers.model import ModelRig, golden_cases, self_draft

pytestmark = [pytest.mark.model, pytest.mark.slow]
LENGTH = 16
PROMPT = golden_cases()[9].prompt_ids
LONG = golden_cases()[19].prompt_ids[:100]
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=LENGTH, seed=1, temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(
        max_tokens=LENGTH,
        seed=2**63 + 11,
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        frequency_penalty=0.2,
        repetition_penalty=1.05,
        ignore_eos=True,
    ),
}
each_sampling = pytest.mark.parametrize("name", sorted(SAMPLINGS))


@functools.cache
def alone(name: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What the request says when nothing else runs and the prompt is one chunk."""
    rig = ModelRig(num_blocks=32)
    rig.add("r", prompt, sampling=SAMPLINGS[name])
    rig.run()
    said = tuple(rig.tokens("r"))
    assert len(said) == LENGTH
    return said


def _said(rig: ModelRig, request_id: str = "r", choice: int = 0) -> tuple[int, ...]:
    return tuple(rig.tokens(request_id, choice))


@each_sampling
def test_strangers_in_the_batch_change_nothing(name: str) -> None:
    rig = ModelRig(num_blocks=128, max_num_batched_tokens=64, max_prefill_chunk=32)
    rig.add("r", LONG, sampling=SAMPLINGS[name])
    for index, case in enumerate(golden_cases()[4:9]):
        rig.add(f"s{index}", case.prompt_ids, sampling=SAMPLINGS["seeded" if index % 2 else "greedy"])
        rig.step()
        rig.step()
    rig.run()
    assert _said(rig) == alone(name, LONG)


@each_sampling
@pytest.mark.parametrize("chunk", [1, 7, 33, 1000])
def test_the_size_of_prefill_chunks_changes_nothing(name: str, chunk: int) -> None:
    prompt = PROMPT if chunk == 1 else LONG
    rig = ModelRig(num_blocks=32, max_prefill_chunk=chunk)
    rig.add("r", prompt, sampling=SAMPLINGS[name])
    rig.run()
    assert _said(rig) == alone(name, prompt)


@each_sampling
def test_three_preemptions_change_nothing(name: str) -> None:
    # One slot: each interactive request takes it from the batch request, which starts over with what it said.
    rig = ModelRig(num_blocks=32, max_num_seqs=1, max_prefill_chunk=16)
    rig.add("r", PROMPT, sampling=SAMPLINGS[name], priority_class=PriorityClass.BATCH)
    for index, goal in enumerate((1, 6, 11)):
        while RequestKey("r", 0, 1) not in rig.outputs or len(_said(rig)) < goal:
            rig.step()
        rig.add(f"urgent{index}", golden_cases()[index + 6].prompt_ids, max_tokens=2)
    rig.run()
    assert rig.engine.stats(rig.now).preemption_total == 3
    assert _said(rig) == alone(name, PROMPT)


@each_sampling
def test_a_pool_too_small_for_the_batch_changes_nothing(name: str) -> None:
    rig = ModelRig(num_blocks=9, block_size=8, max_prefill_chunk=16)
    for index in (9, 10):
        rig.add(str(index), golden_cases()[index].prompt_ids, sampling=SAMPLINGS[name])
    rig.add("third", PROMPT, sampling=SAMPLINGS[name])
    rig.run()
    assert rig.engine.stats(rig.now).preemption_total >= 1
    assert _said(rig, "third") == alone(name, PROMPT)
    for index in (9, 10):
        assert _said(rig, str(index)) == alone(name, golden_cases()[index].prompt_ids)


@each_sampling
def test_a_warm_prefix_cache_changes_nothing(name: str) -> None:
    rig = ModelRig(num_blocks=64)
    for request_id in ("cold", "warm"):
        rig.add(request_id, LONG, sampling=SAMPLINGS[name], salt=b"tenant")
        rig.run()
    assert rig.engine.stats(rig.now).prefix_hit_token_total >= 96
    assert _said(rig, "cold") == _said(rig, "warm") == alone(name, LONG)


@each_sampling
def test_speculation_changes_nothing(name: str) -> None:
    rig = ModelRig(num_blocks=32, proposer=NgramProposer(min_ngram=1), max_draft_count=4)
    rig.add("r", LONG, sampling=SAMPLINGS[name])
    rig.run()
    assert rig.engine.stats(rig.now).draft_token_total > 0
    assert _said(rig) == alone(name, LONG)


@pytest.mark.parametrize(("name", "layers"), [("greedy", 30), ("seeded", 10)])
def test_a_draft_model_changes_nothing(name: str, layers: int) -> None:
    rig = ModelRig(num_blocks=32, proposer=self_draft(layers), max_draft_count=4)
    rig.add("r", LONG, sampling=SAMPLINGS[name])
    rig.run()
    stats = rig.engine.stats(rig.now)
    assert stats.draft_token_total > 0
    if name == "greedy":
        assert stats.accepted_draft_token_total == stats.draft_token_total
    assert _said(rig) == alone(name, LONG)


@each_sampling
def test_three_choices_are_what_each_alone_would_be(name: str) -> None:
    rig = ModelRig(num_blocks=64)
    rig.add("r", LONG, sampling=SAMPLINGS[name], n=3, salt=b"tenant")
    rig.run()
    assert _said(rig) == alone(name, LONG)
    others = {_said(rig, choice=choice) for choice in (1, 2)}
    if name == "greedy":
        assert others == {alone(name, LONG)}
    else:
        assert alone(name, LONG) not in others
        assert len(others) == 2


@each_sampling
def test_prefill_in_another_engine_changes_nothing(name: str) -> None:
    prefill = ModelRig(num_blocks=16, max_prefill_chunk=40)
    decode = ModelRig(num_blocks=16)
    decode.add("r", LONG, sampling=SAMPLINGS[name], salt=b"tenant", kv_role=KVRole.IMPORT)
    decode.step()
    (asked,) = decode.engine.take_remote_prefills()
    prefill.add("r", LONG, max_tokens=1, salt=b"tenant", kv_role=KVRole.EXPORT)
    sent: list[KVBlock] = []
    while prefill.engine.has_work():
        prefill.step()
        sent += prefill.engine.exported_kv("r", 1, start=len(sent))
    assert prefill.engine.release_kv("r", 1)
    assert prefill.engine.stats(prefill.now).held_block_count == 0
    assert asked.full_hashes == tuple(block.full_hash for block in sent)

    decode.engine.kv_received("r", 1, sent)
    decode.run()

    stats = decode.engine.stats(decode.now)
    assert (stats.transfer.imported_block_total, stats.prefill_token_total, stats.held_block_count) == (6, 4, 0)
    assert _said(decode) == alone(name, LONG)


def _blocks(rig: ModelRig, table: Sequence[int]) -> list[bytes]:
    return [rig.runner.export_block(block) for block in table]


def test_exported_blocks_read_the_same_in_another_store() -> None:
    rig = ModelRig(num_blocks=16)
    rig.add("r", PROMPT, sampling=SAMPLINGS["greedy"])
    rig.run()
    other = ModelRig(num_blocks=16)
    payloads = _blocks(rig, range(16))
    assert any(any(payload) for payload in payloads)
    for block, payload in enumerate(payloads):
        other.runner.import_block(15 - block, payload)
    assert _blocks(other, range(15, -1, -1)) == payloads
    with pytest.raises(ValueError, match="a block is"):
        other.runner.import_block(0, payloads[0][:-1])
