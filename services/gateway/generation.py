"""The seam inside the gateway: the front (HTTP, gRPC, text) asks for a generation, the back runs it.

Owns only values and protocols. The front never touches Redis or workers; the back never sees text.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2

from services.common.admission_types import KeyRecord, Pool
from services.common.routes import Target
from services.gateway.chat_template import ChatTemplate
from services.gateway.reasoning import ReasoningMarkers
from services.gateway.tokenizer import Tokenizer
from services.gateway.tools import NO_TOOLS, ToolRules


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """One version of a model that some worker serves now."""

    pool: Pool
    card: worker_service_pb2.ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    reasoning: ReasoningMarkers | None = None


def _any_version(_: Target) -> bool:
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class RouteAsk:
    """Who asks for a model: one `key` (a session, else a request's id) gets one version; None asks for the usual one.

    `allowed` says which versions the caller may use.
    """

    tenant: str = ""
    key: str | None = None
    allowed: Callable[[Target], bool] = _any_version


ANYBODY = RouteAsk()


class WorkClass(NamedTuple):
    """What pool rules tell requests apart by, besides model and tenant."""

    priority: common_pb2.PriorityClass.ValueType
    length: common_pb2.LengthClass.ValueType


@dataclasses.dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request past the one validator: complete, inside every limit, tokenised.

    `prompt_token_ids` are unsigned 32-bit; `timeout_s` is the time until the deadline, from now. `reasoning` is set
    where reasoning is told apart from the answer, `starts_in_reasoning` where the prompt itself opened it.

    `route` is the name whose version was chosen for the client, empty where the client named the version. `again`
    validates the same draft by the routes as they are then; its errors are those of the validator.
    """

    model: ServedModel
    prompt_token_ids: array[int]
    sampling: common_pb2.SamplingParams
    stop: tuple[str, ...]
    priority_class: common_pb2.PriorityClass.ValueType
    resume_policy: common_pb2.ResumePolicy.ValueType
    timeout_s: float
    user: str = ""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    echo: bool = False
    tools: ToolRules = NO_TOOLS
    reasoning: ReasoningMarkers | None = None
    starts_in_reasoning: bool = False
    request_id: str = ""
    route: str = ""
    again: Callable[[], Awaitable[ValidRequest]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one choice, in order, without gaps; `finish_reason` on the last event of the choice.

    `first_index` is the index of token_ids[0] in the choice. `prompt_logprobs` comes once, on an event of choice 0.
    """

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[common_pb2.PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[common_pb2.PositionLogprobs, ...] = ()
    finish_reason: common_pb2.FinishReason.ValueType | None = None
    stop_token_id: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLimits:
    """What bounds one request. `budget_tokens` is the first lease of completion tokens, None without a budget."""

    choice_count: int
    max_token_count: int
    deadline: float
    resumes: bool = True
    budget_tokens: int | None = None
    unread_bytes: int = 4_194_304


class Generation(Protocol):
    """One running request. Exactly one `finish` ends it; leaving it unfinished is a defect."""

    @property
    def request_id(self) -> str: ...

    @property
    def request(self) -> ValidRequest:
        """The request as it runs: until its first event another version may take it, with tokens of its own."""
        ...

    @property
    def queue_position(self) -> int:
        """Position at admission, 0 = next."""
        ...

    @property
    def cached_token_count(self) -> int:
        """Prompt tokens that came from the prefix cache; known once prefill started."""
        ...

    @property
    def embedding(self) -> bytes:
        """Little-endian float32 of a request for an embedding, once its events have ended; else empty."""
        ...

    @property
    def done(self) -> bool:
        """Every choice was told its end."""
        ...

    def pull(self) -> TokenEvent | None:
        """The next event that is there, None for nothing yet, or no more.

        Raises MillraceError when the request failed (DeadlineExceeded, WorkerLost, EngineError, Cancelled by id …) and
        what came before is out.
        """
        ...

    async def more(self, on_more: Callable[[], bool] | None = None) -> None:
        """Return once `pull` may have something new. Only for one who pulled all there was and is not done.

        Given `on_more`, it may be called instead where the news comes from, as often as it returns True: its False
        ends the wait. It must not raise.
        """
        ...

    def stop_choice(self, choice: int, token_count: int) -> None:
        """The front ended a choice (stop string) after its first `token_count` tokens; the worker stops it."""
        ...

    def mark_delivered(self, choice: int, token_count: int, reasoning_count: int = 0) -> None:
        """The first `token_count` tokens of a choice, so many of them reasoning, went to the client's transport."""
        ...

    async def finish(
        self,
        state: common_pb2.TerminalState.ValueType,
        finish_reason: common_pb2.FinishReason.ValueType,
        error_reason: str = "",
    ) -> common_pb2.TokenUsage:
        """End the request: cancel what still runs, outbox → finish → settle. Returns the billed usage. Idempotent."""
        ...


async def token_events(generation: Generation) -> AsyncIterator[TokenEvent]:
    """Token events of all choices until each has finished. Raises what `pull` raises."""
    while not generation.done:
        event = generation.pull()
        if event is not None:
            yield event
        elif not generation.done:
            await generation.more()


class Generator(Protocol):
    """Starts generations."""

    async def start(self, key: KeyRecord, request: ValidRequest) -> Generation:
        """Reserve and enqueue. Raises a MillraceError of limits, queue or store; nothing is then left behind."""
        ...

    async def cancel(self, key: KeyRecord, request_id: str) -> bool:
        """Cancel a request of the key's tenant, wherever it runs; False when it had ended. Raises NotFound."""
        ...


class ModelDirectory(Protocol):
    """What is served now."""

    def models(self) -> list[ServedModel]:
        """Every served version, the default version of each model first."""
        ...

    def resolve(self, name: str, ask: RouteAsk = ANYBODY) -> ServedModel:
        """`model@version`, a name with a route, or `model`. Raises ModelNotFound; NoWorker when nothing serves it."""
        ...

    def aliases(self) -> list[str]:
        """Names with a route."""
        ...

    def place(self, model: ServedModel, tenant: str, sizes: WorkClass) -> ServedModel:
        """The model in the pool that the rules name for such a request, else as it is."""
        ...


class KeyRing(Protocol):
    """Who calls."""

    async def authenticate(self, authorization: str | None, scope: str = "inference") -> KeyRecord:
        """The key behind `Bearer <secret>`. Raises Unauthenticated, PermissionDenied for a key of another scope, or
        StoreUnavailable when it cannot be known."""
        ...

    async def of_digest(self, digest: bytes) -> KeyRecord:
        """The key whose secret has this SHA-256 digest, as it is now. Raises as `authenticate`."""
        ...
