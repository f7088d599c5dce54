"""What both clients are made of: a channel, the key that goes with each call, a deadline and retries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import grpc

from millrace_client.retry import RetryPolicy, Turn

DEFAULT_TIMEOUT_S = 600.0
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # One owner of retries: this client.
    ("grpc.enable_retries", 0),
)
ChannelT = TypeVar("ChannelT")


class Calling:
    """How a client calls. `timeout_s` is the deadline of a call that names none."""

    def __init__(self, api_key: str, timeout_s: float, retry: RetryPolicy | None) -> None:
        self._metadata = (("authorization", f"Bearer {api_key}"),)
        self._timeout_s = timeout_s
        self._retry = retry if retry is not None else RetryPolicy()

    def turn(self, timeout_s: float | None, idempotency_key: str | None = None) -> Turn:
        """One call with its tries, under this key if there is one."""
        keyed = () if idempotency_key is None else (("idempotency-key", idempotency_key),)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return Turn(self._retry, timeout_s, metadata=(*self._metadata, *keyed), rejoins=bool(keyed))


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
