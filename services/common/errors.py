"""The one table of failures: reason → gRPC code → HTTP status → OpenAI error type → retry rule.

    MillraceError
    ├── the client's fault        InvalidRequest, ContextLengthExceeded, Unauthenticated, PermissionDenied,
    │                             ModelNotFound, NotFound, PayloadTooLarge, IdempotencyConflict, Unsupported, Poisoned
    ├── the tenant's limit        RateLimited, TokenRateLimited, ConcurrencyLimited, QueueShareExceeded, BudgetExhausted
    ├── the platform's state      QueueFull, NoWorker, StoreUnavailable, NotReady, Draining, Superseded, WorkerLost,
    │                             GatewayLost, PoolClosed, SlowReader
    ├── the end of time or wish   DeadlineExceeded, Cancelled
    └── our own fault             EngineError, Internal

Domain code raises these; one gRPC interceptor and one HTTP handler translate. 5xx texts are dull: no path, no stack.
"""

from __future__ import annotations

import dataclasses
import enum

import grpc


class Retry(enum.Enum):
    """Who may try again: nobody, the client after Retry-After, the layer one up (ABORTED), or the channel itself."""

    NEVER = "never"
    AFTER_DELAY = "after_delay"
    ONE_UP = "one_up"
    AUTOMATIC = "automatic"


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorRow:
    """One row of the table. `reason` is the wire name (ErrorInfo.reason and the OpenAI `code`)."""

    reason: str
    grpc_code: grpc.StatusCode
    http_status: int
    openai_type: str
    retry: Retry


class MillraceError(Exception):
    """Base of every failure that crosses a boundary.

    `message` is one sentence for the user; `param` names the field at fault; `retry_after_s` is seconds to wait.
    """

    row = ErrorRow("INTERNAL", grpc.StatusCode.INTERNAL, 500, "server_error", Retry.NEVER)

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return f"{type(self).__name__}(reason={self.row.reason}, message={self.message!r})"


def _row(reason: str, code: grpc.StatusCode, status: int, kind: str, retry: Retry = Retry.NEVER) -> ErrorRow:
    return ErrorRow(reason, code, status, kind, retry)


_Code = grpc.StatusCode


class InvalidRequest(MillraceError):
    row = _row("INVALID_REQUEST", _Code.INVALID_ARGUMENT, 400, "invalid_request_error")


class ContextLengthExceeded(MillraceError):
    row = _row("CONTEXT_LENGTH_EXCEEDED", _Code.INVALID_ARGUMENT, 400, "invalid_request_error")


class Unsupported(MillraceError):
    row = _row("UNSUPPORTED", _Code.INVALID_ARGUMENT, 400, "invalid_request_error")


class Unauthenticated(MillraceError):
    row = _row("INVALID_API_KEY", _Code.UNAUTHENTICATED, 401, "authentication_error")


class PermissionDenied(MillraceError):
    row = _row("PERMISSION_DENIED", _Code.PERMISSION_DENIED, 403, "permission_error")


class ModelNotFound(MillraceError):
    row = _row("MODEL_NOT_FOUND", _Code.NOT_FOUND, 404, "invalid_request_error")


class NotFound(MillraceError):
    row = _row("NOT_FOUND", _Code.NOT_FOUND, 404, "invalid_request_error")


class PayloadTooLarge(MillraceError):
    row = _row("PAYLOAD_TOO_LARGE", _Code.INVALID_ARGUMENT, 413, "invalid_request_error")


class IdempotencyConflict(MillraceError):
    row = _row("IDEMPOTENCY_CONFLICT", _Code.ALREADY_EXISTS, 422, "invalid_request_error")


class RevisionConflict(MillraceError):
    row = _row("REVISION_CONFLICT", _Code.ABORTED, 409, "invalid_request_error", Retry.ONE_UP)


class RateLimited(MillraceError):
    row = _row("REQUESTS_PER_MINUTE", _Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", Retry.AFTER_DELAY)


class TokenRateLimited(MillraceError):
    row = _row("TOKENS_PER_MINUTE", _Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", Retry.AFTER_DELAY)


class ConcurrencyLimited(MillraceError):
    row = _row("CONCURRENT_REQUESTS", _Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", Retry.AFTER_DELAY)


class QueueShareExceeded(MillraceError):
    row = _row("QUEUE_SHARE", _Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", Retry.AFTER_DELAY)


class BudgetExhausted(MillraceError):
    row = _row("BUDGET_EXHAUSTED", _Code.RESOURCE_EXHAUSTED, 429, "insufficient_quota", Retry.NEVER)


class QueueFull(MillraceError):
    row = _row("QUEUE_FULL", _Code.RESOURCE_EXHAUSTED, 503, "overloaded_error", Retry.AFTER_DELAY)


class NoWorker(MillraceError):
    row = _row("NO_WORKER", _Code.UNAVAILABLE, 503, "overloaded_error", Retry.AFTER_DELAY)


class StoreUnavailable(MillraceError):
    row = _row("STORE_UNAVAILABLE", _Code.UNAVAILABLE, 503, "overloaded_error", Retry.AFTER_DELAY)


class NotReady(MillraceError):
    row = _row("NOT_READY", _Code.UNAVAILABLE, 503, "overloaded_error", Retry.AUTOMATIC)


class Draining(MillraceError):
    row = _row("DRAINING", _Code.UNAVAILABLE, 503, "overloaded_error", Retry.AUTOMATIC)


class PoolClosed(MillraceError):
    row = _row("POOL_CLOSED", _Code.ABORTED, 503, "overloaded_error", Retry.ONE_UP)


class Superseded(MillraceError):
    row = _row("SUPERSEDED", _Code.ABORTED, 500, "server_error", Retry.ONE_UP)


class WorkerLost(MillraceError):
    row = _row("WORKER_LOST", _Code.ABORTED, 502, "server_error", Retry.ONE_UP)


class GatewayLost(MillraceError):
    row = _row("GATEWAY_LOST", _Code.ABORTED, 502, "server_error", Retry.ONE_UP)


class SlowReader(MillraceError):
    row = _row("SLOW_READER", _Code.CANCELLED, 408, "invalid_request_error")


class DeadlineExceeded(MillraceError):
    row = _row("DEADLINE_EXCEEDED", _Code.DEADLINE_EXCEEDED, 504, "timeout_error")


class Cancelled(MillraceError):
    row = _row("CANCELLED", _Code.CANCELLED, 499, "invalid_request_error")


class Poisoned(MillraceError):
    # A 4xx: clients repeat what fails with a 5xx by themselves.
    row = _row("POISONED", _Code.FAILED_PRECONDITION, 422, "invalid_request_error")


class EngineError(MillraceError):
    row = _row("ENGINE_ERROR", _Code.INTERNAL, 500, "server_error")


class Internal(MillraceError):
    row = _row("INTERNAL", _Code.INTERNAL, 500, "server_error")


def error_classes() -> dict[str, type[MillraceError]]:
    """Every reason and its class; docs/errors.md is generated from it."""
    return {cls.row.reason: cls for cls in MillraceError.__subclasses__()}


def error_of(reason: str, message: str) -> MillraceError:
    """The error for a reason that came over the wire; an unknown reason is Internal."""
    return error_classes().get(reason, Internal)(message)
