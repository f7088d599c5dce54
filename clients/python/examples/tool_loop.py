"""Let a model call a function until it answers: `python tool_loop.py 127.0.0.1:8001 <key> <model>`."""

from __future__ import annotations

import asyncio
import json
import sys

from millrace_client import AsyncClient, Message, Options, Tool

ADD = Tool(
    "add",
    "Add two numbers",
    {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]},
)


def run(arguments: str) -> str:
    """The function. What a model writes is checked like any input."""
    try:
        sent = json.loads(arguments)
        return str(sent["a"] + sent["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


async def main(target: str, key: str, model: str) -> None:
    """At most three rounds."""
    messages = [Message("user", "What is 17 plus 25? Use the function.")]
    async with AsyncClient(target, key) as client:
        for _ in range(3):
            answer = await client.generate(model, messages, Options(max_tokens=48, tools=[ADD]), timeout_s=60)
            if not answer.message.tool_calls:
                sys.stdout.write(answer.text + "\n")
                return
            messages.append(answer.message)
            messages += [
                Message("tool", run(call.arguments), tool_call_id=call.id) for call in answer.message.tool_calls
            ]


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
