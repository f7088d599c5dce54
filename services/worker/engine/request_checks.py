"""Refusals at the door of the engine: what is malformed, and what could never run to its end.

Pure checks, no state. Called by the engine before a request changes anything.
"""

from __future__ import annotations

import math

from services.worker.engine.engine_config import InvalidRequestError, NeverFitsError
from services.worker.engine.model_runner import RunnerSpec
from services.worker.engine.request import EngineRequest, TokenArray

_MAX_SEED = 2**64 - 1


def check_request(request: EngineRequest, spec: RunnerSpec) -> None:
    """Raise InvalidRequestError naming the field that breaks a rule. Sampling ranges are the edge's business."""
    sampling = request.sampling
    indices = [choice.index for choice in request.choices]
    rules = {
        "request_id must not be empty": bool(request.request_id),
        "prompt_token_ids must be a non-empty int32 vector": _is_vector(request.prompt_token_ids)
        and len(request.prompt_token_ids) > 0,
        "choices must be present, distinct and not negative": bool(indices)
        and len(set(indices)) == len(indices)
        and min(indices) >= 0,
        "weight must be a finite number above 0": math.isfinite(request.weight) and request.weight > 0,
        "max_tokens must be at least 1": sampling.max_tokens >= 1,
        "min_tokens must be between 0 and max_tokens": 0 <= sampling.min_tokens <= sampling.max_tokens,
        "seed must be 64 bits unsigned": 0 <= sampling.seed <= _MAX_SEED,
        "stop_token_ids must be inside the vocabulary": all(
            0 <= token_id < spec.vocab_size for token_id in sampling.stop_token_ids
        ),
        "deadline must be a number": request.deadline is None or not math.isnan(request.deadline),
    }
    for rule, kept in rules.items():
        if not kept:
            raise InvalidRequestError(rule)
    _check_ids("prompt_token_ids", request.prompt_token_ids, spec)
    for choice in request.choices:
        if not _is_vector(choice.output_token_ids) or len(choice.output_token_ids) > sampling.max_tokens:
            raise InvalidRequestError("output_token_ids must be an int32 vector of at most max_tokens")
        _check_ids("output_token_ids", choice.output_token_ids, spec)


def check_fits(request: EngineRequest, spec: RunnerSpec, *, block_limit: int, slot_limit: int) -> None:
    """Raise NeverFitsError when a choice of `request` could not run to `max_tokens` with the engine to itself.

    The newest token of a finished choice is never computed, so its last position needs no block.
    """
    total = len(request.prompt_token_ids) + request.sampling.max_tokens
    if total > spec.max_model_len:
        raise NeverFitsError(unit="tokens of context", required=total, limit=spec.max_model_len)
    blocks = -(-(total - 1) // spec.block_size)
    if blocks > block_limit:
        raise NeverFitsError(unit="blocks", required=blocks, limit=block_limit)
    if slot_limit < 1:
        raise NeverFitsError(unit="slots", required=1, limit=slot_limit)


def _is_vector(token_ids: TokenArray) -> bool:
    return token_ids.ndim == 1 and token_ids.dtype.kind == "i" and token_ids.dtype.itemsize == 4


def _check_ids(field: str, token_ids: TokenArray, spec: RunnerSpec) -> None:
    if len(token_ids) and not (int(token_ids.min()) >= 0 and int(token_ids.max()) < spec.vocab_size):
        raise InvalidRequestError(f"{field} must be inside the vocabulary of {spec.vocab_size}")
