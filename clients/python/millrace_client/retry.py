"""When to send a request again, and how long to wait before: exponential backoff with full jitter. No I/O."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable

from millrace_client.errors import MillraceError

Metadata = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `attempts` tries in all; the wait before try n is random in [0, min(cap_s, base_s · 2^n)].

    A wait that the server asks for is the least that is waited. `attempts=1` never repeats.
    """

    attempts: int = 4
    base_s: float = 0.25
    cap_s: float = 8.0
    jitter: Callable[[], float] = random.random

    def wait_s(self, failures: int, error: MillraceError) -> float:
        """Seconds to wait after so many failures (1 or more)."""
        backoff = min(self.cap_s, self.base_s * 2.0 ** (failures - 1))
        return (error.retry_after_s or 0.0) + backoff * self.jitter()


class Turn:
    """One call with its tries: they share one deadline, and `metadata`.

    `rejoins`: after a connection that broke, a new try comes back to the same run.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
        *,
        metadata: Metadata = (),
        rejoins: bool = False,
    ) -> None:
        self.metadata = metadata
        self._rejoins = rejoins
        self._policy = policy
        self._now = now
        self._deadline = now() + timeout_s
        self._failures = 0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least a millisecond."""
        return max(0.001, self._deadline - self._now())

    def wait_after(self, error: MillraceError, *, began: bool) -> float:
        """Seconds to wait before the next try. Raises the error when there is to be none.

        `began`: part of the answer has come, and a new run would say it twice.
        """
        self._failures += 1
        lost = began and not (self._rejoins and error.of_connection)
        if lost or not error.retryable or self._failures >= self._policy.attempts:
            raise error
        wait_s = self._policy.wait_s(self._failures, error)
        if wait_s >= self._deadline - self._now():
            raise error
        return wait_s
