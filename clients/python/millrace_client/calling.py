"""What both clients are made of: a channel, the key that goes with each call, a deadline and retries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import grpc

from millrace_client.retry import RetryPolicy, Turn

DEFAULT_TIMEOUT_S = 600.0
KEY = "idempotency-key"
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # One owner of retries: this client.
    ("grpc.enable_retries", 0),
)
ChannelT = TypeVar("ChannelT")


Metadata = tuple[tuple[str, str], ...]


class Calling:
    """How a client calls. `timeout_s` is the deadline of a call that names none."""

    def __init__(self, api_key: str, timeout_s: float, retry: RetryPolicy | None) -> None:
        self.metadata: Metadata = (("authorization", f"Bearer {api_key}"),)
        self._timeout_s = timeout_s
        self._retry = retry if retry is not None else RetryPolicy()

    def keyed(self, idempotency_key: str | None) -> Metadata:
        """The metadata of a call under this key, if there is one."""
        return self.metadata if idempotency_key is None else (*self.metadata, (KEY, idempotency_key))

    def turn(self, timeout_s: float | None) -> Turn:
        """One call with its tries."""
        return Turn(self._retry, self._timeout_s if timeout_s is None else timeout_s)


def open_channel(
    plain: Callable[..., ChannelT],
    secure: Callable[..., ChannelT],
    target: str,
    credentials: grpc.ChannelCredentials | None,
) -> ChannelT:
    """A channel to `host:port` by one of the two ways of a gRPC library; plain text without `credentials`."""
    if credentials is None:
        return plain(target, CHANNEL_OPTIONS)
    return secure(target, credentials, CHANNEL_OPTIONS)
