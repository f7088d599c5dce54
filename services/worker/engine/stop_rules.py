"""What a step's answer means for one choice: tokens kept, why it ends, what the shell is told.

Owns the stop rules: end-of-sequence and stop ids (the id is kept, as the last token, and counts), `min_tokens`,
`max_tokens`, the end of a grammar, the fault of one row. Never touches blocks. Called by the scheduler only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.worker.engine.outputs import EngineOutput, SampledRow, ScheduledRequest, TokenArray, TokenLogprobs
from services.worker.engine.request import FinishReason, Request, RequestKey


def finish_of(request: Request, token_id: int) -> FinishReason | None:
    """Why the choice ends with its newest token, `token_id`; None when it goes on.

    No id ends a choice among its first `min_tokens` tokens.
    """
    count = request.num_output_tokens
    if token_id in request.stop_ids and count > request.sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if count >= request.sampling.max_tokens else None


def fault_of(row: ScheduledRequest, sampled: SampledRow) -> str | None:
    """The row's own fault, or that the runner's answer cannot be right."""
    if sampled.error is not None:
        return sampled.error
    count = len(sampled.token_ids)
    if not row.samples:
        return "the runner sampled a row that does not sample" if count else None
    if count == 0 and not sampled.grammar_ended and not sampled.embedding:
        return "the runner gave no token"
    return "the runner gave more tokens than were asked for" if count > row.draft_count + 1 else None


def apply_decodes(
    requests: Sequence[Request], answers: Sequence[SampledRow], *, drafts: Mapping[RequestKey, TokenArray]
) -> tuple[list[EngineOutput | None], list[int]]:
    """`apply` for the plain rows of a step: one token for one token, in the middle of an output.

    Exists for its speed: most rows of most steps are this. `drafts` are those that the step verified. Returns an output
    a row, None for those left to `apply`, which are unchanged, and the indices of the rows to look at again: these, and
    those that filled a block. Raises ValueError unless there is one answer a request.
    """
    outputs: list[EngineOutput | None] = []
    again: list[int] = []
    for request, sampled in zip(requests, answers, strict=True):
        token_ids, known = sampled.token_ids, request.output_token_ids
        count = len(known)
        if (
            count >= request.decodes_until
            or len(token_ids) != 1
            or token_ids[0] in request.stop_ids
            or (drafts and request.key in drafts)
            or sampled.error is not None
            or sampled.grammar_ended
            or sampled.prompt_logprobs
        ):
            again.append(len(outputs))
            outputs.append(None)
            continue
        known.append(token_ids[0])
        if count >= request.full_at:
            again.append(len(outputs))
        outputs.append(EngineOutput(request.key, count, token_ids, sampled.logprobs))
    return outputs, again


def apply(request: Request, row: ScheduledRequest, sampled: SampledRow) -> EngineOutput | None:
    """Advance `request` by one computed row and say what the shell must know; None when that is nothing.

    Computed tokens grow by the row less its rejected drafts, so a rejected draft's slot is computed again.
    """
    fault = fault_of(row, sampled)
    if fault is not None:
        return ended(request, FinishReason.ERROR, error=fault)
    first_index = request.num_output_tokens
    request.num_computed_tokens = row.start + len(row.token_ids) - row.draft_count
    kept = 0
    finish: FinishReason | None = None
    for token_id in sampled.token_ids:
        request.append(token_id)
        kept += 1
        finish = finish_of(request, token_id)
        if finish is not None:
            break
    request.num_computed_tokens += max(0, kept - 1)
    complete = sampled.grammar_ended and kept == len(sampled.token_ids)
    if complete or (sampled.embedding and finish is None):
        # What a grammar completes at the very last token was not cut.
        finish = FinishReason.STOP
    prompt_logprobs = _fresh_prompt_logprobs(request, row, sampled) if sampled.prompt_logprobs else ()
    started = not request.started
    request.started = True
    if not kept and finish is None and not started and not prompt_logprobs:
        return None
    return EngineOutput(
        key=request.key,
        first_index=first_index,
        token_ids=sampled.token_ids[:kept],
        logprobs=sampled.logprobs[:kept],
        prompt_logprobs=prompt_logprobs,
        started=started,
        cached_token_count=request.group.cached_token_count or 0,
        finish_reason=finish,
        stop_token_id=_stop_token(request, finish),
        embedding=sampled.embedding,
    )


def ended(request: Request, reason: FinishReason, *, error: str | None = None) -> EngineOutput:
    """The last output of a choice that ends without a token of this step."""
    return EngineOutput(
        key=request.key,
        first_index=request.num_output_tokens,
        cached_token_count=request.group.cached_token_count or 0,
        finish_reason=reason,
        stop_token_id=_stop_token(request, reason),
        error=error,
    )


def already_ended(request: Request) -> FinishReason | None:
    """Why a resumed choice has nothing left to do: what it received was complete."""
    if not request.num_output_tokens:
        return None
    return finish_of(request, request.newest_token_id)


def _stop_token(request: Request, finish: FinishReason | None) -> int | None:
    if finish is not FinishReason.STOP or not request.num_output_tokens:
        return None
    newest = request.newest_token_id
    return newest if newest in request.stop_ids else None


def _fresh_prompt_logprobs(request: Request, row: ScheduledRequest, sampled: SampledRow) -> tuple[TokenLogprobs, ...]:
    """Those not handed out before a preemption; the row's entries are of prompt tokens start + 1 and on."""
    known = max(0, request.num_prompt_logprobs - row.start)
    fresh = sampled.prompt_logprobs[known:]
    request.num_prompt_logprobs += len(fresh)
    return fresh
