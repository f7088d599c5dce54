"""Client transcripts: run a streaming completion, classify how it ended, and check it against the echo sequence."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re

import httpx

from services.worker.engine.fake_model_runner import echo_token
from services.worker.model_source import echo_salt

ECHO_TOKEN = re.compile(r"t(\d+) ")


@dataclasses.dataclass(slots=True)
class Transcript:
    """What one client saw."""

    status: int = 0
    request_id: str = ""
    version: str = "1"
    text: str = ""
    finish_reason: str | None = None
    done: bool = False
    error: dict[str, object] | None = None
    usage: dict[str, int] | None = None
    broken: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [int(t) for t in ECHO_TOKEN.findall(self.text)]

    @property
    def ending(self) -> str:
        """`completed`, `refused`, `error` (in band), or `unclassified`."""
        if self.status != httpx.codes.OK:
            return "refused"
        if self.done and self.finish_reason and self.error is None:
            return "completed"
        if self.error is not None and not self.done:
            return "error"
        return "unclassified"

    def is_echo_prefix(self, vocab_size: int) -> bool:
        """Whether the received tokens are the first ones of this request's echo sequence, without a gap, by the version
        that the answer names."""
        salt, count = echo_salt(self.version), len(self.token_ids)
        wanted = [echo_token(self.request_id, 0, i, vocab_size=vocab_size, salt=salt) for i in range(count)]
        return self.token_ids == wanted and "".join(f"t{t} " for t in self.token_ids) == self.text


async def stream_completion(
    client: httpx.AsyncClient,
    body: dict[str, object],
    *,
    seen: Transcript | None = None,
    until: asyncio.Event | None = None,
) -> Transcript:
    """POST a streaming completion and read it to its end, or leave once `until` is set; `seen` is filled meanwhile."""
    seen = seen if seen is not None else Transcript()
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", "/v1/completions", json=request) as response:
            seen.status = response.status_code
            seen.request_id = response.headers.get("x-request-id", "")
            seen.version = response.headers.get("x-millrace-model-version", "1")
            if response.status_code != httpx.codes.OK:
                seen.error = json.loads(await response.aread()).get("error")
                return seen
            async for line in response.aiter_lines():
                _read(seen, line)
                if until is not None and until.is_set():
                    break
    except httpx.HTTPError as error:
        seen.broken = repr(error)
    return seen


def _read(seen: Transcript, line: str) -> None:
    if not line.startswith("data: "):
        return
    if line == "data: [DONE]":
        seen.done = True
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        seen.error = event["error"]
        return
    seen.usage = event.get("usage") or seen.usage
    for choice in event["choices"]:
        seen.text += choice["text"]
        seen.finish_reason = choice["finish_reason"] or seen.finish_reason
