"""A stream through nginx as Debian ships it, buffering and compressing: each token comes before the next one exists.

What opens the way is `X-Accel-Buffering: no`: with that header ignored, a compressing nginx holds the tokens back.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.common.http_server import HttpServer, listen
from tests.helpers.echo_generation import LENGTH, FakeGenerator, Step, front, tokens
from tests.helpers.redis import free_port

# Debian puts it where only root looks.
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CONFIG = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    # A compressor holds what it has not filled a block with, unless each part comes with the order to flush.
    gzip on;
    gzip_types *;
    gzip_proxied any;
    gzip_min_length 0;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{upstream}; }}
    }}
}}
"""


class Proxied:
    """A gateway's HTTP door over the fakes behind nginx."""

    def __init__(self) -> None:
        self.words = [104, 105, 106, 107]
        self.gates = [asyncio.Event() for _ in self.words]
        steps: list[Step] = []
        for index, (word, gate) in enumerate(zip(self.words, self.gates, strict=True)):
            last = index == len(self.words) - 1
            steps += [gate, tokens([word], first=index, finish=LENGTH if last else None)]
        self.server = HttpServer(front(FakeGenerator(steps)).app, listen("127.0.0.1:0"))
        self.url = ""


@pytest.fixture
async def proxied(tmp_path: Path) -> AsyncIterator[Proxied]:
    if NGINX is None:
        if os.environ.get("REQUIRE_NGINX"):
            raise AssertionError("nginx is not installed")
        pytest.skip("nginx is not installed")
    behind, port = Proxied(), free_port()
    behind.server.start()
    config = tmp_path / "nginx.conf"
    config.write_text(CONFIG.format(folder=tmp_path, port=port, upstream=behind.server.port))
    nginx = await asyncio.create_subprocess_exec(NGINX, "-c", str(config), "-e", str(tmp_path / "error.log"))
    behind.url = f"http://127.0.0.1:{port}"
    try:
        yield behind
    finally:
        nginx.terminate()
        await nginx.wait()
        await behind.server.stop()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_tokens_come_one_by_one_through_a_proxy_that_buffers(proxied: Proxied, path: str) -> None:
    body = {"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": True}
    del body["messages" if path == "/v1/completions" else "prompt"]
    headers = {"Authorization": "Bearer secret"}
    seen = ""
    # The proxy may still be coming up: only connecting is tried again.
    transport = httpx.AsyncHTTPTransport(retries=6)
    async with asyncio.timeout(60), httpx.AsyncClient(transport=transport, base_url=proxied.url, timeout=50) as client:
        proxied.gates[0].set()
        async with client.stream("POST", path, json=body, headers=headers) as answer:
            text = answer.aiter_text()
            for index, word in enumerate(map(chr, proxied.words)):
                # A proxy that held this token back would hold it for ever: the next one waits for it.
                while f'"{word}"' not in seen:
                    seen += await anext(text)
                if index + 1 < len(proxied.gates):
                    assert f'"{chr(proxied.words[index + 1])}"' not in seen
                    proxied.gates[index + 1].set()
            rest = seen + "".join([part async for part in text])

    assert "nginx" in answer.headers["server"]
    assert answer.headers["content-encoding"] == "gzip"
    assert rest.endswith("data: [DONE]\n\n")
