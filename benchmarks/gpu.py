"""What a GPU's worker makes of its device, in four parts, each against what the device itself was measured to do.

Bandwidth of a copy and speed of a matrix product; keys and values that attention of a decode reads a second, of the
copy's bytes; arithmetic of a prefill (whole layers), of the product's; tokens a second of decoding steps, launch by
launch and as CUDA graphs. In bfloat16, and all but attention again in fp8 where the device has it. The model has random
weights in the shape of Llama 8B. Takes some minutes; prints a table and writes `benchmarks/results/gpu.json`. Without a
CUDA device it says so and measures nothing. Never run by tests but in a tiny size in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import save
from services.worker.models.decoder import DecoderTensors, LayerTensors
from services.worker.models.model_config import ModelConfig, RopeConfig
from services.worker.models.tensors import FloatArray, GGMLType, StoredTensor
from services.worker.runtime.devices import FP8_CAPABILITY
from services.worker.runtime.kv_store import KVStore
from tests.helpers.device_steps import blocks_of, step_inputs

DECODE_TARGET = 0.80
PREFILL_TARGET = 0.65
_BLOCK_SIZE = 16
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Sizes: `decodes` are (requests, context tokens), `prefills` (requests, prompt tokens), `steps` batch sizes."""

    config: ModelConfig
    copy_bytes: int
    product_width: int
    decodes: Sequence[tuple[int, int]]
    prefills: Sequence[tuple[int, int]]
    steps: Sequence[int]
    step_context: int
    repeats: int
    rounds: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the largest step."""
        sizes = [*self.decodes, *self.prefills, *((batch, self.step_context) for batch in self.steps)]
        return max(blocks_of([(0, tokens)] * requests, block_size=_BLOCK_SIZE) for requests, tokens in sizes)


def llama_8b(layers: int) -> ModelConfig:
    """Layers of Llama 3 8B under a smaller vocabulary."""
    return ModelConfig(
        family="llama",
        vocab_size=32_768,
        embedding_rows=32_768,
        hidden_size=4096,
        intermediate_size=14_336,
        layer_count=layers,
        head_count=32,
        kv_head_count=8,
        head_dim=128,
        context_length=16_384,
        norm_eps=1e-5,
        rope=RopeConfig(theta=5e5, dimension=128),
        tied_embeddings=True,
    )


def full_plan(layers: int) -> Plan:
    """For a device of 32 GB or more."""
    return Plan(
        config=llama_8b(layers),
        copy_bytes=1 << 30,
        product_width=8192,
        decodes=[(1, 16_000), (8, 8192), (64, 1024), (64, 4096), (256, 1024)],
        prefills=[(1, 2048), (1, 8192), (4, 2048)],
        steps=[1, 8, 32, 64],
        step_context=1024,
        repeats=20,
        rounds=3,
    )


def random_model(config: ModelConfig) -> DecoderTensors:
    """Small random weights; all layers share one layer's memory until they are sent to the device."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> StoredTensor:
        values = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(columns**-0.5)
        return StoredTensor("random", (rows, columns), GGMLType.F32, values.view(np.uint8).reshape(rows, -1))

    def ones() -> FloatArray:
        return np.ones(config.hidden_size, dtype=np.float32)

    hidden, wide = config.hidden_size, config.intermediate_size
    layer = LayerTensors(
        input_norm=ones(),
        post_norm=ones(),
        query=matrix(config.query_width, hidden),
        key=matrix(config.kv_width, hidden),
        value=matrix(config.kv_width, hidden),
        output=matrix(hidden, config.query_width),
        gate=matrix(wide, hidden),
        up=matrix(wide, hidden),
        down=matrix(hidden, wide),
    )
    embedding = matrix(config.embedding_rows, hidden)
    return DecoderTensors(config, embedding, (layer,) * config.layer_count, ones(), embedding)


def kv_bytes(config: ModelConfig, requests: int, context: int, value_bytes: int) -> int:
    """Bytes of keys and values that one layer's attention reads to decode a token of each request."""
    return requests * context * 2 * config.kv_width * value_bytes


def prefill_flops(config: ModelConfig, requests: int, tokens: int) -> int:
    """Multiplications and additions of all layers for whole prompts; of attention the causal half only."""
    hidden = config.hidden_size
    matrices = hidden * (2 * config.query_width + 2 * config.kv_width + 3 * config.intermediate_size)
    pairs = tokens * (tokens + 1) // 2
    return requests * config.layer_count * (2 * tokens * matrices + 4 * pairs * config.query_width)


