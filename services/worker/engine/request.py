"""The noun of the engine: one choice of one client request, and what it may sample.

Owns the token arithmetic of a request (`num_computed_tokens` chases `num_tokens`). Never touches blocks,
tensors, clocks or the network. Called by the scheduler, the KV cache manager and the engine.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]


class PriorityClass(enum.IntEnum):
    """Order of classes inside the batch; the lower value goes first."""

    INTERACTIVE = 0
    BATCH = 1


class RequestState(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why the engine stopped a choice. Stop strings, tool calls and budgets are decided by the gateway."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


class GrammarKind(enum.Enum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """A structured-output constraint; `text` is unused for JSON_OBJECT, `choices` only for CHOICE."""

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters of one request, every default filled in.

    `temperature` 0 is greedy; `top_k` 0 and `min_p` 0 are off; `seed` is 64 bits unsigned and always set.
    `logprob_count` None means no logprobs, 0 means the sampled token's own only.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_count: int | None = None
    prompt_logprob_count: int | None = None
    grammar: Grammar | None = None


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class RequestKey:
    """Identity of one choice of one attempt inside the engine."""

    request_id: str
    choice: int
    epoch: int


def no_tokens() -> TokenArray:
    """An empty token array."""
    return np.empty(0, dtype=np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One choice to run. `output_token_ids` is what an earlier attempt already produced and the gateway received."""

    index: int
    output_token_ids: TokenArray = dataclasses.field(default_factory=no_tokens)


def fresh_choices(count: int) -> tuple[Choice, ...]:
    """Choices 0 … count - 1 that have produced nothing yet."""
    return tuple(Choice(index) for index in range(count))


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRequest:
    """One client request as the engine takes it: validated at the edge, complete, immutable.

    `choices` are the ones still to run (a resume leaves out what is finished). `cache_salt` is the server-made tenant
    salt: an empty one turns the prefix cache off for the request. `adapter_digest` names the adapter by content,
    empty for the base model. `deadline` is on the clock that `Engine.step` is given, in seconds; None never expires.
    `weight` is the tenant's share against other tenants, above 0.
    """

    request_id: str
    epoch: int
    prompt_token_ids: TokenArray
    sampling: SamplingParams
    choices: tuple[Choice, ...] = (Choice(0),)
    tenant: str = ""
    weight: float = 1.0
    priority_class: PriorityClass = PriorityClass.INTERACTIVE
    cache_salt: bytes = b""
    adapter_digest: bytes = b""
    deadline: float | None = None
