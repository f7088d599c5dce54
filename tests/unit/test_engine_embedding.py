"""Embeddings in the engine and on the worker's stream: one vector, no token, the whole prompt computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.common.v1 import common_pb2

from services.worker.engine.fake_model_runner import echo_embedding
from services.worker.engine.outputs import EngineOutput
from services.worker.engine.proposer import NgramProposer
from services.worker.engine.request import FinishReason, PriorityClass, RequestKey, SamplingParams
from services.worker.runtime.pooling import MeanPool
from services.worker.wire import WireError, sampling_params
from tests.helpers.engine import EngineRig, assert_engine_empty, make_request, make_spec, prompt
from tests.helpers.worker import entry, running_worker

EMBED = SamplingParams(max_tokens=1, seed=0, embed=True)


def only_output(rig: EngineRig, request_id: str) -> EngineOutput:
    """The output that ended a request, which brought no token."""
    outputs = rig.outputs[RequestKey(request_id, 0, 1)]
    assert all(not output.token_ids for output in outputs)
    assert [output.embedding for output in outputs[:-1]] == [b""] * (len(outputs) - 1)
    return outputs[-1]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 100])
def test_a_prompt_in_any_number_of_chunks_ends_with_its_vector_and_no_token(length: int) -> None:
    rig = EngineRig()
    rig.add(make_request("e", prompt(length), sampling=EMBED))

    rig.run()

    output = only_output(rig, "e")
    assert (output.finish_reason, output.stop_token_id) == (FinishReason.STOP, None)
    assert output.embedding == echo_embedding(prompt(length).tolist())
    assert np.linalg.norm(np.frombuffer(output.embedding, dtype="<f4")) == pytest.approx(1.0, abs=1e-6)
    assert rig.computed_tokens("e") == length
    assert_engine_empty(rig)


def test_an_embedding_never_uses_the_cache_and_fills_it() -> None:
    rig = EngineRig()
    for request_id in ("warm", "embed"):
        rig.add(make_request(request_id, prompt(33), sampling=EMBED if request_id == "embed" else None))
        rig.run()
    rig.add(make_request("again", prompt(33), sampling=EMBED))
    rig.add(make_request("text", prompt(33)))
    rig.run()

    assert rig.computed_tokens("embed") == rig.computed_tokens("again") == 33
    assert only_output(rig, "embed").cached_token_count == 0
    assert rig.outputs[RequestKey("text", 0, 1)][0].cached_token_count == 32
    assert_engine_empty(rig)


def test_a_preempted_embedding_starts_over_and_says_the_same() -> None:
    rig = EngineRig(max_num_seqs=1, max_num_batched_tokens=16, max_prefill_chunk=8)
    rig.add(make_request("e", prompt(40), sampling=EMBED, priority_class=PriorityClass.BATCH))
    rig.step(2)
    rig.add(make_request("urgent", prompt(8, seed=1), max_tokens=2))

    rig.run()

    assert rig.engine.stats(rig.now).preemption_total == 1
    assert only_output(rig, "e").embedding == echo_embedding(prompt(40).tolist())
    assert_engine_empty(rig)


def test_a_last_chunk_of_one_token_is_no_decode_that_could_be_speculated() -> None:
    rig = EngineRig(spec=make_spec(block_size=4), proposer=NgramProposer(min_ngram=1), max_draft_count=4)
    rig.add(make_request("e", np.array([7] * 17, dtype=np.int32), sampling=EMBED))

    rig.run()

    assert rig.scheduled_tokens("e")[:2] == [16, 1]
    assert only_output(rig, "e").embedding == echo_embedding([7] * 17)


@given(cuts=st.lists(st.integers(1, 40), max_size=8), seed=st.integers(0, 1_000))
def test_pooling_gives_the_same_bits_however_the_prompt_is_cut(cuts: list[int], seed: int) -> None:
    hidden = np.random.default_rng(seed).normal(0, 9, (40, 24)).astype(np.float32)
    whole, parts = MeanPool(), MeanPool()

    whole.add(hidden)
    for part in np.split(hidden, sorted({cut for cut in cuts if cut < 40})):
        parts.add(part)

    assert whole.unit_vector() == parts.unit_vector()
    mean = hidden.astype(np.float64).mean(axis=0)
    expected = mean / np.linalg.norm(mean)
    np.testing.assert_allclose(np.frombuffer(whole.unit_vector(), dtype="<f4"), expected, atol=1e-6)


def test_a_mean_of_nothing_stays_nothing() -> None:
    pool = MeanPool()
    with pytest.raises(ValueError, match="nothing"):
        pool.unit_vector()

    pool.add(np.zeros((3, 4), dtype=np.float32))

    assert pool.unit_vector() == bytes(16)


@pytest.mark.parametrize("field", ["choice_count", "max_token_count"])
def test_an_entry_that_asks_for_tokens_too_is_refused(field: str) -> None:
    message = common_pb2.SamplingParams(
        temperature=0, top_p=1, choice_count=1, max_token_count=1, repetition_penalty=1, embed=True
    )
    assert sampling_params(message, vocab_size=9).embed

    setattr(message, field, 2)

    with pytest.raises(WireError, match="embed"):
        sampling_params(message, vocab_size=9)


async def test_the_vector_goes_to_the_gateway_before_the_finish_and_again_after_a_break() -> None:
    async with running_worker() as rig:
        gateway = await rig.gateway()
        await rig.until(lambda: rig.app.parts.table.is_attached("gateway-1"))
        gateway.acking = False

        assert (await gateway.submit(entry("e", prompt=(5, 6, 7), max_tokens=1, embed=True))).accepted
        await gateway.finished("e")
        first = [event.WhichOneof("event") for frame in gateway.frames for event in frame.events]
        await gateway.hang_up()
        gateway.frames.clear()
        gateway.of("e").finishes.clear()
        gateway.acking = True
        await gateway.attach(continued=["e"])
        await gateway.finished("e")
        again = [event for frame in gateway.frames for event in frame.events]

        assert first == ["accepted", "started", "embedding", "delta"]
        assert [event.embedding.vector for event in again if event.WhichOneof("event") == "embedding"] == [
            echo_embedding([5, 6, 7])
        ]
        assert gateway.of("e").tokens == {0: []}
        assert gateway.of("e").problems == []
        await rig.until(lambda: len(rig.app.parts.table) == 0)
        await gateway.close()
    rig.assert_engine_empty()
