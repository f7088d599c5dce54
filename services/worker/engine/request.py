"""The noun of the engine: one choice of one client request, and what it may sample.

Owns the token arithmetic of a request (`num_computed_tokens` chases `num_tokens`). Never touches blocks,
tensors, clocks or the network. Called by the scheduler, the KV cache manager and the engine.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from array import array

import msgspec
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


class KVRole(enum.Enum):
    """Which part of a request this engine computes.

    IMPORT: a peer prefills and its blocks are taken over. EXPORT: the prompt's blocks are kept for a peer. Both need
    a tenant salt, since blocks are named by their hash.
    """

    LOCAL = "local"
    IMPORT = "import"
    EXPORT = "export"


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
    """A structured-output constraint; `text` is unused for JSON_OBJECT, `choices` only for CHOICE.

    `compiled` is what the runner runs, made before the engine gets the request: opaque here, and kept as long as it.
    """

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()
    compiled: object | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters of one request, every default filled in.

    `temperature` 0 is greedy; `top_k` 0 and `min_p` 0 are off; `seed` is 64 bits unsigned and always set.
    `logprob_count` None means no logprobs, 0 means the sampled token's own only.
    `embed`: nothing is sampled; the choice ends with the pooled hidden states of its prompt.
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
    embed: bool = False


class RequestKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """Identity of one choice of one attempt inside the engine; looked up for each row of a step."""

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
    kv_role: KVRole = KVRole.LOCAL


class RequestGroup:
    """What the choices of one client request share: the source, the hash chain's root and what the cache gave.

    `root` is None when the prefix cache is off for the request. `cached_token_count` is set by the choice that is
    admitted first, so that the prompt counts as cached once and for all choices alike.
    """

    __slots__ = ("cached_token_count", "members", "root", "source")

    def __init__(self, source: EngineRequest, *, root: bytes | None) -> None:
        self.source = source
        self.root = root
        self.members: list[Request] = []
        self.cached_token_count: int | None = None


class Request:
    """One choice inside the engine: known tokens, how many of them are computed, and the blocks that hold them.

    ruler:  0 … num_computed_tokens … num_tokens      (prompt, then outputs; append-only, so hashes never go stale)
    The two differ by `num_pending_tokens`: one while decoding, the newest token, known and not yet computed. So a step
    that computes it and samples the next one changes `output_token_ids` and nothing else.
    """

    __slots__ = (
        "_prompt_token_ids",
        "arrival",
        "block_hashes",
        "blocks",
        "bypass_count",
        "decodes_until",
        "fits_outputs",
        "full_at",
        "group",
        "key",
        "max_num_tokens",
        "num_charged_tokens",
        "num_pending_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_published_blocks",
        "output_token_ids",
        "priority_class",
        "sampling",
        "sequence",
        "started",
        "state",
        "stop_ids",
        "tenant",
        "waits_for",
        "wants_remote_kv",
        "weight",
    )

    def __init__(
        self, group: RequestGroup, choice: Choice, *, sequence: int, arrival: float, eos_token_ids: frozenset[int]
    ) -> None:
        source = group.source
        self.arrival = arrival
        self.group = group
        self.key = RequestKey(source.request_id, choice.index, source.epoch)
        # Interned: the counts of a tenant are looked up each step and request, by identity then.
        self.tenant = sys.intern(source.tenant)
        self.weight = source.weight
        self.priority_class = source.priority_class
        self.sequence = sequence
        first = source.choices[0].index == choice.index
        self.sampling = source.sampling if first else dataclasses.replace(source.sampling, prompt_logprob_count=None)
        stop_ids = frozenset(self.sampling.stop_token_ids)
        self.stop_ids = stop_ids if self.sampling.ignore_eos else stop_ids | eos_token_ids
        self._prompt_token_ids = np.asarray(source.prompt_token_ids, dtype=np.int32)
        self.num_prompt_tokens = len(self._prompt_token_ids)
        self.output_token_ids = array("i", choice.output_token_ids.tolist())
        # Prompt and output together when the choice ends by length.
        self.max_num_tokens = self.num_prompt_tokens + self.sampling.max_tokens
        self.num_pending_tokens = self.num_tokens
        # With fewer output tokens one more is neither the first nor the last: 0 unless it is in the middle of decoding.
        self.decodes_until = 0
        self.state = RequestState.WAITING
        self.started = False
        # Prompt tokens whose computing the tenant has been charged for: a recompute is not its fault.
        self.num_charged_tokens = 0
        self.num_prompt_logprobs = 0
        self.bypass_count = 0
        self.waits_for: bytes | None = None
        self.wants_remote_kv = first and source.kv_role is KVRole.IMPORT
        self.blocks: tuple[int, ...] = ()
        self.block_hashes: list[bytes] = []
        self.num_published_blocks = 0
        # In output tokens, so negative inside the prompt: how many the blocks hold, how many computed fill the next.
        self.fits_outputs = self.full_at = -self.num_prompt_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Order in the batch: class, then age. The largest is preempted first."""
        return (self.priority_class, self.sequence)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Known tokens whose keys and values lie in the blocks."""
        return self.num_prompt_tokens + len(self.output_token_ids) - self.num_pending_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        self.num_pending_tokens = self.num_tokens - count

    @property
    def needs_whole_prompt(self) -> bool:
        """True when every prompt token must be computed: for an embedding, or prompt logprobs not all handed out."""
        wants = self.sampling.prompt_logprob_count is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1
        return wants or self.sampling.embed

    def tokens(self, start: int, end: int) -> TokenArray:
        """Known tokens at positions start … end - 1, which later tokens do not change."""
        prompt_length = self.num_prompt_tokens
        if end <= prompt_length:
            return self._prompt_token_ids[start:end]
        outputs = np.frombuffer(self.output_token_ids[max(0, start - prompt_length) : end - prompt_length], np.int32)
        return outputs if start >= prompt_length else np.concatenate((self._prompt_token_ids[start:], outputs))

    def packed(self, start: int, end: int) -> bytes:
        """The same tokens as `block_hash` takes them."""
        if start < self.num_prompt_tokens or sys.byteorder == "big":
            return self.tokens(start, end).astype("<u4").tobytes()
        return self.output_token_ids[start - self.num_prompt_tokens : end - self.num_prompt_tokens].tobytes()

    @property
    def newest_token_id(self) -> int:
        """The newest known token."""
        return self.output_token_ids[-1] if self.output_token_ids else int(self._prompt_token_ids[-1])

    def append(self, token_id: int) -> None:
        """Add one output token, not yet computed."""
        self.output_token_ids.append(token_id)
        self.num_pending_tokens += 1

    def note_decoding(self) -> None:
        """A step of this request was accounted: see whether the next one only adds a token."""
        decodes = self.started and self.num_pending_tokens == 1 and len(self.output_token_ids) > 0
        self.decodes_until = self.sampling.max_tokens - 1 if decodes else 0

    def check_invariants(self) -> None:
        """Raise AssertionError when what is known, computed and expected of the next step disagree."""
        assert 0 <= self.num_computed_tokens < self.num_tokens, f"{self} has nothing left to compute"
        if self.decodes_until:
            goes_on = self.state is RequestState.RUNNING and self.started and self.num_output_tokens > 0
            assert goes_on, f"{self} is not in the middle of its output"
            assert self.num_pending_tokens == 1, f"{self} does not decode"

    def __repr__(self) -> str:
        progress = f"{self.num_computed_tokens}/{self.num_tokens}"
        return f"Request({self.key.request_id}#{self.key.choice} {self.state.value} {progress})"
