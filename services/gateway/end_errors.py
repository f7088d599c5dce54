"""What an end that was not the front's wish means to the client: worker finishes and store records as errors. Pure."""

from __future__ import annotations

from millrace.common.v1 import common_pb2

from services.common.admission_types import RequestRecord
from services.common.errors import Cancelled, DeadlineExceeded, EngineError, MillraceError, error_of


def error_of_finish(reason: common_pb2.FinishReason.ValueType) -> MillraceError | None:
    """The error of a choice that a worker ended so; None for a good end."""
    if reason == common_pb2.FINISH_REASON_EXPIRED:
        return DeadlineExceeded("The deadline passed before the answer was complete.")
    if reason == common_pb2.FINISH_REASON_CANCELLED:
        return Cancelled("The request was cancelled.")
    if reason in (common_pb2.FINISH_REASON_ERROR, common_pb2.FINISH_REASON_UNSPECIFIED):
        return EngineError("The engine could not compute this request.")
    return None


def error_of_record(record: RequestRecord) -> MillraceError:
    """The error of a request that was ended in the store."""
    state: object = record.terminal_state
    if state == common_pb2.TERMINAL_STATE_EXPIRED:
        return DeadlineExceeded("The deadline passed before the answer was complete.")
    if state == common_pb2.TERMINAL_STATE_CANCELLED:
        return Cancelled("The request was cancelled.")
    return error_of(record.error_reason or "WORKER_LOST", "The request was ended elsewhere.")
