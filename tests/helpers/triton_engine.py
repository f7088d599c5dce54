"""An engine over a tiny model on this machine's device, or in Triton's interpreter, and what it answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from services.worker.engine.engine import Engine
from services.worker.engine.engine_config import EngineConfig
from services.worker.engine.request import EngineRequest, SamplingParams
from services.worker.runtime.factory import RunnerOptions, load_runner

PLACE = "auto" if torch.cuda.is_available() else "interpreter"
PROMPT = [5, 17, 3, 44, 21, 9, 9, 30, 2, 51, 8, 13, 26, 7, 7, 12, 60, 33, 4]
GREEDY = SamplingParams(max_tokens=3, seed=1, temperature=0.0, ignore_eos=True)


def say(
    folder: Path, prompts: dict[str, list[int]], sampling: SamplingParams, **options: object
) -> dict[str, list[int]]:
    """What an engine answers to each prompt, prefilled in chunks of 7 beside the others' decodes."""
    fixed = RunnerOptions(model=str(folder), device=PLACE, num_blocks=64, threads=1, max_model_len=128, max_num_seqs=4)
    loaded = load_runner(dataclasses.replace(fixed, **options))  # type: ignore[arg-type]
    engine = Engine(loaded.runner, EngineConfig(model_version="tiny@1", max_prefill_chunk=7))
    for name, prompt in prompts.items():
        engine.add_request(EngineRequest(name, 1, np.array(prompt, dtype=np.int32), sampling), now=0.0)
    said: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work():
        for output in engine.step(0.0):
            assert output.error is None, output.error
            said[output.key.request_id].extend(output.token_ids)
    engine.check_invariants()
    return said
