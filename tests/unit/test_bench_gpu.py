"""The GPU's benchmark in a tiny size, in Triton's interpreter or on a device: every part runs and counts right."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.gpu import Bench, Plan, kv_bytes, llama_8b, prefill_flops
from services.worker.models.model_config import RopeConfig
from tests.helpers.paged import DEVICE, has_fp8

TINY = dataclasses.replace(
    llama_8b(layers=1),
    vocab_size=64,
    embedding_rows=64,
    hidden_size=32,
    intermediate_size=48,
    head_count=2,
    kv_head_count=1,
    head_dim=16,
    context_length=64,
    rope=RopeConfig(theta=1e4, dimension=16),
)


@pytest.mark.parametrize(
    ("precision", "value_bytes"), [("float32", 4), pytest.param("fp8", 2, marks=[has_fp8, pytest.mark.fault])]
)
def test_every_part_is_measured(precision: str, value_bytes: int) -> None:
    plan = Plan(
        TINY,
        copy_bytes=64,
        product_width=16,
        decodes=[(1, 3)],
        prefills=[(1, 3)],
        steps=[1],
        step_context=3,
        repeats=1,
        rounds=1,
    )

    rows = Bench(plan, DEVICE, precision).run()

    amounts = {row["what"]: row["amount"] for row in rows if "graph" not in row["what"]}
    assert amounts == {
        "copy": 128,
        "product": 8192,
        "decode attention 1x3": 3 * 2 * 16 * value_bytes,
        "prefill 1x3": 2 * 3 * 32 * (2 * 32 + 2 * 16 + 3 * 48) + 4 * 6 * 32,
        "decode step x1 by launches": 1,
    }
    judged = {row["what"]: row["target"] for row in rows if "share" in row}
    assert judged == {"decode attention 1x3": 0.80, "prefill 1x3": 0.65}


def test_layers_of_llama_8b_are_counted_as_their_paper_says() -> None:
    config = llama_8b(layers=32)

    assert kv_bytes(config, requests=1, context=1000, value_bytes=2) * config.layer_count == 131_072_000
    layers = config.parameter_count - config.embedding_rows * config.hidden_size
    assert abs(prefill_flops(config, requests=1, tokens=1) / 2 / layers - 1) < 1e-3
