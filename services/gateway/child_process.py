"""Work that may hang or crash runs in a child process with limits of CPU and memory (S7, S8). One request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

_WALL_SECONDS = 10.0
_FOLDER = Path(__file__).parent


class ChildDied(Exception):
    """The child took too long or crashed; the next request gets a new one."""


class ChildProcess:
    """Runs `script` of this folder; starts it on first use, and again after a kill. The owner calls `close`."""

    def __init__(self, script: str, *, cpu_seconds: float, wall_seconds: float = _WALL_SECONDS) -> None:
        self._script = script
        self._cpu_seconds = cpu_seconds
        self._wall_seconds = wall_seconds
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the child now, so that the first request need not wait for it."""
        async with self._turn:
            await self._running()

    async def ask(self, request: Mapping[str, object]) -> dict[str, str]:
        """The script's answer. Raises ChildDied."""
        payload = json.dumps(request).encode()
        async with self._turn:
            return await self._ask(payload)

    async def close(self) -> None:
        """End the child."""
        async with self._turn:
            await self._end()

    async def _ask(self, payload: bytes) -> dict[str, str]:
        child = await self._running()
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("the child has no pipes")
        try:
            async with asyncio.timeout(self._wall_seconds):
                child.stdin.write(struct.pack(">I", len(payload)) + payload)
                await child.stdin.drain()
                size = struct.unpack(">I", await child.stdout.readexactly(4))[0]
                answer: dict[str, str] = json.loads(await child.stdout.readexactly(size))
                return answer
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            await self._end()
            raise ChildDied from None
        except asyncio.CancelledError:
            # Half an answer may be in the pipe.
            await self._end()
            raise

    async def _running(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(_FOLDER / "child_main.py"),
                str(_FOLDER / self._script),
                str(self._cpu_seconds),
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
