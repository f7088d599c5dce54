"""The server under the HTTP door: sockets, ports, and how much of an answer may wait for a slow reader."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common import http_server
from services.common.http_server import HttpServer, listen
from services.common.lifecycle import StartupError
from services.gateway.answer_sink import ClientSink, open_now, while_open
from services.gateway.answering import until_disconnect
from tests.helpers.waiting import WAIT_S


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


def named(name: bytes) -> ASGIApp:
    """Answers its name, which has three letters."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": name})

    return answer


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


async def test_a_server_that_leaves_its_door_to_another_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REST_S", 60)
    door = listen("127.0.0.1:0")
    old, new = (HttpServer(named(name), listen(f"fd:{os.dup(door.fileno())}")) for name in (b"old", b"new"))
    old.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", old.port)

    async def ask_again() -> bytes:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(3) == b"old"
        return head

    before = await ask_again()
    leaving = asyncio.create_task(old.leave())
    await asyncio.sleep(0)
    new.start()
    elsewhere = await ask(new.port)
    last = await ask_again()
    await leaving

    assert elsewhere.endswith(b"new")
    assert b"connection: close" not in before
    assert b"connection: close" in last
    assert await reader.read() == b""
    for server in (old, new):
        await server.stop()
    writer.close()
    door.close()


async def test_a_server_that_leaves_closes_connections_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REST_S", 0)
    server = HttpServer(hello, listen("127.0.0.1:0"))
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"hello")

    await server.leave()

    assert await reader.read() == b""
    writer.close()
    await server.stop()


def test_a_file_that_is_no_socket_is_one_sentence(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file, pytest.raises(StartupError, match="is no open socket"):
        listen(f"fd:{file.fileno()}")


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

    async with asyncio.timeout(WAIT_S):
        await blocked.wait()

    assert written < 100_000
    client.close()
    await server.stop()


async def test_what_is_written_at_once_is_refused_by_a_full_transport_and_by_one_whose_client_left() -> None:
    answers: list[bool] = []
    delivered: list[int] = []
    full, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        sink = ClientSink(while_open(scope, send), open_now(scope))
        await sink.start(200, [])

        def write() -> bool:
            return sink.write_now([b"x" * 4_096], lambda: delivered.append(1))

        while write():
            await asyncio.sleep(0)
        full.set()
        # As `write` waits for it: the client reads on.
        await sink.write([b"y" * 4_096])
        answers.append(write())
        while not scope["state"]["transport"].is_closing():
            await asyncio.sleep(0)
        answers.append(write())
        left.set()

    opened = listen("127.0.0.1:0")
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8_192)
    server = HttpServer(app, opened)
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4_096)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        await full.wait()
        written = len(delivered)
        body = b""
        while body.count(b"x") + body.count(b"y") < 4_096 * (written + 2):
            body += await reader.read(65_536)
        writer.close()
        await left.wait()

    assert answers == [True, False]
    assert len(delivered) == written + 1
    await server.stop()


async def test_what_is_written_to_a_client_that_left_is_not_taken() -> None:
    taken: list[bytes] = []
    over = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            sending = while_open(scope, send)
            await sending({"type": "http.response.start", "status": 200, "headers": []})
            await sending({"type": "http.response.body", "body": b"first", "more_body": True})
            taken.append(b"first")
            # The client's end is seen while nothing is read from it here.
            while not scope["state"]["transport"].is_closing():
                await asyncio.sleep(0)
            await sending({"type": "http.response.body", "body": b"second", "more_body": True})
            taken.append(b"second")

        await until_disconnect(receive, work())
        over.set()

    server = HttpServer(app, listen("127.0.0.1:0"))
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"first")
    writer.write_eof()
    rest = await reader.read()
    async with asyncio.timeout(WAIT_S):
        await over.wait()

    assert taken == [b"first"]
    assert b"second" not in rest
    writer.close()
    await server.stop()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_the_last_write_is_taken_whether_or_not_the_server_closes_after_it(connection: str) -> None:
    taken = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await hello(scope, receive, while_open(scope, send))
        taken.set()

    server = HttpServer(app, listen("127.0.0.1:0"))
    server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"GET / HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\n\r\n".encode())
    await reader.readuntil(b"hello")
    async with asyncio.timeout(WAIT_S):
        await taken.wait()

    writer.close()
    await server.stop()
