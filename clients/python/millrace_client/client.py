"""The synchronous client. Thread-safe; a stream belongs to one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc

from millrace_client.calling import DEFAULT_TIMEOUT_S, Calling, open_channel
from millrace_client.errors import MillraceError, error_of
from millrace_client.retry import RetryPolicy, Turn
from millrace_client.usage import UsageGroup, UsageQuery, usage_groups, usage_request
from millrace_client.values import (
    AnotherRun,
    Answer,
    Delta,
    Gathered,
    Model,
    Options,
    Prompt,
    Usage,
    generate_request,
    model_of,
)


class Stream:
    """The deltas of one answer. Iterate it once; leave it early by `cancel` or the end of its `with` block."""

    def __init__(self, stub: pb_grpc.GatewayServiceStub, request: pb.GenerateRequest, turn: Turn) -> None:
        self._stub = stub
        self._request = request
        self._turn = turn
        self._call: Any = None
        self._cancelled = False
        self._gathered = Gathered()
        self._deltas = self._read()

    @property
    def request_id(self) -> str:
        """The server's id of the request, once accepted."""
        return self._gathered.request_id

    @property
    def usage(self) -> Usage | None:
        """What was used, once the stream was read to its end."""
        return self._gathered.usage

    def cancel(self) -> None:
        """Stop the work on the server; iterating ends. From any thread."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    def answer(self) -> Answer:
        """Read to the end and return the whole answer. Raises MillraceError."""
        for _ in self._deltas:
            pass
        return self._gathered.answer()

    def __iter__(self) -> Iterator[Delta]:
        """Deltas as they come. Raises MillraceError."""
        return self._deltas

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gathered.usage is None:
            self.cancel()

    def _read(self) -> Iterator[Delta]:
        failure: MillraceError | None = None
        while not self._cancelled:
            self._gathered.told_again()
            self._call = self._stub.Generate(self._request, timeout=self._turn.left_s, metadata=self._turn.metadata)
            try:
                for response in self._call:
                    delta = self._gathered.take(response)
                    if delta is not None:
                        yield delta
                return
            except AnotherRun:
                # The run that had begun is gone: its failure is what there is to tell.
                self._call.cancel()
                if failure is None:
                    raise
                raise failure from None
            except grpc.RpcError as failed:
                if self._cancelled:
                    return
                failure = error_of(failed, self._gathered.request_id)
                wait_s = self._turn.wait_after(failure, began=self._gathered.began)
            time.sleep(wait_s)


class Client:
    """A client of one gateway, or of what stands in front of several.

    `target` is `host:port`; without `credentials` the channel is plain text. `timeout_s` is the deadline of a call that
    names none. Close it, or use it in a `with` block.
    """

    def __init__(
        self,
        target: str,
        api_key: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._channel = open_channel(grpc.insecure_channel, grpc.secure_channel, target, credentials)
        self._stub = pb_grpc.GatewayServiceStub(self._channel)
        self._calling = Calling(api_key, timeout_s, retry)

    def stream(
        self,
        model: str,
        prompt: Prompt,
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Stream:
        """Start an answer and give its deltas. Nothing is sent before the first one is asked for.

        Equal calls with one `idempotency_key` are one generation for 24 hours. With it a connection that breaks is no
        end: the same run is asked for again, and its deltas go on.
        """
        request = generate_request(model, prompt, options if options is not None else Options())
        return Stream(self._stub, request, self._calling.turn(timeout_s, idempotency_key))

    def generate(
        self,
        model: str,
        prompt: Prompt,
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Answer:
        """The whole answer; `idempotency_key` as for `stream`. Raises MillraceError."""
        stream = self.stream(model, prompt, options, timeout_s=timeout_s, idempotency_key=idempotency_key)
        return stream.answer()

    def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        """What the key may use. Raises MillraceError."""
        sent = self._ask(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return [model_of(model) for model in sent.models]

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancel a request of the key's tenant; False when it had ended. Raises MillraceError."""
        return bool(self._ask(self._stub.Cancel, pb.CancelRequest(request_id=request_id), timeout_s).cancelled)

    def get_usage(self, query: UsageQuery | None = None, *, timeout_s: float | None = None) -> list[UsageGroup]:
        """Sums of the usage of the key's tenant, for a key of scope `usage:read`. Raises MillraceError."""
        request = usage_request(query if query is not None else UsageQuery())
        return usage_groups(self._ask(self._stub.GetUsage, request, timeout_s))

    def close(self) -> None:
        """End every call and the connection."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        turn = self._calling.turn(timeout_s)
        while True:
            try:
                return method(request, timeout=turn.left_s, metadata=turn.metadata)
            except grpc.RpcError as failed:
                wait_s = turn.wait_after(error_of(failed), began=False)
            time.sleep(wait_s)
