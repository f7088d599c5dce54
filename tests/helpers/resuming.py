"""A client of SSE that is cut after given numbers of events and goes on with `Last-Event-ID`, here or elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from tests.helpers.transcripts import ECHO_TOKEN

# Busy is not lost: a client waits as it is told.
REFUSALS = 200
_EVENT = re.compile(rb"id: (?P<id>[0-9A-Z]{26}:\d+)\ndata: (?P<data>[^\n]*)\n\n")


@dataclasses.dataclass(slots=True)
class Resumed:
    """What a client has of one stream: whole events, without comments."""

    request_id: str = ""
    received: bytes = b""
    last_event: str = ""
    cuts: int = 0
    slowest_return_s: float = 0.0
    refused: list[int] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.received.endswith(b"data: [DONE]\n\n")

    @property
    def events(self) -> list[Any]:
        data = [match["data"] for match in _EVENT.finditer(self.received)]
        return [json.loads(d) for d in data if d != b"[DONE]"]

    @property
    def numbers(self) -> list[int]:
        return [int(match["id"].partition(b":")[2]) for match in _EVENT.finditer(self.received)]

    @property
    def token_ids(self) -> list[int]:
        text = "".join(choice["text"] for event in self.events for choice in event.get("choices", ()))
        return [int(token) for token in ECHO_TOKEN.findall(text)]

    @property
    def error(self) -> str | None:
        return next((event["error"]["code"] for event in self.events if "error" in event), None)

    async def read(self, response: httpx.Response, at_most: int | None) -> None:
        """Take events until the end, or until `at_most` of this connection; half an event is thrown away."""
        self.request_id = self.request_id or response.headers.get("x-request-id", "")
        held, taken = b"", 0
        async for piece in response.aiter_raw():
            held += piece
            while (end := held.find(b"\n\n")) >= 0:
                event, held = held[: end + 2], held[end + 2 :]
                if event.startswith(b":"):
                    continue
                if at_most is not None and taken >= at_most:
                    return
                taken += 1
                self.received += event
                match = _EVENT.fullmatch(event)
                if match is not None:
                    self.last_event = match["id"].decode()


async def stream_with_cuts(
    clients: Sequence[httpx.AsyncClient],
    body: Mapping[str, object],
    cuts: Sequence[int],
    chance: random.Random,
    *,
    headers: Mapping[str, str],
) -> Resumed:
    """POST, be cut after `cuts[i]` events of connection i, and go on through any of the clients until the end."""
    seen = Resumed()
    cut_at: float | None = None
    while True:
        at_most = cuts[seen.cuts] if seen.cuts < len(cuts) else None
        client = chance.choice(clients)
        if not seen.request_id:
            asked = client.stream("POST", "/v1/completions", json=dict(body), headers=dict(headers))
        elif "Idempotency-Key" in headers and chance.random() < 0.5:
            more = {"Last-Event-ID": seen.last_event} if seen.last_event else {}
            asked = client.stream("POST", "/v1/completions", json=dict(body), headers={**headers, **more})
        else:
            more = {"Last-Event-ID": seen.last_event} if seen.last_event else {}
            asked = client.stream("GET", f"/v1/streams/{seen.request_id}", headers=more)
        async with asked as response:
            if cut_at is not None:
                seen.slowest_return_s = max(seen.slowest_return_s, time.monotonic() - cut_at)
            if response.status_code == httpx.codes.NO_CONTENT:
                return seen
            if response.status_code != httpx.codes.OK:
                seen.refused.append(response.status_code)
                if response.status_code not in (429, 503) or len(seen.refused) > REFUSALS:
                    return seen
                await asyncio.sleep(float(response.headers["retry-after"]))
                continue
            await seen.read(response, at_most)
        if seen.done or seen.error:
            return seen
        seen.cuts, cut_at = seen.cuts + 1, time.monotonic()
