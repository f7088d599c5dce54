"""Channels to other services: keepalive, explicit limits, trace context; and errors turned back into our own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from opentelemetry import propagate

from services.common.errors import Internal, MillraceError, NotReady, error_of
from services.common.tls import Tls, host_of

DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
Dial = Callable[[str], grpc.aio.Channel]


def _with_trace(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    for name, value in carrier.items():
        metadata.add(name, value)
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _UnaryUnaryTrace(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return await continuation(_with_trace(details), request)


def open_channel(
    address: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    tls: Tls | None = None,
    server_role: str = "",
) -> grpc.aio.Channel:
    """A lazily connected channel to `host:port` or `unix:/path`; pings each 5 s so that a silent peer is noticed.

    With `tls`, the server must show a certificate of `server_role`.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Without it a peer that is frozen, its socket still open, is noticed only after a minute.
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=[_UnaryUnaryTrace()])
    options.append(("grpc.ssl_target_name_override", host_of(server_role)))
    return grpc.aio.secure_channel(
        address, tls.channel_credentials(), options=options, interceptors=[_UnaryUnaryTrace()]
    )


def dialler(tls: Tls | None, server_role: str) -> Dial:
    """`open_channel` for servers of one role."""
    return functools.partial(open_channel, tls=tls, server_role=server_role)


def error_from_rpc(rpc_error: grpc.aio.AioRpcError) -> MillraceError:
    """Our error from a failed call: by ErrorInfo.reason where present, else by the code."""
    status = rpc_status.from_call(rpc_error)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            error = error_of(info.reason, rpc_error.details() or info.reason)
            error.param = info.metadata.get("param") or None
            return error
    if rpc_error.code() == grpc.StatusCode.UNAVAILABLE:
        return NotReady(f"The service cannot be reached: {rpc_error.details()}")
    return Internal(f"{rpc_error.code().name}: {rpc_error.details()}")
