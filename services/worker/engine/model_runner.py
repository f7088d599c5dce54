"""What the engine asks of whatever computes: one call a step.

Implemented by `FakeModelRunner` (echo) and `runtime.TorchModelRunner`. Called by the engine only, on its thread.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from services.worker.engine.kv_blocks import KVLayout
from services.worker.engine.outputs import ModelRunnerOutput, SchedulerOutput


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a runner can hold, in tokens and blocks.

    `eos_token_ids` end a choice unless `ignore_eos`; `vocab_size` counts real tokens, padded rows excluded.
    `deterministic`: same tokens in any batch, chunking or resume.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: frozenset[int]
    deterministic: bool


class ModelRunner(Protocol):
    """Computes one step. Blocks until its results are on the host. Not thread-safe."""

    @property
    def spec(self) -> RunnerSpec: ...

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; rows answer `scheduler_output.scheduled` in order.

        Raises RuntimeError only for faults of the device as a whole; the fault of one row is that row's `error`.
        """
        ...

    @property
    def kv_layout(self) -> KVLayout:
        """What the bytes of a block mean."""
        ...

    def export_block(self, block: int) -> bytes:
        """A copy of the block's keys and values, `kv_layout.block_bytes` long. Between steps only."""
        ...

    def import_block(self, block: int, payload: bytes) -> None:
        """Overwrite a block between steps. Raises ValueError unless `payload` is exactly one block."""
        ...

    def check_invariants(self) -> None:
        """Raise AssertionError when the runner holds state for requests that are gone."""
        ...
