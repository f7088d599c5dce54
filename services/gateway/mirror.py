"""Shadow traffic: a share of a route's requests runs a second time on another version, for comparison only.

The answer of a mirrored request goes to nobody and bills nobody: it runs under an internal tenant in the class `batch`,
begins after the primary was admitted, and is left out where the gateway has enough of them. What it took and how its
answer compares travels in its usage event. Wraps the Generator; the primary's answer is only looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from millrace.common.v1 import common_pb2

from services.common.admission_types import SHADOW_TENANT, KeyRecord, QuotaLimits
from services.common.errors import Cancelled, MillraceError
from services.common.routes import RouteTable, Target
from services.gateway.admission import AdmissionGenerator
from services.gateway.answering import ending_of
from services.gateway.generation import Generation, ServedModel, TokenEvent, ValidRequest, token_events
from services.gateway.mirror_report import Kept, compare
from services.gateway.model_directory import WorkerDirectory
from services.gateway.tasks import Tasks

MAX_MIRRORED = 32
SHADOW_KEY = KeyRecord(
    key_id="shadow",
    tenant=SHADOW_TENANT,
    project="",
    models=(),
    weight=1.0,
    limits=QuotaLimits(),
    batch_only=True,
)


class MirroringGenerator:
    """The seam's Generator: starts what is asked for, and sometimes its mirror. `routes` gives the table in force."""

    def __init__(self, inner: AdmissionGenerator, directory: WorkerDirectory, routes: Callable[[], RouteTable]) -> None:
        self._inner = inner
        self._directory = directory
        self._routes = routes
        self._tasks = Tasks()

    async def start(self, key: KeyRecord, request: ValidRequest) -> Generation:
        """As the Generator that it wraps."""
        generation = await self._inner.start(key, request)
        model = self._shadow_of(request, generation.request_id)
        if model is None or len(self._tasks) >= MAX_MIRRORED:
            return generation
        primary = _Watched(generation)
        self._tasks.spawn(self._mirror(_mirrored(request, model), primary), name="mirror")
        return primary

    async def cancel(self, key: KeyRecord, request_id: str) -> bool:
        """As the Generator that it wraps."""
        return await self._inner.cancel(key, request_id)

    async def close(self) -> None:
        """Cut the mirrored requests."""
        await self._tasks.close()

    def _shadow_of(self, request: ValidRequest, request_id: str) -> ServedModel | None:
        """The version that this request is mirrored to, where one is and its tokens are the same."""
        target = self._routes().mirrored_to(request.route, request_id)
        if target is None or target not in self._directory or request.sampling.embed:
            return None
        model, card = self._directory.known(target), request.model.card
        if model is None or target == Target(card.model.model, card.model.version):
            return None
        alike = (model.card.tokenizer_digest, model.card.vocab_size) == (card.tokenizer_digest, card.vocab_size)
        fits = len(request.prompt_token_ids) + request.sampling.max_token_count <= model.card.max_model_len
        return model if alike and fits else None

    async def _mirror(self, request: ValidRequest, primary: _Watched) -> None:
        try:
            shadow = await self._inner.start(SHADOW_KEY, request)
        except MillraceError as error:
            structlog.get_logger().info("mirror_not_started", reason=error.row.reason)
            return
        kept, reason = Kept(), common_pb2.FINISH_REASON_LENGTH
        ending = ending_of(Cancelled("The mirrored request was cut."))
        try:
            async for event in token_events(shadow):
                kept.take(event)
                shadow.mark_delivered(0, kept.token_count)
                reason = event.finish_reason if event.finish_reason is not None else reason
                if primary.over.is_set() and kept.token_count >= primary.kept.token_count:
                    # Its front stopped the primary: what would follow has nothing to be compared with.
                    break
            await primary.over.wait()
            ending = common_pb2.TERMINAL_STATE_COMPLETED, reason, ""
            if request.sampling.temperature == 0:
                shadow.shadow = compare(primary.request_id, primary.kept, kept)
        except MillraceError as error:
            ending = ending_of(error)
        finally:
            await shadow.finish(*ending)


class _Watched:
    """A Generation whose answer is kept, as far as it will be compared. `over` is set once it was finished."""

    def __init__(self, inner: Generation) -> None:
        self._inner = inner
        self.kept = Kept()
        self.over = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self._inner.request_id

    @property
    def request(self) -> ValidRequest:
        """As it runs."""
        return self._inner.request

    @property
    def queue_position(self) -> int:
        """Position at admission, 0 = next."""
        return self._inner.queue_position

    @property
    def cached_token_count(self) -> int:
        """Prompt tokens from the prefix cache."""
        return self._inner.cached_token_count

    @property
    def embedding(self) -> bytes:
        """None of these is mirrored."""
        return self._inner.embedding

    @property
    def done(self) -> bool:
        """As the generation."""
        return self._inner.done

    def pull(self) -> TokenEvent | None:
        """As the generation."""
        event = self._inner.pull()
        if event is not None:
            self.kept.take(event)
        return event

    async def more(self, on_more: Callable[[], bool] | None = None) -> None:
        """As the generation."""
        await self._inner.more(on_more)

    def stop_choice(self, choice: int, token_count: int) -> None:
        """As the generation."""
        self._inner.stop_choice(choice, token_count)

    def mark_delivered(self, choice: int, token_count: int, reasoning_count: int = 0) -> None:
        """As the generation."""
        self._inner.mark_delivered(choice, token_count, reasoning_count)

    async def finish(
        self,
        state: common_pb2.TerminalState.ValueType,
        finish_reason: common_pb2.FinishReason.ValueType,
        error_reason: str = "",
    ) -> common_pb2.TokenUsage:
        """As the generation."""
        self.over.set()
        return await self._inner.finish(state, finish_reason, error_reason)


def _mirrored(request: ValidRequest, model: ServedModel) -> ValidRequest:
    """The same prompt and noise for another version: one choice, no names of the client's, nobody to resume for."""
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    sampling.choice_count = 1
    sampling.ClearField("prompt_logprob_count")
    return ValidRequest(
        model=model,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling,
        stop=(),
        priority_class=common_pb2.PRIORITY_CLASS_BATCH,
        resume_policy=common_pb2.RESUME_POLICY_FAIL,
        timeout_s=request.timeout_s,
    )
