"""The tools that a request offers to the model, and which calls it may or must make. Values only, from both doors."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from services.gateway.chat_template import JsonValue

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


class ToolChoice(enum.Enum):
    """Whether the model may call, may not, must call something, or must call the named tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """One function; `parameters` is a JSON Schema of an object, None where it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, JsonValue] | None = None
    strict: bool = False

    def as_json(self) -> dict[str, JsonValue]:
        """The form that chat templates know."""
        function: dict[str, JsonValue] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class ToolRules:
    """What a request says about tools. `named` is set for NAMED only; `parallel` allows more than one call."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice.AUTO
    named: str = ""
    parallel: bool = True

    @property
    def active(self) -> bool:
        """The model is shown tools, and its calls are read."""
        return bool(self.tools) and self.choice is not ToolChoice.NONE

    @property
    def forced(self) -> bool:
        """The answer must be a call."""
        return self.choice in (ToolChoice.REQUIRED, ToolChoice.NAMED)

    @property
    def single(self) -> bool:
        """The answer ends with its first call: only one was allowed, or it was named."""
        return not self.parallel or self.choice is ToolChoice.NAMED

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Tools that the answer may call."""
        return tuple(tool for tool in self.tools if self.choice is not ToolChoice.NAMED or tool.name == self.named)


NO_TOOLS = ToolRules()
