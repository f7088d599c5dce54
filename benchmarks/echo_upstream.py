"""A small OpenAI-compatible server that answers at once: what another gateway is measured in front of.

`python -m benchmarks.echo_upstream --port 9100`. Every answer takes 2 ms; a stream gives a token a chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

ANSWER_S = 0.002


async def _chat(request: Request) -> Response:
    body = await request.json()
    count = int(body.get("max_tokens", 8))
    await asyncio.sleep(ANSWER_S)
    if body.get("stream"):
        return StreamingResponse(_chunks(count), media_type="text/event-stream")
    message = {"role": "assistant", "content": "t1 " * count}
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    return JSONResponse(_head("chat.completion") | {"choices": [choice], "usage": usage})


async def _chunks(count: int) -> AsyncIterator[str]:
    for index in range(count):
        finish = "length" if index == count - 1 else None
        choice = {"index": 0, "delta": {"role": "assistant", "content": "t1 "}, "finish_reason": finish}
        yield f"data: {json.dumps(_head('chat.completion.chunk') | {'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


def _head(kind: str) -> dict[str, object]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "echo"}


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=9100)
    app = Starlette(routes=[Route("/v1/chat/completions", _chat, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
