"""What a call can fail with: one class, told apart by `reason`."""

from __future__ import annotations

import grpc
from google.protobuf import message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

# Reasons after which the server says that the same request may be sent again. A budget that is used up is none of them.
RETRYABLE = frozenset(
    {
        "REQUESTS_PER_MINUTE",
        "TOKENS_PER_MINUTE",
        "CONCURRENT_REQUESTS",
        "QUEUE_SHARE",
        "QUEUE_FULL",
        "NO_WORKER",
        "STORE_UNAVAILABLE",
        "NOT_READY",
        "DRAINING",
        "POOL_CLOSED",
        "SUPERSEDED",
        "WORKER_LOST",
        "GATEWAY_LOST",
        "REVISION_CONFLICT",
    }
)


class MillraceError(Exception):
    """A failed call.

    `reason` is the row of the server's error table, empty where no server answered; `param` names the field at fault;
    `retry_after_s` is what the server asks to wait; `request_id` is set once the request had been accepted.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        text: str,
        *,
        reason: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(f"{reason or code.name}: {text}")
        self.code = code
        self.text = text
        self.reason = reason
        self.param = param
        self.retry_after_s = retry_after_s
        self.request_id = request_id

    @property
    def retryable(self) -> bool:
        """The same request may be sent again, as long as nothing of its answer has come."""
        return self.reason in RETRYABLE or self.of_connection

    @property
    def of_connection(self) -> bool:
        """The connection failed: no Millrace spoke, and what was asked for may still run."""
        return not self.reason and self.code is grpc.StatusCode.UNAVAILABLE


def error_of(failed: grpc.RpcError, request_id: str = "") -> MillraceError:
    """The error that a call ended with."""
    info, wait = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(failed)
    except (ValueError, message.DecodeError):
        status = None
    for detail in status.details if status is not None else ():
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(wait.DESCRIPTOR):
            detail.Unpack(wait)
    code = failed.code() if isinstance(failed, grpc.Call | grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    text = failed.details() if isinstance(failed, grpc.Call | grpc.aio.AioRpcError) else str(failed)
    seconds = wait.retry_delay.ToTimedelta().total_seconds()
    return MillraceError(
        code,
        text or "",
        reason=info.reason,
        param=info.metadata.get("param"),
        retry_after_s=seconds or None,
        request_id=request_id,
    )