class Bench:
    """One model and its cache on one device, in the precision "float32", "bfloat16" or "fp8"."""

    def __init__(self, plan: Plan, device: torch.device, precision: str) -> None:
        # Here and not above: they need Triton, which a machine without a device may lack.
        from services.worker.runtime.products import PlainProduct, fp8_product
        from services.worker.runtime.triton_forward import TritonForward

        self._plan = plan
        self._device = device
        self._precision = precision
        self._dtype = dtype = torch.float32 if precision == "float32" else torch.bfloat16
        config = plan.config
        self._forward = TritonForward(
            random_model(config),
            max_model_len=config.context_length,
            device=device,
            dtype=dtype,
            product=fp8_product if precision == "fp8" else PlainProduct,
        )
        self._store = KVStore(
            num_blocks=plan.num_blocks,
            layers=config.layer_count,
            kv_heads=config.kv_head_count,
            head_dim=config.head_dim,
            block_size=_BLOCK_SIZE,
            dtype=dtype,
            device=device,
        )
        self._store.data.normal_()

    def run(self) -> list[Row]:
        """Every figure, printed as it comes."""
        rows: list[Row] = []

        def add(row: Row) -> float:
            row = {"precision": self._precision, **row}
            rows.append(row)
            print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
            return float(row["per_s"])

        copy = add(self.copy())
        product = add(self.product())
        for cell in self._plan.decodes:
            add(_judged(self.attention(*cell), copy, DECODE_TARGET))
        for cell in self._plan.prefills:
            add(_judged(self.prefill(*cell), product, PREFILL_TARGET))
        for batch in self._plan.steps:
            add(self.step(batch, "launches"))
        if self._device.type == "cuda":
            self._forward.capture(self._store, max_requests=max(self._plan.steps))
            for batch in self._plan.steps:
                add(self.step(batch, "graph"))
        return rows

    def copy(self) -> Row:
        """Bytes a second read and written by a copy inside the device's memory."""
        source = torch.empty(self._plan.copy_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        seconds = self._seconds(lambda: target.copy_(source))
        return _row("copy", "bytes", 2 * self._plan.copy_bytes, seconds)

    def product(self) -> Row:
        """Multiplications and additions a second of a square matrix product."""
        width = self._plan.product_width
        left, right = (torch.randn((width, width), device=self._device, dtype=self._dtype) for _ in range(2))
        run: Callable[[], object] = functools.partial(torch.mm, left, right)
        if self._precision == "fp8":
            from services.worker.kernels.fp8_rows import quantise_rows

            (rows, row_scales), (columns, column_scales) = quantise_rows(left), quantise_rows(right)
            scales = row_scales, column_scales.t()
            run = functools.partial(torch._scaled_mm, rows, columns.t(), *scales, out_dtype=self._dtype)
        return _row("product", "flops", 2 * width**3, self._seconds(run))

    def attention(self, requests: int, context: int) -> Row:
        """One layer's attention of a decode, as the runner launches it."""
        from services.worker.kernels.paged_attention import AttentionShape, context_parts, paged_attention
        from services.worker.runtime.device_step import decode_size, pack, unpack

        config = self._plan.config
        inputs = self._inputs([(context - 1, 1)] * requests)
        size = decode_size(requests)
        step = unpack(torch.from_numpy(pack(inputs, size, _BLOCK_SIZE)).to(self._device), size)
        query = torch.randn((requests, config.head_count, config.head_dim), device=self._device).to(self._dtype)
        parts = context_parts(requests, config.kv_head_count, multiprocessors=self._forward.processors)
        shape = AttentionShape(config.head_dim**-0.5, None, parts)
        keys, values = self._store.keys(0), self._store.values(0)
        seconds = self._seconds(lambda: paged_attention(query, keys, values, step.batch, shape))
        size_bytes = kv_bytes(config, requests, context, self._dtype.itemsize)
        return _row(f"decode attention {requests}x{context}", "bytes", size_bytes, seconds)

    def prefill(self, requests: int, tokens: int) -> Row:
        """Whole prompts in one step through all layers, as the runner calls it."""
        inputs = self._inputs([(0, tokens)] * requests)
        seconds = self._seconds(lambda: self._forward.hidden(inputs, self._store))
        return _row(
            f"prefill {requests}x{tokens}", "flops", prefill_flops(self._plan.config, requests, tokens), seconds
        )

    def step(self, batch: int, how: str) -> Row:
        """A decoding step with its logits and greedy tokens brought to the host, one after the other."""
        inputs = self._inputs([(self._plan.step_context - 1, 1)] * batch)

        def decode() -> None:
            self._forward.logits(self._forward.hidden(inputs, self._store)).argmax(-1).tolist()

        return _row(f"decode step x{batch} by {how}", "tokens", batch, self._seconds(decode))

    def _inputs(self, requests: list[tuple[int, int]]) -> Any:
        return step_inputs(requests, vocab_size=self._plan.config.vocab_size, block_size=_BLOCK_SIZE)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Best mean of the rounds, each of `repeats` runs in a row, after a warm-up that compiles."""
        run()
        means = []
        for _ in range(self._plan.rounds):
            self._wait()
            start = time.perf_counter()
            for _ in range(self._plan.repeats):
                run()
            self._wait()
            means.append((time.perf_counter() - start) / self._plan.repeats)
        return min(means)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _row(what: str, unit: str, amount: int, seconds: float) -> Row:
    return {"what": what, "unit": unit, "amount": amount, "ms": round(seconds * 1e3, 4), "per_s": amount / seconds}


def _judged(row: Row, ceiling: float, target: float) -> Row:
    share = row["per_s"] / ceiling
    return row | {"share": round(share, 3), "target": target, "met": share >= target}


def main() -> None:
    """Measure, print, write; or say that there is no device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write instead of benchmarks/results/gpu.json")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model, 0.44 GB each")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was measured")
        return
    device = torch.device("cuda")
    plan = full_plan(arguments.layers)
    start = time.perf_counter()
    rows = Bench(plan, device, "bfloat16").run()
    if torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        rows += Bench(dataclasses.replace(plan, decodes=()), device, "fp8").run()
    config: Row = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    config |= {"layers": arguments.layers, "seconds": round(time.perf_counter() - start)}
    print(save("gpu", config, rows, arguments.json))


if __name__ == "__main__":
    main()
