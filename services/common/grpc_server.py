"""The gRPC server of every service: limits, keepalive, health, error translation, trace context, drain."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from opentelemetry import context as otel_context
from opentelemetry import propagate

from services.common.errors import Internal, MillraceError
from services.common.grpc_client import DEFAULT_MAX_MESSAGE_BYTES
from services.common.lifecycle import StartupError
from services.common.tls import Access

_DOMAIN = "millrace"


def status_of(error: MillraceError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo{reason, param} and, where there is a wait, RetryInfo."""
    info = error_details_pb2.ErrorInfo(reason=error.row.reason, domain=_DOMAIN)
    if error.param is not None:
        info.metadata["param"] = error.param
    details = [any_pb2.Any()]
    details[0].Pack(info)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        details.append(packed)
    code = code_pb2.Code.Value(error.row.grpc_code.name)
    return status_pb2.Status(code=code, message=error.message, details=details)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], method: str, error: Exception) -> None:
    if not isinstance(error, MillraceError):
        structlog.get_logger().error("rpc_failed", method=method, error=type(error).__name__, exc_info=error)
        error = Internal("Internal error.")
    await context.abort_with_status(rpc_status.to_status(status_of(error)))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """A raised MillraceError becomes google.rpc.Status, anything else a dull INTERNAL; sets the trace context.

    With `access`, a caller whose certificate is of another role gets no further.
    """

    def __init__(self, access: Access | None = None) -> None:
        self._access = access

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        carrier = {k: v for k, v in handler_call_details.invocation_metadata or () if isinstance(v, str)}
        shape = (
            "stream" if handler.request_streaming else "unary",
            "stream" if handler.response_streaming else "unary",
        )
        inner = getattr(handler, "_".join(shape))

        async def awaited(request: Any, context: Any) -> Any:
            token = otel_context.attach(propagate.extract(carrier))
            try:
                self._check(context, method)
                return await inner(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await _abort(context, method, error)
            finally:
                otel_context.detach(token)

        async def iterated(request: Any, context: Any) -> AsyncIterator[Any]:
            otel_context.attach(propagate.extract(carrier))
            try:
                self._check(context, method)
                async for response in inner(request, context):
                    yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await _abort(context, method, error)

        make: Any = getattr(grpc, "_".join((*shape, "rpc_method_handler")))
        return make(
            iterated if inspect.isasyncgenfunction(inner) else awaited,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _check(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
        if self._access is not None:
            self._access.check(context, method)


class GrpcServer:
    """A running server."""

    def __init__(self, server: grpc.aio.Server, address: str, names: Sequence[str]) -> None:
        self._server = server
        self._names = ("", *names)
        self.address = address
        self.health = health.aio.HealthServicer()

    async def set_serving(self, serving: bool) -> None:
        """Answer of the standard health service, for all services of this server."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self.health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish for `grace_s` seconds, then cut them."""
        await self._server.stop(grace_s)


async def start_server(
    listen: str,
    add_services: Callable[[grpc.aio.Server], None],
    *,
    service_names: Sequence[str],
    reflect: bool = False,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    access: Access | None = None,
) -> GrpcServer:
    """Bind `host:port` (port 0 = any) or `unix:/path` and start; with `access`, for callers with a certificate.

    Several processes of a user may have `shared:host:port`. Raises StartupError when the address is taken.
    """
    shared, listen = listen.startswith("shared:"), listen.removeprefix("shared:")
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor(access)],
        options=[
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", 5_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.ping_timeout_ms", 5_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", int(shared)),
        ],
    )
    add_services(server)
    try:
        if access is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, access.tls.server_credentials())
    except RuntimeError as error:
        raise StartupError(f"The address {listen} cannot be bound: is the port taken?") from error
    address = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
    running = GrpcServer(server, address, service_names)
    health_pb2_grpc.add_HealthServicer_to_server(running.health, server)
    if reflect:
        reflection.enable_server_reflection((*service_names, reflection.SERVICE_NAME, health.SERVICE_NAME), server)
    await server.start()
    await running.set_serving(False)
    return running
