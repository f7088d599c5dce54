"""The server under the HTTP door: sockets, ports, and how much of an answer may wait for a slow reader."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from services.common.http_server import HttpServer, listen
from services.common.lifecycle import StartupError


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


async def test_port_zero_is_any_port_and_answers() -> None:
    server = HttpServer(hello, listen("127.0.0.1:0"))
    server.start()

    answer = await ask(server.port)

    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"hello")
    await server.stop()


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(StartupError, match=f"127.0.0.1:{port} cannot be bound"):
            listen(f"127.0.0.1:{port}")


def test_a_unix_socket_is_an_address_too(tmp_path: Path) -> None:
    opened = listen(f"unix:{tmp_path / 's'}")

    assert (tmp_path / "s").is_socket()
    opened.close()


async def test_an_answer_waits_for_its_reader_at_sixteen_kibibytes() -> None:
    written = 0
    blocked = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal written
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            sending = asyncio.ensure_future(
                send({"type": "http.response.body", "body": b"x" * 4_096, "more_body": True})
            )
            done, _ = await asyncio.wait({sending}, timeout=0.3)
            if not done:
                blocked.set()
                await sending
            written += 4_096

    opened = listen("127.0.0.1:0")
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8_192)
    server = HttpServer(endless, opened)
    server.start()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.port))
    await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

    async with asyncio.timeout(10):
        await blocked.wait()

    assert written < 100_000
    client.close()
    await server.stop()
