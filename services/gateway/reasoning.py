"""Models that think before they answer: the markers around their reasoning, and what a request may say about it. Pure.

A model reasons when its template writes `<think>` and its tokenizer has each marker as one token; reasoning is then
told apart, and counted, by token id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from services.common.errors import InvalidRequest, Unsupported
from services.gateway.chat_template import ChatTemplate, JsonValue
from services.gateway.tokenizer import Tokenizer

_OPEN, _CLOSE = "<think>", "</think>"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The tokens before and after reasoning."""

    open_id: int
    close_id: int

    def opened_by(self, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
        """The prompt itself ends with the opening marker, so that the answer begins inside reasoning."""
        for token_id in reversed(prompt):
            if not tokenizer.token_bytes(token_id).isspace():
                return token_id == self.open_id
        return False


def reasoning_markers(template: ChatTemplate | None, tokenizer: Tokenizer) -> ReasoningMarkers | None:
    """The markers of a model, None where it has none."""
    if template is None or _OPEN not in template.source:
        return None
    opening, closing = (tokenizer.encode_rendered(marker, "") for marker in (_OPEN, _CLOSE))
    return ReasoningMarkers(opening[0], closing[0]) if len(opening) == len(closing) == 1 else None


def reasoning_settings(
    effort: str | None, settings: Mapping[str, JsonValue], markers: ReasoningMarkers | None
) -> Mapping[str, JsonValue]:
    """Template settings with `reasoning_effort` in them; what the client set itself stays.

    `none` asks a model without reasoning for what it does anyway; any other effort is refused there.
    Raises InvalidRequest, Unsupported.
    """
    if effort is None:
        return settings
    if effort not in EFFORTS:
        known = ", ".join(EFFORTS)
        raise InvalidRequest(f"`reasoning_effort` must be one of {known}.", param="reasoning_effort")
    if markers is None:
        if effort == "none":
            return settings
        raise Unsupported("`reasoning_effort`: this model does not reason.", param="reasoning_effort")
    return {"enable_thinking": effort != "none", "reasoning_effort": effort, **settings}
