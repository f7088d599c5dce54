"""The HTTP server inside a service's event loop: sockets first, then uvicorn without signals or lifespan.

A client that does not read stops the writer at 16 KiB, which is what "delivered" is measured by.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.lifecycle import StartupError

WRITE_HIGH_WATER_BYTES = 16_384
KEEP_ALIVE_S = 75
BACKLOG = 2_048
# So long a connection rests before a server that leaves closes it: whoever asks sooner is answered, and told to go.
REST_S = 5.0
_CLOSE = (b"connection", b"close")


class _Protocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # A writer may ask whether a write would wait, or be dropped in silence by a transport that closes.
        self.scope["state"]["transport"] = self.transport
        self.scope["state"]["flow"] = self.flow

    @property
    def rests(self) -> bool:
        """What was asked has been answered."""
        return self.cycle is not None and self.cycle.response_complete


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals belong to the process (lifecycle.run).
        yield


def listen(address: str) -> socket.socket:
    """A bound, listening socket for `host:port` (0 = any) or `unix:/path`; `fd:N` is one that this process was given.

    Raises StartupError.
    """
    place: str | tuple[str, int]
    if address.startswith("fd:"):
        try:
            return socket.socket(fileno=int(address.removeprefix("fd:")))
        except OSError as error:
            raise StartupError(f"The address {address} is no open socket.") from error
    if address.startswith("unix:"):
        family, place = socket.AF_UNIX, address.removeprefix("unix:")
    else:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family, place = (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))
    opened = socket.socket(family)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(place)
        opened.listen(BACKLOG)
    except OSError as error:
        opened.close()
        raise StartupError(f"The address {address} cannot be bound ({error.strerror}): is the port taken?") from error
    opened.setblocking(False)
    return opened


class HttpServer:
    """A running HTTP server."""

    def __init__(self, app: ASGIApp, opened: socket.socket) -> None:
        self._socket = opened
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The bound port; 0 for a unix socket."""
        name = self._socket.getsockname()
        return int(name[1]) if isinstance(name, tuple) else 0

    def start(self) -> None:
        """Serve in the background."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http-server")

    async def leave(self) -> None:
        """Accept no more, for another process does, and end with the last connection.

        What is asked on those that are open is answered, with `connection: close`. One that has just come may take its
        time to ask: how long that may be is for the caller to say.
        """
        for server in self._server.servers:
            server.close()
        # The server renews what it adds to every answer once a second, from its settings.
        self._server.config.encoded_headers.append(_CLOSE)
        self._server.server_state.default_headers.append(_CLOSE)
        resting: dict[_Protocol, float] = {}
        now = asyncio.get_running_loop().time
        while connections := self._server.server_state.connections:
            resting = {c: resting.get(c, now()) for c in connections if isinstance(c, _Protocol) and c.rests}
            for connection, since in resting.items():
                if now() - since > REST_S:
                    connection.shutdown()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Close idle connections and give running answers one second."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
