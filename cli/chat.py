"""`millrace chat`: a streaming conversation in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated

import httpx
import typer

from cli.stack_state import demo_key, home_dir, read_state
from cli.up import fail


def chat(
    prompt: Annotated[str | None, typer.Argument(help="One question; without it a conversation starts.")] = None,
    model: Annotated[str | None, typer.Option(help="Model; the first that is served unless given.")] = None,
    url: Annotated[
        str | None, typer.Option(envvar="MILLRACE_URL", help="Gateway; the local stack's unless given.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="MILLRACE_API_KEY", help="API key; the demo key unless given.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 always gives the likeliest token.")] = None,
) -> None:
    """Talk to a model. An empty line or Ctrl-D ends the conversation; Ctrl-C stops an answer."""
    state = read_state(home_dir())
    url = url or (state.url if state else None)
    if url is None:
        raise fail("No stack is running: start one with `millrace up`, or name a gateway with --url.")
    key = key or demo_key(home_dir()) or ""
    messages = [{"role": "system", "content": system}] if system else []
    options = {"max_tokens": max_tokens, "temperature": temperature}
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=None) as client:  # noqa: S113
        try:
            model = model or first_model(client)
            for text in [prompt] if prompt is not None else _lines():
                messages.append({"role": "user", "content": text})
                body = {"model": model, "messages": messages, "stream": True}
                answer = _stream(client, body | {k: v for k, v in options.items() if v is not None})
                messages.append({"role": "assistant", "content": answer})
        except httpx.HTTPError as error:
            raise fail(f"The gateway at {url} does not answer: {error}") from error


def first_model(client: httpx.Client) -> str:
    """The first model that the gateway serves; fails with a sentence when there is none."""
    answer = client.get("/v1/models")
    check(answer)
    data = answer.json()["data"]
    if not data:
        raise fail("No model is served yet.")
    return str(data[0]["id"])


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            return
        yield line


def check(answer: httpx.Response) -> None:
    """Fail with the gateway's own sentence unless the answer is a success."""
    if answer.is_success:
        return
    answer.read()
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    raise fail(f"{answer.status_code}: {message}")


def _stream(client: httpx.Client, body: dict[str, object]) -> str:
    answer = ""
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            check(response)
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise fail(event["error"]["message"])
                for choice in event["choices"]:
                    text = choice["delta"].get("content") or ""
                    answer += text
                    sys.stdout.write(text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    return answer
