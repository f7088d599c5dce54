"""A place between a running worker's unix socket and those who dial it, where the link of one process can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path


@dataclasses.dataclass(eq=False)
class _Link:
    """One connection: the process that dialled, and both of its ways out."""

    pid: int
    writers: list[asyncio.StreamWriter]


class CutLink:
    """Takes the worker's socket over: who dials from then on comes through here. Connections of before are not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._behind = path.with_suffix(".behind")
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._struck: int | None = None
        self._healed = asyncio.Event()
        self._healed.set()

    @contextlib.asynccontextmanager
    async def standing(self) -> AsyncIterator[CutLink]:
        """Until the end of the block, which gives the worker its socket back."""
        self._path.rename(self._behind)
        server = await asyncio.start_unix_server(self._serve, self._path)
        try:
            yield self
        finally:
            server.close()
            for link in self._links:
                _abort(link)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._behind.rename(self._path)

    def processes(self) -> set[int]:
        """Who is connected."""
        return {link.pid for link in self._links}

    async def cut(self, pid: int, kind: str, for_s: float) -> None:
        """`cut`: its connections close, new ones are refused. `silence`: they stay open, and nothing passes."""
        self._struck = pid
        self._healed.clear()
        try:
            if kind == "cut":
                for link in self._links:
                    if link.pid == pid:
                        _abort(link)
            await asyncio.sleep(for_s)
        finally:
            self._struck = None
            self._healed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid = struct.unpack("3i", peer)[0]
        if pid == self._struck:
            writer.transport.abort()
            return
        ahead, beyond = await asyncio.open_unix_connection(self._behind)
        link = _Link(pid, [writer, beyond])
        self._links.add(link)
        pumps = {asyncio.create_task(self._pump(pid, *way)) for way in ((reader, beyond), (ahead, writer))}
        self._tasks |= pumps
        await asyncio.wait(pumps)
        self._tasks -= pumps
        self._links.discard(link)
        _abort(link)

    async def _pump(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                while pid == self._struck:
                    await self._healed.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


def _abort(link: _Link) -> None:
    for writer in link.writers:
        writer.transport.abort()
