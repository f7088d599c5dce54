"""Renders chat templates in one child process with a CPU limit (S7). Owned by wiring: `close` ends the child."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
from pathlib import Path

from services.common.errors import InvalidRequest
from services.gateway.chat_template import ChatTemplate, Guarded

_WALL_SECONDS = 10.0
_CHILD = Path(__file__).with_name("template_child.py")


class TemplateRenderer:
    """Starts its child on first use, and again after a kill. One render at a time."""

    def __init__(self, *, wall_seconds: float = _WALL_SECONDS) -> None:
        self._wall_seconds = wall_seconds
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the child now, so that the first request need not wait for it."""
        async with self._turn:
            await self._running_child()

    async def render(self, template: ChatTemplate, guarded: Guarded) -> str:
        """The prompt, guard characters included. Raises InvalidRequest, with the template's words when it refuses."""
        request = json.dumps({"source": template.source, "variables": guarded.variables}).encode()
        async with self._turn:
            answer = await self._ask(request)
        if "text" in answer:
            return answer["text"]
        if "refused" in answer:
            raise InvalidRequest(answer["refused"].replace(guarded.guard, ""), param="messages")
        raise InvalidRequest(
            f"The model's chat template cannot render these messages ({answer['failed']}).", param="messages"
        )

    async def close(self) -> None:
        """End the child."""
        async with self._turn:
            await self._end()

    async def _ask(self, request: bytes) -> dict[str, str]:
        child = await self._running_child()
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the template child has no pipes")
        try:
            async with asyncio.timeout(self._wall_seconds):
                child.stdin.write(struct.pack(">I", len(request)) + request)
                await child.stdin.drain()
                size = struct.unpack(">I", await child.stdout.readexactly(4))[0]
                answer: dict[str, str] = json.loads(await child.stdout.readexactly(size))
                return answer
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            await self._end()
            return {"failed": "it took too long"}
        except asyncio.CancelledError:
            # Half an answer may be in the pipe.
            await self._end()
            raise

    async def _running_child(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(_CHILD),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
            )
        return self._child

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        if child.stdin is not None:
            child.stdin.close()
