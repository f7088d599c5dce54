"""Renders chat templates in one child process with a CPU limit (S7). Owned by wiring: `close` ends the child."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.errors import InvalidRequest
from services.gateway.chat_template import ChatTemplate, Guarded
from services.gateway.child_process import ChildDied, ChildProcess

_CPU_SECONDS = 1.0
_WALL_SECONDS = 10.0


class TemplateRenderer:
    """Starts its child on first use, and again after a kill. One render at a time."""

    def __init__(self, *, wall_seconds: float = _WALL_SECONDS) -> None:
        self._child = ChildProcess("template_child.py", cpu_seconds=_CPU_SECONDS, wall_seconds=wall_seconds)

    async def start(self) -> None:
        """Start the child now, so that the first request need not wait for it."""
        await self._child.start()

    async def render(self, template: ChatTemplate, guarded: Guarded) -> str:
        """The prompt, guard characters included. Raises InvalidRequest, with the template's words when it refuses."""
        answer = await self._ask({"source": template.source, "variables": guarded.variables})
        if "text" in answer:
            return answer["text"]
        if "refused" in answer:
            raise InvalidRequest(answer["refused"].replace(guarded.guard, ""), param="messages")
        raise InvalidRequest(
            f"The model's chat template cannot render these messages ({answer['failed']}).", param="messages"
        )

    async def close(self) -> None:
        """End the child."""
        await self._child.close()

    async def _ask(self, request: Mapping[str, object]) -> dict[str, str]:
        try:
            return await self._child.ask(request)
        except ChildDied:
            return {"failed": "it took too long"}
