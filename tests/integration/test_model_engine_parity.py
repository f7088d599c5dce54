"""Greedy ids of the embedded model, through the real engine, are those of `transformers` in float32."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from services.worker.engine.engine import Engine
from services.worker.engine.proposer import DraftRequest
from services.worker.engine.request import RequestKey, TokenArray
from services.worker.runtime.factory import RunnerOptions, load_runner
from tests.helpers.model import ModelRig, golden_cases
from tests.helpers.transformers_model import transformers_model

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]


class GoldenProposer:
    """Proposes what the reference said: the runner still computes and judges every token itself."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenArray]:
        found = []
        for request in requests:
            case = golden_cases()[int(request.key.request_id)]
            said = len(request.token_ids) - len(case.prompt_ids)
            found.append(np.array(case.output_ids[said : said + request.max_draft_count], dtype=np.int32))
        return found

    def release(self, key: RequestKey) -> None:
        """Nothing is kept."""


def test_alone_every_prompts_ids_are_the_references() -> None:
    different = []
    for index, case in enumerate(golden_cases()):
        rig = ModelRig(num_blocks=64, proposer=GoldenProposer(), max_draft_count=15)
        rig.add(str(index), case.prompt_ids)
        rig.run()
        if tuple(rig.tokens(str(index))) != case.output_ids:
            different.append(index)
    assert len(golden_cases()) == 20
    assert not different, f"these prompts differ: {different}"


def test_in_a_mixed_batch_with_random_arrivals_and_chunks_the_ids_are_the_references() -> None:
    choice = random.Random(7)
    rig = ModelRig(num_blocks=300, max_num_seqs=20, max_num_batched_tokens=64, max_prefill_chunk=17)
    waiting = list(range(len(golden_cases())))
    choice.shuffle(waiting)

    def arrive(step: int) -> None:
        # The budget of a step changes with what else is in it, so chunks get every size up to 17.
        while waiting and (step == 0 or choice.random() < 0.4):
            index = waiting.pop()
            rig.add(str(index), golden_cases()[index].prompt_ids)
            if step == 0:
                break

    while waiting or rig.engine.has_work():
        arrive(int(rig.now * 100))
        rig.step()
    rig.engine.check_invariants()
    different = [i for i, case in enumerate(golden_cases()) if tuple(rig.tokens(str(i))) != case.output_ids]
    assert not different, f"these prompts differ: {different}"


def test_the_factorys_float32_runner_says_what_transformers_says_now() -> None:
    loaded = load_runner(RunnerOptions(dtype="float32", max_model_len=256, num_blocks=32, threads=1))
    reference = transformers_model()
    rig = ModelRig(num_blocks=32)
    rig.runner = loaded.runner
    rig.engine = Engine(loaded.runner, rig.settings)
    for index in (1, 9):
        prompt = golden_cases()[index].prompt_ids
        rig.add(str(index), prompt, max_tokens=16)
        rig.run()
        with torch.inference_mode():
            said = reference.generate(
                torch.tensor([prompt]), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None
            )
        assert rig.tokens(str(index)) == said[0, len(prompt) :].tolist()
