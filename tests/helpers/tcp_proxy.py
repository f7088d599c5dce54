"""A TCP proxy that can go silent with its connections open, or cut them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class TcpProxy:
    """Forwards to `target`."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def start(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def strike(self, fault: str) -> None:
        """`silence`: nothing passes any more, in either direction. `cut`: connections close, new ones are refused."""
        self._open.clear()
        if fault == "cut":
            if self._server is not None:
                self._server.close()
            for writer in self._writers:
                writer.transport.abort()

    def heal(self) -> None:
        """What was held back passes, in order."""
        self._open.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, upstream_writer}
        there = asyncio.create_task(self._pump(reader, upstream_writer))
        back = asyncio.create_task(self._pump(upstream_reader, writer))
        self._tasks |= {there, back}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(16_384):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def tcp_proxy(target: str) -> AsyncIterator[TcpProxy]:
    """A running proxy in front of `host:port`."""
    proxy = await TcpProxy(target).start()
    try:
        yield proxy
    finally:
        await proxy.close()
