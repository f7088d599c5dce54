"""Embeds a batch of inputs: each is one admitted request, and all end together as the client got them, all or none.

Called by both doors. Never retries: that is the business of each request. A vector comes from one worker as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence

from millrace.common.v1 import common_pb2

from services.common.admission_types import KeyRecord
from services.common.errors import Cancelled, EngineError, InvalidRequest
from services.gateway.answering import ending_of
from services.gateway.generation import Generation, Generator, ValidRequest, token_events
from services.gateway.http_errors import as_millrace
from services.gateway.request_draft import RequestDraft, SamplingDraft, TextPrompt, TokenPrompt
from services.gateway.validation import Validator

# Inputs of one call on their way into the queue at once.
_STARTS_AT_ONCE = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Embedded:
    """One input's answer; `vector` is little-endian float32 at unit length."""

    request: ValidRequest
    request_id: str
    vector: bytes


def embedding_draft(
    model: str, prompt: TextPrompt | TokenPrompt, *, user: str, batch: bool, timeout_s: float | None
) -> RequestDraft:
    """The draft of one input. It asks for one token, the least that a queue entry can, and gets none."""
    return RequestDraft(
        model=model,
        prompt=prompt,
        sampling=SamplingDraft(temperature=0.0, seed=0, max_tokens=1, embed=True),
        user=user,
        priority_class=common_pb2.PRIORITY_CLASS_BATCH if batch else common_pb2.PRIORITY_CLASS_INTERACTIVE,
        timeout_s=timeout_s,
    )


class Embedder:
    """Runs batches."""

    def __init__(self, generator: Generator, validator: Validator) -> None:
        self._generator = generator
        self._validator = validator

    async def validate(self, key: KeyRecord, drafts: Sequence[RequestDraft]) -> list[ValidRequest]:
        """The requests of all inputs, each of them valid. Raises what validation raises."""
        most = self._validator.limits.embedding_inputs
        if not 1 <= len(drafts) <= most:
            raise InvalidRequest(f"`input` takes 1 to {most} inputs.", param="input")
        return [await self._validator.validate(key, draft) for draft in drafts]

    @contextlib.asynccontextmanager
    async def run(self, key: KeyRecord, requests: Sequence[ValidRequest]) -> AsyncIterator[list[Embedded]]:
        """The answers of all inputs, in order; they count as delivered when the block ends without an error.

        Raises what admission raises, and the first failure of an input; the others are then stopped and end as it did.
        """
        started: list[Generation] = []
        gate = asyncio.Semaphore(_STARTS_AT_ONCE)
        ending = ending_of(Cancelled("The client went away."))
        try:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._embed(key, each, started, gate)) for each in requests]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            yield [task.result() for task in tasks]
            ending = common_pb2.TERMINAL_STATE_COMPLETED, common_pb2.FINISH_REASON_STOP, ""
        except Exception as error:
            ending = ending_of(as_millrace(error))
            raise
        finally:
            await asyncio.shield(asyncio.gather(*(generation.finish(*ending) for generation in started)))

    async def _embed(
        self, key: KeyRecord, request: ValidRequest, started: list[Generation], gate: asyncio.Semaphore
    ) -> Embedded:
        async with gate:
            generation = await self._generator.start(key, request)
        started.append(generation)
        async for _ in token_events(generation):
            pass
        if not generation.embedding:
            raise EngineError("The worker ended the request without an embedding.")
        return Embedded(generation.request, generation.request_id, generation.embedding)
