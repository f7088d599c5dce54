"""Sends a load of streaming completions to an OpenAI-compatible server and keeps what its clients saw.

Obeys no Retry-After and retries nothing: a refusal is a result. `bench` and `benchmarks.peers` use it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import httpx

from cli.bench_load import Ending, Job, Outcome

REFUSALS = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
# A server may be silent for long under a closed loop of long prompts.
SILENCE_S, CONNECT_S = 900.0, 30.0
ERROR_LENGTH = 160


def open_client(url: str, key: str, *, transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """A client of the server at `url` (with or without `/v1`).

    Each request has a connection of its own: one that a server closed while idle would count as a failure.
    """
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        transport=transport,
    )


class Load:
    """One run against one model. `on_done` is called after each request."""

    def __init__(self, client: httpx.AsyncClient, model: str, on_done: Callable[[], object] = lambda: None) -> None:
        self._client = client
        self._model = model
        self._on_done = on_done
        self._start = 0.0

    async def open_loop(self, jobs: Iterable[Job]) -> list[Outcome]:
        """Send each job when it is due, whatever became of those before; returns when all have ended."""
        self._start = time.perf_counter()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                await asyncio.sleep(job.due_s - self._now())
                tasks.append(group.create_task(self.send(job, due_s=job.due_s)))
        return [task.result() for task in tasks]

    async def closed_loop(self, jobs: Sequence[Job], *, concurrency: int) -> list[Outcome]:
        """Keep `concurrency` requests in flight until none is left."""
        self._start = time.perf_counter()
        left, outcomes = iter(jobs), []

        async def lane() -> None:
            for job in left:
                outcomes.append(await self.send(job, due_s=self._now()))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(lane())
        return outcomes

    async def send(self, job: Job, *, due_s: float = 0.0) -> Outcome:
        """Send one job now; every failure of server or network becomes an outcome."""
        seen = _Seen(due_s, self._now)
        body = {
            "model": self._model,
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code == httpx.codes.OK:
                    async for line in response.aiter_lines():
                        seen.read(line)
                else:
                    await response.aread()
                    seen.refused(response)
        except httpx.HTTPError as error:
            seen.error = f"{type(error).__name__}: {error}"
        self._on_done()
        return seen.outcome()

    def _now(self) -> float:
        return time.perf_counter() - self._start


class _Seen:
    """What one client has seen so far."""

    def __init__(self, due_s: float, now: Callable[[], float]) -> None:
        self.error = ""
        self._now = now
        self._due_s, self._sent_s = due_s, now()
        self._chunks_s: list[float] = []
        self._ending = Ending.FAILED
        self._is_done = False
        self._usage: dict[str, Any] | None = None

    def read(self, line: str) -> None:
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self._is_done = True
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                self.error = _message(event)
                return
            self._usage = event.get("usage") or self._usage
            if event.get("choices") and event["choices"][0].get("text"):
                self._chunks_s.append(self._now())
        except (ValueError, TypeError, AttributeError):
            self.error = f"the stream has a line that is no event: {data[:ERROR_LENGTH]}"

    def refused(self, response: httpx.Response) -> None:
        self._ending = Ending.REFUSED if response.status_code in REFUSALS else Ending.FAILED
        self.error = f"{response.status_code}: {error_message(response)}"

    def outcome(self) -> Outcome:
        end, usage, chunks = self._now(), self._usage or {}, self._chunks_s
        if not self.error and not self._is_done:
            self.error = "the stream ended without [DONE]"
        return Outcome(
            due_s=self._due_s,
            sent_s=self._sent_s,
            first_s=chunks[0] if chunks else end,
            end_s=end,
            ending=self._ending if self.error else Ending.COMPLETED,
            gaps_s=tuple(late - early for early, late in itertools.pairwise(chunks)),
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", len(chunks)),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            is_estimated=self._usage is None,
            error=self.error,
        )


def error_message(response: httpx.Response) -> str:
    """The server's own sentence, else the start of what it sent."""
    try:
        return _message(response.json())
    except (ValueError, TypeError, AttributeError):
        return response.text[:ERROR_LENGTH]


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)[:ERROR_LENGTH]
