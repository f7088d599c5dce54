"""Renders chat templates in one child process with a CPU limit (S7). Owned by wiring: `close` ends the child."""

from __future__ import annotations


class TemplateRenderer:
    """Starts its child on first use, again after a kill."""

    async def close(self) -> None:
        """End the child."""
