"""A TCP proxy beside the gateway that counts what the gateway wrote, and clients that leave at a token of their choice.

When a client goes, the proxy ends its own sending to the gateway and reads on until the gateway has closed: so it sees
every byte that the gateway handed to its transport, also those that no client was there for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import time
from types import TracebackType

import httpx

from tests.helpers.transcripts import ECHO_TOKEN

REQUEST_ID = re.compile(rb"(?i)\r\nx-request-id: *([0-9A-Za-z]+)")


@dataclasses.dataclass(slots=True)
class Counted:
    """One response as it passed; monotonic seconds of its connection."""

    began: float
    ended: float = 0.0
    request_id: str = ""
    accepted: bool = False
    done: bool = False
    failed: bool = False
    text: str = ""
    _rest: bytes = b""

    @property
    def token_count(self) -> int:
        return len(ECHO_TOKEN.findall(self.text))

    def feed(self, data: bytes) -> None:
        """Bytes of the response, in their order."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not self.request_id and lines and (head := REQUEST_ID.search(b"\n".join(lines) + b"\n")):
            self.request_id = head[1].decode()
            self.accepted = lines[0].startswith(b"HTTP/1.1 200")
        elif not self.request_id:
            self._rest = b"\n".join([*lines, self._rest])
            return
        for line in lines:
            self._read(line.strip())

    def _read(self, line: bytes) -> None:
        if line == b"data: [DONE]":
            self.done = True
        elif line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            self.failed = self.failed or "error" in event
            self.text += "".join(choice["text"] for choice in event.get("choices", ()))


class CountingProxy:
    """Listens on a free port; `seen` has every response that passed."""

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.seen: list[Counted] = []

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> CountingProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        # What the gateway still writes counts too.
        await asyncio.gather(*self._open)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counted = Counted(time.monotonic())
        try:
            back, front = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self.seen.append(counted)
        sending = asyncio.create_task(_send(reader, front))
        with contextlib.suppress(OSError):
            while data := await back.read(65_536):
                counted.feed(data)
                with contextlib.suppress(OSError):
                    writer.write(data)
        counted.ended = time.monotonic()
        sending.cancel()
        await asyncio.wait([sending])
        for each in (front, writer):
            each.close()
            with contextlib.suppress(OSError):
                await each.wait_closed()


async def _send(reader: asyncio.StreamReader, front: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            front.write(data)
    with contextlib.suppress(OSError):
        front.write_eof()


async def read_until(client: httpx.AsyncClient, max_tokens: int, leave_after: int | None) -> bool:
    """One streaming echo request; leaves once it has seen `leave_after` tokens. True when it left in mid-stream."""
    body = {"model": "echo", "prompt": "one two three", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    seen = 0
    with contextlib.suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                seen += len(ECHO_TOKEN.findall(line))
                if leave_after is not None and seen >= leave_after:
                    return True
    return False
