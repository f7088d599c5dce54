"""How the memory of a worker is divided: weights, activations, KV blocks; and what then fits.

Pure arithmetic plus one read of what the machine (or its cgroup) has free. Refuses with numbers. Called by the factory.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from services.worker.models.errors import ModelLoadError
from services.worker.models.model_config import ModelConfig

MIB = 1 << 20
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


class MemoryBudgetError(ModelLoadError):
    """The model, or the context asked for, does not fit; the message carries the numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class BudgetRequest:
    """What was asked. `max_model_len` None takes the longest that fits; `num_blocks` None fills the memory."""

    config: ModelConfig
    weight_bytes: int
    kv_value_bytes: int
    block_size: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    available_bytes: int
    num_blocks: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The division, in bytes and tokens."""

    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    available_bytes: int

    @property
    def kv_token_count(self) -> int:
        return self.num_blocks * self.block_size

    def text(self) -> str:
        """For the operator at start-up; one line a part."""
        return "\n".join(
            (
                f"memory free      {self.available_bytes / MIB:10,.0f} MiB",
                f"weights          {self.weight_bytes / MIB:10,.0f} MiB",
                f"activations      {self.activation_bytes / MIB:10,.0f} MiB",
                f"KV cache         {self.kv_bytes / MIB:10,.0f} MiB in {self.num_blocks:,} blocks of {self.block_size}",
                f"KV tokens        {self.kv_token_count:10,}",
                f"longest sequence {self.max_model_len:10,} tokens",
            )
        )


def plan_memory(asked: BudgetRequest) -> MemoryBudget:
    """Divide the memory; raises MemoryBudgetError when the weights or the context asked for cannot fit."""
    config = asked.config
    activations = _activation_bytes(asked)
    block_bytes = config.kv_values_per_token * asked.block_size * asked.kv_value_bytes
    usable = int(asked.available_bytes * asked.gpu_memory_utilization)
    room = usable - asked.weight_bytes - activations
    length = config.context_length if asked.max_model_len is None else asked.max_model_len
    if length > config.context_length:
        raise MemoryBudgetError(
            f"max_model_len {length:,} is longer than the {config.context_length:,} tokens the model was trained for"
        )
    useful = asked.max_num_seqs * math.ceil(length / asked.block_size)
    num_blocks = min(room // block_bytes, useful) if asked.num_blocks is None else asked.num_blocks
    if num_blocks < 1 or num_blocks * block_bytes > room:
        raise MemoryBudgetError(
            f"{max(num_blocks, 1):,} KV blocks need {max(num_blocks, 1) * block_bytes / MIB:,.0f} MiB, but of "
            f"{usable / MIB:,.0f} MiB usable the weights take {asked.weight_bytes / MIB:,.0f} MiB and the "
            f"activations {activations / MIB:,.0f} MiB"
        )
    fits = num_blocks * asked.block_size
    if asked.max_model_len is not None and length > fits:
        raise MemoryBudgetError(
            f"max_model_len {length:,} needs {math.ceil(length / asked.block_size):,} KV blocks of {block_bytes:,} "
            f"bytes, but only {num_blocks:,} fit ({fits:,} tokens)"
        )
    kv_bytes = num_blocks * block_bytes
    longest = min(length, fits)
    return MemoryBudget(
        asked.weight_bytes, activations, kv_bytes, num_blocks, asked.block_size, longest, asked.available_bytes
    )


def available_memory() -> int:
    """Bytes this process may still take: what the machine has free, or its cgroup allows. Reads /proc and /sys."""
    free = _machine_free()
    for limit_path, used_path in _CGROUPS:
        limit, used = _number(limit_path), _number(used_path)
        if limit is not None and used is not None:
            free = min(free, max(limit - used, 0))
    return free


def _activation_bytes(asked: BudgetRequest) -> int:
    config = asked.config
    widths = config.query_width + 2 * config.kv_width + 4 * config.hidden_size + 3 * config.intermediate_size
    logits = min(64, asked.max_num_seqs) * config.embedding_rows
    return 4 * (asked.max_num_batched_tokens * widths + 2 * logits)


def _machine_free() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MemoryBudgetError("the system does not say how much memory is free")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
