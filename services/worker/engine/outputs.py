"""The values that cross between scheduler, runner and shell: decisions and results, free of tensors.

Owns nothing, decides nothing. The scheduler makes `SchedulerOutput`, the runner answers `ModelRunnerOutput`,
the engine hands `EngineOutput` to the shell. What exists once a step or a row is a msgspec struct: built ten times as
fast as a NamedTuple, whose building took more than all the scheduling of the row, and unknown to the garbage collector
(`gc=False`: none of them can be part of a cycle).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from services.worker.engine.request import FinishReason, RequestKey, SamplingParams, TokenArray

__all__ = [
    "EngineOutput",
    "EngineStats",
    "KVEvents",
    "ModelRunnerOutput",
    "NewRequest",
    "SampledRow",
    "ScheduledRequest",
    "SchedulerOutput",
    "TierStats",
    "TokenArray",
    "TokenLogprobs",
    "TransferStats",
]


@dataclasses.dataclass(frozen=True, slots=True)
class NewRequest:
    """First sight of a choice, or its return after preemption: the runner builds sampling state from it.

    `prompt_token_ids` is the client's prompt; `output_token_ids` is what was already sampled (resume, preemption).
    """

    key: RequestKey
    prompt_token_ids: TokenArray
    output_token_ids: TokenArray
    sampling: SamplingParams


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One row of a step.

    `token_ids` (num_scheduled,) are computed at positions `start … start + len - 1`; their keys and values go to
    `block_table[position // block_size]` at `position % block_size`. The last `draft_count` of them are proposed,
    not yet accepted. `samples` is true when the row's last position is the newest known token, so the row yields
    1 … draft_count + 1 sampled tokens; a middle chunk of a prefill yields none.
    """

    key: RequestKey
    start: int
    token_ids: TokenArray
    block_table: tuple[int, ...]
    samples: bool
    draft_count: int = 0


class SchedulerOutput(msgspec.Struct, frozen=True, gc=False):
    """One step's decision.

    `decode_keys` are the keys of the first rows of `scheduled`: each computes the newest token of its choice, no other,
    and samples the next.
    `block_copies` (source, destination) are done before anything is computed (copy-on-write).
    `released` are keys whose sampling state the runner may drop, done before `new_requests` are added.
    """

    step: int
    new_requests: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    released: tuple[RequestKey, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    decode_keys: Sequence[RequestKey] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.scheduled)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Logprob (nats, from unscaled logits) of one token and its most likely alternatives, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledRow(msgspec.Struct, frozen=True, gc=False):
    """What a step gave one row, in the order of `SchedulerOutput.scheduled`.

    `token_ids` is empty when the row did not sample. `logprobs` is empty or as long as `token_ids`.
    `prompt_logprobs` entry j is of the prompt token at position start + 1 + j, as predicted at start + j, for every
    such token of the prompt that this row's chunk predicts; the prompt's first token has none.
    `error` set: this row alone failed; its choice ends with FinishReason.ERROR, the batch goes on.
    `grammar_ended` true: the grammar allows nothing more; the choice ends with STOP after these tokens.
    `embedding`, little-endian float32, takes the place of tokens where the request asked for it.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    grammar_ended: bool = False
    error: str | None = None
    embedding: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    rows: tuple[SampledRow, ...]


class EngineOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step tells the shell about one choice.

    `first_index` is the index of `token_ids[0]` among the choice's output tokens, counted from the first token of
    the first attempt. `started` is true on the first output of the choice in this attempt, when prefill began.
    """

    key: RequestKey
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    started: bool = False
    cached_token_count: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    embedding: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class TierStats:
    """Counts of both tiers; `*_total` grow for the life of the engine.

    Dropped blocks were torn, foreign, altered or unreadable: never served. Skipped ones found the disk's queue full.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    disk_on: bool = False
    spilled_block_total: int = 0
    skipped_block_total: int = 0
    dropped_block_total: int = 0
    host_hit_token_total: int = 0
    disk_hit_token_total: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class TransferStats:
    """Blocks taken over from peers. Refused ones were spoilt or others than asked for; an orphan is a report that
    nobody waited for (any more), the blocks in it are orphan blocks.
    """

    waiting_count: int = 0
    imported_block_total: int = 0
    refused_block_total: int = 0
    orphan_total: int = 0
    orphan_block_total: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts after one step. Counters (`*_total`) grow for the life of the engine; the rest are gauges.

    Blocks: free (nothing in them) + cached (hittable, taken when needed) + held = total; room is free + cached.
    `steps_without_progress`, `seconds_without_progress`: since something last advanced, 0 without work.
    `tiers` counts cached blocks beyond the pool, `transfer` those that come from peers.
    """

    step: int
    running_count: int
    waiting_count: int
    free_block_count: int
    cached_block_count: int
    held_block_count: int
    total_block_count: int
    free_slot_count: int
    backlog_token_count: int
    scheduled_token_count: int
    preemption_total: int
    prefix_query_token_total: int
    prefix_hit_token_total: int
    prefill_token_total: int
    decode_token_total: int
    draft_token_total: int = 0
    accepted_draft_token_total: int = 0
    block_copy_total: int = 0
    steps_without_progress: int = 0
    seconds_without_progress: float = 0.0
    tiers: TierStats = TierStats()
    transfer: TransferStats = TransferStats()


@dataclasses.dataclass(frozen=True, slots=True)
class KVEvents:
    """Net change of the hittable block hashes since the last call; a hash is in one of the two at most.

    `snapshot` true: events were dropped or this is the first call; `stored` is then all that is hittable now.
    """

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    snapshot: bool = False
